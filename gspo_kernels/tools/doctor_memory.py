"""`gspo doctor --memory`: what sizes of `cache_mib` save, and a bound of the loss's memory. No batch is allocated."""

from __future__ import annotations

import math
from bisect import bisect_left
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..backends import dispatch
from ..backends.rows import HeadRows
from ..backends.workspace import workspace_bytes
from ..validation import Call

MIB = 2**20
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the cache that holds the exponentials of all rows
# The RL-like step: 3 of 8 sequences have no gradient. 2 of them have advantage 0, which is known before the forward, so
# nothing is kept for them. 1 is clipped, and takes room in the cache.
LIVE, MAY_BE_LIVE = 5 / 8, 6 / 8


@dataclass(frozen=True)
class Bound:
    """An upper bound of the memory of forward and backward on top of the inputs, in bytes. docs/limits.md has it."""

    gradients: int  # of hidden states and head, in their dtype
    hidden_copies: int  # sums in fp32 and gathered rows, as large as the hidden states
    tile_table: int  # an fp32 number per row and vocabulary tile, with entropies two
    workspace: int
    cache: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.gradients + self.hidden_copies + self.tile_table + self.workspace + self.cache


@dataclass(frozen=True)
class Size:
    """A size of the cache, and the matrix passes of forward and backward with it."""

    cache_mib: int
    kept_rows: float  # share of the batch's rows whose exponentials fit
    passes_dense: float
    passes_rl_like: float
    peak_mib: float  # upper bound, as `Bound.total`


def shape_only(rows: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> HeadRows:
    """Return a head with the shapes of a batch. Call this under a FakeTensorMode, so that nothing is allocated."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    ids, mask = empty(rows, of=torch.int64), empty(rows, of=torch.bool)
    return HeadRows(empty(rows, width), empty(vocab, width), None, None, None, ids, mask, None, 1.0, None, vocab, False)


def bound(head: HeadRows, backend: str, cache_bytes: int) -> Bound:
    """Return the bound for a head without bias and adapter, whose operands both need gradients."""
    (rows, width), item = head.hidden.shape, head.hidden.dtype.itemsize
    wide = max(item, 4)
    # Both backends sum the gradient of the hidden states in fp32; Triton rounds it in place. torch gathers all rows.
    extra = wide - item if backend == "triton" else wide + item
    return Bound(
        gradients=(rows + head.weight.shape[0]) * width * item,
        hidden_copies=rows * width * extra,
        tile_table=_tiles(head, backend) * rows * wide * (2 if head.entropy else 1),
        workspace=workspace_bytes(),
        cache=cache_bytes,
    )


def _tiles(head: HeadRows, backend: str) -> int:
    """Return the number of vocabulary tiles of the forward."""
    if backend == "torch":
        from ..backends.torch.tiles import slab_columns

        return -(-head.vocab_size // slab_columns(head))
    from ..backends.triton.tuning import tile_config

    return -(-head.vocab_size // tile_config(head, "forward").block_v)


def full_cache_mib(head: HeadRows, backend: str) -> int:
    """Return the least `cache_mib` with which the exponentials of all rows fit."""
    kernels, n = dispatch.implementation(backend), head.hidden.shape[0]
    # Row blocks and tiles are padded to fewer than 65,536 rows and columns each.
    most = (n + 2**16) * (head.vocab_size + 2**16) * head.hidden.dtype.itemsize // MIB
    return bisect_left(range(most + 1), n, key=lambda mib: kernels.cache_rows(head, mib * MIB))


def passes(kept_rows: float) -> tuple[float, float]:
    """Return the passes of a dense and an RL-like step, if a share `kept_rows` of the batch's rows fits the cache.

    A forward is one pass. A backward takes two for each live row, and a third if its logits are recomputed.
    """
    of_rl_like = min(1.0, kept_rows / MAY_BE_LIVE)  # if the clipped sequences lie anywhere in the batch
    return 1 + (2 + 1 - kept_rows), 1 + LIVE * (2 + 1 - of_rl_like)


def sizes(head: HeadRows, backend: str) -> list[Size]:
    """Return what cache sizes from 0 to that of all rows save."""
    kernels, n = dispatch.implementation(backend), head.hidden.shape[0]
    full, out = full_cache_mib(head, backend), []
    for mib in sorted({math.ceil(share * full) for share in SHARES}):
        kept = min(kernels.cache_rows(head, mib * MIB), n) / n
        out.append(Size(mib, kept, *passes(kept), bound(head, backend, mib * MIB).total / MIB))
    return out


def plan(
    batch: tuple[int, int, int], dtype: torch.dtype | None, architecture: str | None
) -> tuple[str, list[Size], Bound]:
    """Return a line that describes a batch (N, H, V) and its backend, its sizes of the cache, and its bound without."""
    device = torch.device("cuda" if torch.cuda.is_available() and architecture is None else "cpu")
    backend = "triton" if architecture else dispatch.pick_backend(Call("gspo doctor"), "auto", device)
    dtype = dtype or (torch.bfloat16 if backend == "triton" else torch.float32)
    with _assumed(architecture), FakeTensorMode():
        head = shape_only(*batch, dtype, device)
        rows, without = sizes(head, backend), bound(head, backend, 0)
    (n, width, vocab), name = batch, str(dtype).removeprefix("torch.")
    where = f"{n:,} tokens, H = {width:,}, V = {vocab:,}, {name}, {backend} backend, {architecture or device.type}"
    return where, rows, without


def _assumed(architecture: str | None) -> Any:
    """Return a context in which the Triton backend uses the block shapes of `architecture`, if any."""
    if architecture is None:
        return nullcontext()
    from ..backends.triton.tuning import assume

    return assume(architecture)
