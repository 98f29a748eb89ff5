"""Peak memory, counted on meta tensors of real sizes: the formula of docs/limits.md and of `gspo doctor --memory`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import compile_cases as cases
from helpers.counters import LiveBytes
from helpers.features import DTYPES
from helpers.head_rows import NEEDS
from helpers.marks import slow
from torch import Tensor

from gspo_kernels import memory
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.rows import Cache, NeedsGradient
from gspo_kernels.backends.torch import tiles
from gspo_kernels.backends.triton import tuning

MIB = 2**20
TABLES = [name for name in tuning.ARCHITECTURES if name not in tuning.SAME_AS]
OF_24_GIB, OF_AN_H100 = 384, 1266  # the default cache in MiB
# Architecture, dtype, cache in MiB, and options of the head.
Case = tuple[str, str, int, dict[str, Any]]
HOPPER: list[Case] = [
    *(("sm_90", dtype, 0, dict(entropy=entropy)) for dtype in ("bf16", "fp32") for entropy in (False, True)),
    ("sm_90", "bf16", 8000, dict(entropy=True)),
    ("sm_90", "fp32", OF_AN_H100, dict(split="both")),
]
OTHERS: list[Case] = [
    *((name, "bf16", OF_AN_H100, {}) for name in TABLES),
    *((name, "fp32", OF_24_GIB, {}) for name in TABLES),
    *(("gfx942", "bf16", 0, options) for options in ({}, dict(entropy=True), dict(bias=True), dict(rank=16))),
]


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        *(((512, 2304, 256_000), case) for case in HOPPER + OTHERS),
        *(slow((8192, 4096, 151_936), case) for case in HOPPER + OTHERS),
        *(slow((131_072, 4096, 262_144), case) for case in HOPPER),
    ],
    ids=str,
)
def test_triton_stays_within_the_formula(
    shape: tuple[int, int, int], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    (n, h, v), (architecture, dtype, cache_mib, options) = shape, case
    if architecture.startswith("gfx"):
        monkeypatch.setattr(torch.version, "hip", "7.0")
    head = cases.meta_head(dtype=DTYPES[dtype], rows=n, width=h, vocab=v, **options)
    needs = NeedsGradient(*(getattr(head, name) is not None for name in NeedsGradient._fields))
    with tuning.assume(architecture), LiveBytes() as live:
        rows = triton_backend.cache_rows(head, cache_mib * MIB)
        result, cached = triton_backend.forward_and_cache(head, cache=Cache(rows, head.mask) if rows else None)
        d_entropy = torch.empty_like(result.entropy) if head.entropy else None
        triton_backend.head_backward(head, result, torch.empty_like(result.log_probs), d_entropy, needs, cached=cached)
        bound = memory.bound(head, "triton", cache_mib * MIB)
        of_tiles = 4 * n * -(-v // tuning.tile_config(head, "forward").block_v) * (2 if head.entropy else 1)
    size = DTYPES[dtype].itemsize
    of_rows = 10 if head.split else 4 - size
    assert bound.total == (n + v) * h * size + n * h * of_rows + of_tiles + (256 + cache_mib) * MIB
    # Without a cache, the tile table is freed before the gradients are allocated.
    assert bound.peak == bound.total - (0 if cache_mib else min(of_tiles, (n + v) * h * size + n * h * of_rows))
    # Gradients of a bias and of an adapter are fp32 and come in addition.
    added = (4 + size) * v * (head.bias is not None) + (4 + 4) * (n + v) * options.get("rank", 0)
    assert bound.gradients + cached.exponentials.nbytes <= live.peak <= bound.peak + added
    assert (rows > 0) == (cache_mib > 0)


@pytest.mark.parametrize(("n", "h", "v"), [(131_072, 4096, 262_144), (32_768, 896, 151_936)])
def test_triton_with_a_budget_stays_within_the_formula(n: int, h: int, v: int) -> None:
    """Measure the choice of cells, and then a backward with a list of all cells."""
    head = cases.meta_head(rows=n, width=h, vocab=v)
    with tuning.assume("sm_90"), LiveBytes() as live:
        result, cached = triton_backend.forward_and_cache(head, tile_mass=True)
        cell = triton_backend.cell_shape(head)
        assert cell is not None
        triton_backend.choose(head, result, result.log_probs, cached, cell, 1e-3)
        forward = live.peak
        del result, cached
        live.peak = live.now
        cases.backward_of_cells(head, all_cells=True)
        bound = memory.bound(head, "triton", 0)
    assert forward <= bound.total and bound.gradients <= live.peak <= bound.total


def product_on_a_gpu(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of meta tensors in fp32, as CUDA returns it."""
    return torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device="meta")


@pytest.mark.parametrize("copies", [False, slow(True)], ids=["CUDA", "ROCm"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("n", "h", "v"), [(8192, 4096, 151_936), (4096, 896, 151_936), (2048, 8192, 32_000), (700, 8192, 128_256)]
)
def test_the_torch_backend_on_a_gpu_stays_within_the_formula(
    n: int, h: int, v: int, dtype: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are copied in fp32 on ROCm, and multiplied as they are on CUDA."""

    def operand_dtype(device: torch.device, of: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if copies else of

    def all_rows(mask: Any) -> Tensor:
        return torch.arange(n, device="meta")[:, None]

    monkeypatch.setattr(tiles, "operand_dtype", operand_dtype)
    monkeypatch.setattr(tiles, "_product", product_on_a_gpu)
    monkeypatch.setattr(torch.Tensor, "nonzero", all_rows)
    head = cases.meta_head(dtype=DTYPES[dtype], rows=n, width=h, vocab=v)
    with LiveBytes() as live:
        result, cached = torch_backend.forward_and_cache(head)
        torch_backend.head_backward(head, result, torch.empty_like(result.log_probs), None, NEEDS, None, cached)
        bound = memory.bound(head, "torch", 0)
    assert bound.gradients < live.peak <= bound.total
