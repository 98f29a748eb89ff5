"""Memory of the torch backend on a GPU, counted on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes
from helpers.head_rows import NEEDS, head_rows
from helpers.marks import slow
from helpers.oracle import DTYPES
from helpers.tile_choices import small_tiles
from torch import Tensor

from gspo_kernels import memory
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends.rows import Cache
from gspo_kernels.backends.torch import tiles
from gspo_kernels.tools.doctor import compile_cases as cases


def product_on_a_gpu(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of meta tensors in fp32, as CUDA returns it."""
    return torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device="meta")


@pytest.mark.parametrize("copies", [False, slow(True)], ids=["CUDA", "ROCm"])
@pytest.mark.parametrize("dtype", ["bf16", slow("fp16"), "fp32"])
@pytest.mark.parametrize(
    ("n", "h", "v"), [(8192, 4096, 151_936), (4096, 896, 151_936), (2048, 8192, 32_000), (700, 8192, 128_256)]
)
def test_memory_on_a_gpu_is_within_the_formula(
    n: int, h: int, v: int, dtype: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula of docs/limits.md. Operands are copied in fp32 on ROCm, and multiplied as they are on CUDA."""

    def operand_dtype(device: torch.device, of: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if copies else of

    def all_rows(mask: Any) -> Tensor:
        return torch.arange(n, device="meta")[:, None]

    monkeypatch.setattr(tiles, "operand_dtype", operand_dtype)
    monkeypatch.setattr(tiles, "_product", product_on_a_gpu)
    monkeypatch.setattr(torch.Tensor, "nonzero", all_rows)
    head = cases.meta_head(dtype=DTYPES[dtype], rows=n, width=h, vocab=v)
    with LiveBytes() as live:
        result, kept = torch_backend.forward_and_keep(head)
        torch_backend.head_backward(head, result, torch.empty_like(result.log_probs), None, NEEDS, None, kept)
        bound = memory.bound(head, "torch", 0)
    assert bound.gradients < live.peak <= bound.total


def test_the_host_reads_the_places_of_kept_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would make the host wait at each read. The backward has 2 chunks of rows and 5 slabs."""
    reads: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def read(x: Tensor) -> Any:
            reads.append(name)
            return method(x)

        return read

    head = head_rows(32, 24, 240)
    with small_tiles(16, 48):
        result, kept = torch_backend.forward_and_keep(head, cache=Cache(32, head.mask))
        for name in ("__int__", "__bool__", "__index__", "item", "tolist"):
            monkeypatch.setattr(torch.Tensor, name, counted(name))
        torch_backend.head_backward(head, result, torch.ones(32), None, NEEDS, None, kept)
    monkeypatch.undo()
    assert reads.count("tolist") == 1 and reads.count("__int__") == 1 and not reads.count("__bool__")
