"""Unusual tensors and missing packages raise our errors, not PyTorch's. PyTorch's precision settings are restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from gspo_kernels import linear_log_probs, policy_loss
from gspo_kernels.advantages import group_advantages
from gspo_kernels.backends.precision import exact_products
from gspo_kernels.sampler_mismatch import importance_weights

B, T, H, V = 2, 3, 8, 11


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    """Return a nested tensor of the dtype of `x`. If `x` has two or more dimensions, the result has as many."""
    inner = x.new_zeros(2, *x.shape[2:]), x.new_zeros(3, *x.shape[2:])
    return torch.nested.nested_tensor(list(inner), layout=layout)


ONES = torch.ones(B, T)
HIDDEN = torch.ones(B, T, H)
WEIGHT = torch.ones(V, H)
IDS = torch.ones(B, T).long()
CALLS_WITH_A_NESTED_TENSOR: dict[str, Callable[[Tensor], object]] = {
    "hidden": lambda x: linear_log_probs(x, WEIGHT, IDS),
    "lm_head": lambda x: linear_log_probs(HIDDEN, x, IDS),
    "target_ids": lambda x: linear_log_probs(HIDDEN, WEIGHT, x.long()),
    "log_probs": lambda x: policy_loss(x, torch.ones(B)),
    "mask": lambda x: importance_weights(ONES, ONES, x),
    "rewards": lambda x: group_advantages(x, 2),
}


@pytest.mark.parametrize("name", CALLS_WITH_A_NESTED_TENSOR)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named(layout: torch.layout, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor .*, got a nested tensor$"):
        CALLS_WITH_A_NESTED_TENSOR[name](nested(HIDDEN if name == "hidden" else ONES, layout))


@pytest.mark.parametrize("in_module", [False, True])
def test_a_quantized_weight_is_named(in_module: bool) -> None:
    # This tensor consists of other tensors, as torchao's quantized weights do. Custom operators do not accept it.
    weight = TwoTensor(torch.randn(V, H), torch.randn(V, H))
    head: Any = weight
    if in_module:
        head = nn.Linear(H, V, bias=False)
        head.weight = nn.Parameter(weight)
    with pytest.raises(
        TypeError, match=r"linear_log_probs: lm_head must be a plain tensor .* got a TwoTensor of torch"
    ):
        linear_log_probs(torch.randn(B, T, H), head, torch.zeros(B, T, dtype=torch.int64))


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
