"""The backward of the Triton backend where PyTorch may refuse an fp32 product of half-precision operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes
from helpers.features import DTYPES
from helpers.marks import slow
from helpers.random_heads import random_head
from tolerance import CELL_PRODUCTS_RELATIVE, PRODUCT_OF_COPIES_ABSOLUTE, PRODUCT_OF_COPIES_RELATIVE
from torch import Tensor

from gspo_kernels.backends import precision
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.rows import Cache, HeadGradients, HeadRows, LiveTiles, NeedsGradient
from gspo_kernels.backends.torch.tiles import operand_dtype
from gspo_kernels.backends.triton import backward, gradient_rows, tuning
from gspo_kernels.backends.triton.launch import launches

PRODUCTS = {"hidden_product", "weight_product"}
HALF = pytest.mark.parametrize("dtype", ["bf16", slow("fp16")])


def needs_of(head: HeadRows) -> NeedsGradient:
    return NeedsGradient(*(getattr(head, name) is not None for name in NeedsGradient._fields))


def gradients(
    head: HeadRows, d: Tensor, kept_bytes: int = 0, choice: LiveTiles | None = None
) -> tuple[HeadGradients, set[str]]:
    """Return the gradients with AMD's block shapes, and the names of the kernels of the backward."""
    with tuning.assume("gfx942"):
        rows = triton_backend.cache_rows(head, kept_bytes)
        result, cached = triton_backend.forward_and_cache(head, cache=Cache(rows, head.mask) if rows else None)
        d_entropy = d / 3 if head.entropy else None
        with launches() as seen:
            out = triton_backend.head_backward(head, result, d, d_entropy, needs_of(head), choice, cached)
    return out, {x.kernel.__name__ for x in seen}


def upstream(head: HeadRows) -> Tensor:
    """Return gradients of log-probs, 0 at masked rows and at every third row."""
    d = torch.randn(len(head.mask), generator=torch.Generator().manual_seed(5))
    return torch.where(head.mask & (torch.arange(len(d)) % 3 != 0), d, 0)


def equal(ours: HeadGradients, dense: HeadGradients, dtype: str) -> None:
    for a, b in zip(ours, dense, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (
                a.dtype == b.dtype
                and (a - b).float().norm() <= CELL_PRODUCTS_RELATIVE[DTYPES[dtype]] * b.float().norm()
            )


@HALF
@pytest.mark.parametrize("kept_bytes", [0, 140 * 512 * 2])
@pytest.mark.parametrize("workspace", [None, 2**15])
def test_plain_heads_are_multiplied_by_our_kernels(
    dtype: str, kept_bytes: int, workspace: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small workspace divides the cells into several chunks and slabs."""
    head = random_head(300, 24, 410, DTYPES[dtype], logit_softcap=9.0)
    d = upstream(head)
    with monkeypatch.context() as patched:
        patched.setattr(backward, "_sums_in_kernels", lambda rows: False)
        dense, kernels = gradients(head, d, kept_bytes)
        assert not kernels & PRODUCTS
    if workspace is not None:
        head = head._replace(workspace=workspace)
    monkeypatch.setattr(backward, "add_product", None)  # it is not called
    ours, kernels = gradients(head, d, kept_bytes)
    assert kernels >= PRODUCTS and ("cached_tile" in kernels) == (kept_bytes > 0)
    equal(ours, dense, dtype)
    assert ours.hidden is not None and not ours.hidden[d == 0].any()


@HALF
def test_a_captured_backward_launches_the_same_kernels_and_reads_nothing(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(300, 24, 410, DTYPES[dtype])
    d = upstream(head)
    expected, kernels = gradients(head, d)
    for module in (gradient_rows, backward):
        monkeypatch.setattr(module, "may_read", lambda x: False)
    for name in ("item", "tolist", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host reads a tensor"))
    captured, same = gradients(head, d)
    monkeypatch.undo()
    assert same == kernels
    equal(captured, expected, dtype)


def test_tunable_op_takes_the_kernels_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTORCH_TUNABLEOP_ENABLED=1, PyTorch raises an error for these products. CPU builds have no TunableOp."""
    head = random_head(140, 24, 300, torch.bfloat16)
    result = triton_backend.head_forward(head)

    def kernels() -> set[str]:
        with launches() as seen:
            triton_backend.head_backward(head, result, upstream(head), None, needs_of(head))
        return {x.kernel.__name__ for x in seen}

    assert not kernels() & PRODUCTS
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for is_enabled in (False, True):
        monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda answer=is_enabled: answer)
        assert bool(kernels() & PRODUCTS) == is_enabled
        operands = operand_dtype(torch.device("cuda"), torch.bfloat16, torch.float32)
        assert operands == (torch.float32 if is_enabled else torch.bfloat16)


@pytest.mark.parametrize("options", [dict(entropy=True), dict(bias=True), dict(rank=4)])
def test_other_heads_and_fp32_are_multiplied_by_torch(options: dict[str, Any]) -> None:
    for dtype, changed in ((torch.bfloat16, options), (torch.float32, {})):
        head = random_head(140, 24, 300, dtype, **changed)
        assert not gradients(head, upstream(head))[1] & PRODUCTS


@HALF
@pytest.mark.parametrize("first", [False, True])
def test_products_of_copies_are_complete(dtype: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of 1,000 columns take several parts. The first product does not read what it overwrites."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=rng).to(DTYPES[dtype]) for shape in ((70, 1000), (1000, 90)))
    before = torch.full((70, 90), torch.nan) if first else torch.randn(70, 90, generator=rng)
    monkeypatch.setattr(precision, "bytes_of_copies", lambda: 170 * 4 * 64)
    out = before.clone()
    with LiveBytes() as live:
        precision.add_product(out, a, b, first)
    assert 0 < live.peak <= 170 * 4 * 64
    expected = a.double() @ b.double()
    torch.testing.assert_close(
        out,
        (expected if first else expected + before).float(),
        rtol=PRODUCT_OF_COPIES_RELATIVE,
        atol=PRODUCT_OF_COPIES_ABSOLUTE,
    )
