"""Products are exact whatever precision the process has set, and PyTorch's settings are restored."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gspo_kernels.backends.precision import exact_products


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


BACKENDS: Any = torch.backends  # PyTorch does not declare all of its settings
CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["high", "medium", "highest"])
@pytest.mark.usefixtures("matmul_precision")
def test_products_are_exact_inside_and_the_setting_is_restored(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)

    def settings() -> list[Any]:
        matmul = BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul
        return [torch.get_float32_matmul_precision(), matmul[0].allow_tf32, *(x.fp32_precision for x in matmul)]

    before = settings()
    for device in (CPU, torch.device("cuda")):
        with pytest.raises(MemoryError), exact_products(device):
            assert settings() == ["highest", False, "ieee", "ieee"]
            raise MemoryError
        assert settings() == before


@pytest.mark.usefixtures("matmul_precision")
def test_a_thread_that_leaves_first_does_not_restore_the_setting_of_another() -> None:
    entered, other_has_left = threading.Event(), threading.Event()
    inside: list[str] = []

    def second() -> None:
        with exact_products(CPU):
            entered.set()
            assert other_has_left.wait(20)
            inside.append(BACKENDS.mkldnn.matmul.fp32_precision)

    torch.set_float32_matmul_precision("medium")
    before = BACKENDS.mkldnn.matmul.fp32_precision
    thread = threading.Thread(target=second)
    with exact_products(CPU):
        thread.start()
        assert entered.wait(20)
    other_has_left.set()
    thread.join(20)
    assert inside == ["ieee"]
    assert BACKENDS.mkldnn.matmul.fp32_precision == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("matmul_precision")
def test_a_process_forked_while_a_thread_computes_restores_the_setting() -> None:
    entered, forked = threading.Event(), threading.Event()

    def other() -> None:
        with exact_products(CPU):
            entered.set()
            forked.wait(20)

    torch.set_float32_matmul_precision("medium")
    before = BACKENDS.mkldnn.matmul.fp32_precision
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    child = os.fork()
    if child == 0:
        with exact_products(CPU):
            pass
        restored = (torch.get_float32_matmul_precision(), BACKENDS.mkldnn.matmul.fp32_precision)
        os._exit(0 if restored == ("medium", before) else 1)
    forked.set()
    thread.join(20)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("matmul_precision")
def test_precision_settings_per_backend_are_restored() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"  # now get_float32_matmul_precision raises
    with exact_products(torch.device("cuda")):
        assert BACKENDS.cuda.matmul.allow_tf32 is False
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize(("reduced", "split_k"), [(True, True), (False, True), (False, False)])
def test_settings_of_bf16_sums_on_cuda_are_restored(reduced: bool, split_k: bool) -> None:
    """Batch-invariant inference disables both. A backward must not enable split-K for the rest of the process."""
    matmul = BACKENDS.cuda.matmul
    settings = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
    before = settings()
    try:
        matmul.allow_bf16_reduced_precision_reduction = (reduced, split_k)
        requested = settings()
        with exact_products(torch.device("cuda")):
            assert settings() == (False, split_k)
        assert settings() == requested
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
