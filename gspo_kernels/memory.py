"""The cost of a batch: an upper bound on memory, and what `cache_mib` saves. Nothing is allocated.

`gspo doctor --memory` prints these numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .backends import dispatch
from .backends.rows import HeadRows, NeedsGradient
from .backends.workspace import CACHE_DIVISOR, cache_of_device, cache_variable, workspace_bytes
from .layout import accumulator
from .ranks.shards import Shard, shard_of
from .validation import TensorChecks

MIB = 2**20
PADDED_TO = 128  # Megatron's default for --make-vocab-size-divisible-by, which it multiplies by the number of ranks
MEMORY_GIB = (80, 140)  # GPU memory sizes for which the plan lists the default cache if this machine has no GPU
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # cache sizes in the table, as shares of a cache for all rows
NARROWEST_TILE = 128  # columns, of all block shapes for half precision and fp32
TILE_OF_TRL = (4096, 32768)  # rows and columns of a tile of logits in TRL 1.16's head
_min: Any = torch.sym_min  # torch.compile may replace the number of tokens by a symbol
_max: Any = torch.sym_max


@dataclass(frozen=True)
class Bound:
    """An upper bound on the memory of forward and backward beyond the inputs, in bytes (docs/limits.md)."""

    gradients: int  # of hidden states and head, in their dtype
    hidden_copies: int  # fp32 sums and gathered rows, in the shape of the hidden states
    tile_table: int  # results of vocabulary tiles: unsharded, one fp32 number per row and tile, two with entropies
    workspace: int
    cache: int

    @property
    def total(self) -> int:
        return self.gradients + self.hidden_copies + self.tile_table + self.workspace + self.cache

    @property
    def peak(self) -> int:
        """Lower than `total` without a cache, because the table is freed before the gradients are allocated."""
        return self.total - (0 if self.cache else min(self.tile_table, self.gradients + self.hidden_copies))


@dataclass(frozen=True)
class Size:
    """A cache size, and the matrix passes of forward and backward with it, if every row has a gradient."""

    cache_mib: int
    kept_rows: float  # share of the rows whose exponentials fit
    passes: float
    peak_mib: float  # upper bound, `Bound.peak`


class Batch(NamedTuple):
    """The sizes of a batch, and the number of ranks that share the vocabulary."""

    tokens: int  # N
    width: int  # H
    vocab: int  # V, without padding
    tp: int = 1

    @property
    def rows_of_weight(self) -> int:
        """Rows of the head on each rank. With several ranks, V is padded to a multiple of 128 * tp."""
        return self.vocab if self.tp == 1 else -(-self.vocab // (PADDED_TO * self.tp)) * PADDED_TO

    def head(self, dtype: torch.dtype, device: torch.device | str = "cpu", entropy: bool = False) -> HeadRows:
        """Make the head of rank 0. Call it under a FakeTensorMode to allocate nothing."""

        def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device=device)

        n = self.tokens
        ids = empty(n, of=torch.int64)
        mask = empty(n, of=torch.bool)
        hidden, weight = empty(n, self.width), empty(self.rows_of_weight, self.width)
        shard = Shard("", 0, self.tp, self.rows_of_weight, self.vocab)
        text, columns = (shard.text, shard.columns()) if self.tp > 1 else ("", self.vocab)
        return HeadRows(hidden, weight, None, None, None, ids, mask, None, 1.0, None, columns, entropy, text)


def bound(head: HeadRows, backend: str, cache_bytes: int, frozen: bool = False, tile_width: int | None = None) -> Bound:
    """Compute the bound for a head without bias or adapter. Hidden states need a gradient.

    Args:
        head: the head of one rank.
        backend: "torch" or "triton".
        cache_bytes: size of the cache.
        frozen: the head needs no gradient, as with LoRA on other layers.
        tile_width: columns of the forward's tiles; None: those of this backend and GPU.
    """
    rows, width = head.hidden.shape
    item = head.hidden.dtype.itemsize
    wide = max(item, 4)
    # Both backends sum d_hidden in fp32; Triton rounds it in place. The torch backend gathers all rows.
    extra = wide - item if backend == "triton" else wide + item
    extra += 10 if head.split else 0  # a copy in fp32 and three parts in bf16
    return Bound(
        gradients=(rows + (0 if frozen else _rows_of_weight(head))) * width * item,
        hidden_copies=rows * width * extra,
        tile_table=_tile_table(head, backend, tile_width or _tile_width(head, backend)),
        workspace=workspace_bytes(),
        cache=cache_bytes,
    )


def trl_head_bytes(tokens: int, width: int, vocab: int, item: int, frozen: bool = False, weight_item: int = 0) -> int:
    """Peak memory of TRL 1.16's fused head on a GPU beyond its inputs, in bytes, without vectors of N numbers.

    The head sums both gradients in fp32, then rounds them to the dtype of the operands, and has one tile of logits:

        (4 + r) H (N + V) + item * min(N, 4,096) * 32,768

    r is the size of an operand's element, or 0 in fp32, which needs no rounded copy. For a frozen head,
    V is 0 in this formula. Under autocast, r is 0, and the head casts two parts of the weight and one of the rows.

    Args:
        tokens: N, the unmasked tokens.
        width: H.
        vocab: V.
        item: bytes per element of the operands, under autocast after the cast.
        frozen: the head needs no gradient.
        weight_item: bytes per element of the weight before autocast casts it; 0: it is not cast.
    """
    rows, columns = TILE_OF_TRL
    rounded = weight_item or item
    sums = (4 + (rounded if rounded != 4 else 0)) * width * (tokens + (0 if frozen else vocab))
    tile_rows = _min(tokens, rows)
    cast = (min(2 * columns, vocab) + tile_rows) * width * item if weight_item else 0
    return sums + item * tile_rows * columns + cast


def full_logits_bytes(tokens: int, width: int, vocab: int, item: int, frozen: bool = False) -> int:
    """Lower bound on the peak memory of full logits beyond the inputs, in bytes.

    The backward of the softmax has three tensors [N, V] in the dtype of the logits; then the gradients of the operands
    are computed from one of them. Full logits that are cast to fp32 take more.
    """
    logits = item * tokens * vocab
    return _max(3 * logits, logits + item * width * (tokens + (0 if frozen else vocab)))


def largest_default_cache(head: HeadRows, needs: NeedsGradient, backend: str, weight_item: int = 0) -> int:
    """The largest default of `cache_mib` in bytes: with it, the loss takes no more memory than what it replaces.

        min(TRL's head, full logits) - `bound` without a cache

    TRL's head does not support a tp_group, so with one, only full logits count. It computes unmasked tokens only, and
    copies their hidden states. The host does not know how many tokens are unmasked, so half of them are assumed.

    Under autocast, both sides include the cast operands. Once the cache is free, autograd copies the head's gradient to
    fp32. If that peak is larger than the minimum, it replaces it: up to there, a cache adds nothing to a step's peak.

    The result is at least 1, which holds no row, because ranks of a cp_group must agree whether there is a cache.

    Args:
        head: the head of one rank.
        needs: which operands need gradients.
        backend: "torch" or "triton".
        weight_item: bytes per element of the weight before autocast casts it; 0: it is not cast.
    """
    rows, width = head.hidden.shape
    vocab = _rows_of_weight(head)
    item = head.hidden.dtype.itemsize
    frozen = not needs.weight
    cast = (rows + vocab) * width * item if weight_item else 0
    replaced = full_logits_bytes(rows, width, vocab, item, frozen) + cast
    if not head.shard:
        unmasked = (rows + 1) // 2
        of_trl = trl_head_bytes(unmasked, width, vocab, item, frozen, weight_item) + unmasked * width * item
        replaced = _min(replaced, of_trl)
    if weight_item:
        later = (rows * item + (0 if frozen else vocab * (item + weight_item))) * width
        replaced = _max(replaced, later)
    ours = bound(head, backend, 0, frozen, NARROWEST_TILE).total + cast
    return _max(replaced - ours, 1)


def _tile_width(head: HeadRows, backend: str) -> int:
    """Width of the forward's vocabulary tiles, in columns."""
    if backend == "torch":
        from .backends.torch.tiles import tiling

        return tiling(head).columns
    from .backends.triton.tuning import tile_config

    return tile_config(head, "forward").block_v


def _rows_of_weight(head: HeadRows) -> int:
    """Rows of the head on this rank. If ranks have different numbers of rows, the largest number."""
    return shard_of(head.shard).rows if head.shard else head.weight.shape[0]


def _tile_table(head: HeadRows, backend: str, width: int) -> int:
    """Upper bound on the size of the table of tile results, in bytes, for tiles of `width` columns."""
    rows = _gathered_rows(head, backend)
    numbers = 3 if head.entropy else 2
    size = rows * accumulator(head.hidden.dtype).itemsize
    if not head.shard:
        return -(-head.vocab_size // width) * size * (numbers - 1)
    # While results are reordered, two copies of this rank's results and two copies of all ranks' results are alive.
    tiles = shard_of(head.shard).tiles(width)
    return size * (numbers * (tiles[0] * (2 + len(tiles)) + sum(tiles)) + 3 * len(tiles))


def _gathered_rows(head: HeadRows, backend: str) -> int:
    """Number of rows in the table of tile results. The torch backend pads it to full tiles."""
    if backend == "triton":
        return head.hidden.shape[0]
    from .backends.torch.tiles import tiling

    rows = tiling(head).rows
    return -(-head.hidden.shape[0] // rows) * rows


def full_cache_mib(head: HeadRows, backend: str) -> int:
    """The smallest `cache_mib` that holds the exponentials of all rows."""
    kernels = dispatch.implementation(backend)
    n = head.hidden.shape[0]
    # Padding adds fewer than 65,536 rows and 65,536 columns.
    most = (n + 2**16) * (head.vocab_size + 2**16) * head.hidden.dtype.itemsize // MIB
    return bisect_left(range(most + 1), n, key=lambda mib: kernels.cache_rows(head, mib * MIB))


def size(head: HeadRows, backend: str, cache_mib: int, full_mib: int, frozen: bool = False) -> Size:
    """Compute the passes and the peak memory of a step with `cache_mib`. A cache for all rows takes `full_mib`.

    The forward is one pass. The backward takes one for the gradient of the hidden states, one for the head's unless the
    head is frozen, and another for rows whose logits are recomputed.
    """
    n = head.hidden.shape[0]
    kept = min(dispatch.implementation(backend).cache_rows(head, cache_mib * MIB), n) / n
    passes = 1 + (1 if frozen else 2) + (1 - kept)
    return Size(cache_mib, kept, passes, bound(head, backend, min(cache_mib, full_mib) * MIB, frozen).peak / MIB)


def sizes(head: HeadRows, backend: str, frozen: bool = False) -> list[Size]:
    """Compute passes and peak memory for several cache sizes, from no cache to a cache for all rows."""
    full = full_cache_mib(head, backend)
    return [size(head, backend, mib, full, frozen) for mib in sorted({math.ceil(share * full) for share in SHARES})]


def default_caches(device: torch.device, architecture: str | None, largest: int) -> dict[str, int]:
    """Defaults of `cache_mib` in MiB, by their source. If the GPU is not in this machine, one for each of MEMORY_GIB.

    `largest`: `largest_default_cache`, in MiB.
    """
    mib = cache_variable()
    if mib is not None:
        return {"GSPO_CACHE_MIB": mib}
    if architecture is None and device.type != "cuda":
        return {f"on a {device.type.upper()}": 0}
    of_gpus = {f"on a GPU with {gib} GiB": gib * 1024 // CACHE_DIVISOR for gib in MEMORY_GIB}
    if architecture is None:
        of_gpus = {f"on this {torch.cuda.get_device_name(device)}": cache_of_device(device)}
    return {where: min(mib, largest) for where, mib in of_gpus.items()}


@dataclass(frozen=True)
class Plan:
    """What `gspo doctor --memory` prints."""

    where: str  # the batch and the backend
    device: str  # an architecture, or "cuda" or "cpu" for this machine
    sizes: list[Size]
    defaults: dict[str, Size]  # by the keys of `default_caches`
    stock: int  # bytes of TRL 1.16's head
    frozen: bool
    bound: Bound  # without a cache
    inputs: dict[str, int]  # bytes of the hidden states and of the head


def plan(batch: Batch, dtype: torch.dtype | None, architecture: str | None, frozen: bool = False) -> Plan:
    """Make the plan for a GPU architecture, or for this machine if `architecture` is None.

    Args:
        batch: the sizes of the batch.
        dtype: of the operands; None: bf16 with Triton, else fp32.
        architecture: such as "sm_90", or None.
        frozen: the head needs no gradient.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and architecture is None else "cpu")
    backend = "triton" if architecture else dispatch.pick_backend(TensorChecks("gspo doctor"), "auto", device)
    dtype = dtype or (torch.bfloat16 if backend == "triton" else torch.float32)
    needs = NeedsGradient(True, not frozen, False, False, False)
    n, width, vocab = batch.tokens, batch.width, batch.vocab
    with _assumed(architecture), FakeTensorMode():
        head = batch.head(dtype, device)
        caches = default_caches(device, architecture, largest_default_cache(head, needs, backend) // MIB)
        full = full_cache_mib(head, backend)
        name = str(dtype).removeprefix("torch.")
        where = architecture or device.type
        return Plan(
            where=f"{n:,} tokens, H = {width:,}, V = {vocab:,}, {name}, {backend} backend, {where}",
            device=where,
            sizes=sizes(head, backend, frozen),
            defaults={place: size(head, backend, mib, full, frozen) for place, mib in caches.items()},
            stock=trl_head_bytes(n, width, vocab, dtype.itemsize, frozen),
            frozen=frozen,
            bound=bound(head, backend, 0, frozen),
            inputs={"hidden": head.hidden.nbytes, "weight": head.weight.nbytes},
        )


def _assumed(architecture: str | None) -> Any:
    """Make the Triton backend use the block shapes of `architecture`, unless it is None."""
    if architecture is None:
        return nullcontext()
    from .backends.triton.tuning import assume

    return assume(architecture)
