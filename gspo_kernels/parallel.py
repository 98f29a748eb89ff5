"""Heads and sequences that are sharded over the ranks of a process group.

Tensor parallelism (TP) shards the vocabulary: every rank holds the same rows, and a contiguous range of the columns.
Each rank computes its tiles. One all-gather of the tiles' results, a few numbers per row and tile, gives every rank the
table that a single process would have. So each rank reduces the same numbers in the same order, and takes the same
decisions. In the backward, the gradients of weight, bias and LoRA's B are of the rank's columns. d_hidden is a sum over
ranks.

Context parallelism (CP) shards the tokens of every sequence (`backends/torch/sharded_sequence.py`).

Operators take a group by its name, because a schema has no type for process groups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .validation import Call, Unquoted, warn_once


class Shard(NamedTuple):
    """The columns of a sharded vocabulary that a rank holds."""

    group: str  # name of the process group
    rank: int
    ranks: int
    rows: int  # rows of lm_head on each rank; the last rank of a DTensor may hold fewer
    vocab_size: int  # columns of all ranks that are not padding

    @property
    def text(self) -> str:
        """Return the text that `shard_of` reads."""
        return f"{self.rank} {self.ranks} {self.rows} {self.vocab_size} {self.group}"

    @property
    def first(self) -> int:
        """Return the first column of this rank."""
        return self.rank * self.rows

    def columns(self, rank: int | None = None) -> int:
        """Return the number of columns of a rank, without padding; by default of this rank."""
        rank = self.rank if rank is None else rank
        return max(min(self.vocab_size - rank * self.rows, self.rows), 0)

    def tiles(self, width: int) -> list[int]:
        """Return the number of tiles of each rank. A tile is `width` columns, or fewer at the end of a shard."""
        return [-(-self.columns(rank) // width) for rank in range(self.ranks)]

    def tile_of(self, column: Tensor, width: int) -> Tensor:
        """Return the tile, counted over all ranks, of columns of the vocabulary, int64."""
        return column // self.rows * -(-self.rows // width) + column % self.rows // width

    def widths(self, width: int, device: torch.device) -> Tensor:
        """Return the number of columns of each tile of all ranks, [tiles] int64."""
        tile = torch.arange(sum(self.tiles(width)), device=device)
        rank, tile = tile // -(-self.rows // width), tile % -(-self.rows // width)
        columns = (self.vocab_size - rank * self.rows).clamp(max=self.rows)
        return (columns - tile * width).clamp(max=width)

    def own_tiles(self, x: Tensor, width: int) -> Tensor:
        """Return the columns of `x` [..., tiles of all ranks] that are this rank's; one of zeros if it has none."""
        tiles = self.tiles(width)
        first = sum(tiles[: self.rank])
        own = x[..., first : first + tiles[self.rank]]
        return own if own.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


@functools.lru_cache
def shard_of(text: str) -> Shard:
    """Return the Shard of `Shard.text`."""
    *numbers, group = text.split(" ", 4)
    return Shard(group, *map(int, numbers))


def widest(shard: str, vocab_size: int) -> int:
    """Return the number of columns of the rank that holds most, so that all ranks keep equally many rows."""
    return shard_of(shard).columns(0) if shard else vocab_size


def all_columns(shard: str, vocab_size: int) -> int:
    """Return the number of columns of all ranks."""
    return shard_of(shard).vocab_size if shard else vocab_size


# -- collectives


def resolve(group: str) -> Any:
    """Return the process group of this name."""
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(group)


def gather(x: Tensor, group: str) -> Tensor:
    """Return `x` [K, ...] of every rank, in rank order, [ranks, K, ...]. One all-gather, or none if `x` is empty."""
    process_group = resolve(group)
    out = x.new_empty(process_group.size(), *x.shape)
    if x.numel():
        # torch 2.13 deprecates the old name.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        getattr(dist, name)(out.flatten(0, 1), x.contiguous(), group=process_group)
    return out


def gather_tiles(shard: Shard, tables: Sequence[tuple[Tensor, int]], target_logit: Tensor) -> list[Tensor]:
    """Gather the results of all tiles. One all-gather.

    Args:
        shard: the columns of this rank.
        tables: pairs of a table [tiles of this rank, n] and the width of its tiles in columns.
        target_logit: [n], NaN where the target is not in this rank's columns.

    Returns:
        Each table with the tiles of all ranks in the order of their columns, [tiles, n]; at the end the logits of the
        targets, [n], NaN for targets outside the vocabulary.
    """
    if not shard.columns():  # the rank computed a column of padding
        target_logit = torch.full_like(target_logit, torch.nan)
    sizes = [shard.tiles(width) for _, width in tables]
    # Padded, because rank 0 has most tiles.
    own, start = target_logit.new_zeros(sum(tiles[0] for tiles in sizes) + 1, target_logit.shape[0]), 0
    for (table, width), tiles in zip(tables, sizes, strict=True):
        _warn_of_unaligned(shard, width)
        own[start : start + tiles[shard.rank]] = table[: tiles[shard.rank]]
        start += tiles[0]
    own[-1] = target_logit
    every = gather(own, shard.group)  # [ranks, tiles of all tables + 1, n]
    gathered, start = [], 0
    for tiles in sizes:
        gathered.append(torch.cat([every[rank, start : start + count] for rank, count in enumerate(tiles)]))
        start += tiles[0]
    logits = every[:, -1]  # [ranks, n]
    is_nan = logits.isnan()
    gathered.append(torch.where(is_nan.all(0), torch.nan, torch.where(is_nan, -torch.inf, logits).amax(0)))
    return gathered


def _warn_of_unaligned(shard: Shard, width: int) -> None:
    if shard.rows % width:
        warn_once(
            f"gspo_kernels: tp_group has {shard.rows} rows of lm_head per rank, which is no multiple of {width}, the "
            "width of a vocabulary tile. Results are correct, but log-probs may differ in the last bits from those of "
            "another number of ranks",
            stacklevel=2,
            kind="unaligned shards",
        )


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x = d_x.contiguous()
        with torch.no_grad():  # d_x keeps its graph, in which a second backward meets the error of `head_backward`
            dist.all_reduce(d_x, group=ctx.group)
        return d_x, None


def sum_gradient(x: Tensor, group: Any) -> Tensor:
    """Return `x`. Its gradient is summed over the ranks of the group, by one all-reduce."""
    return _SumGradient.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x


# -- arguments of the public functions


def process_group(call: Call, name: str, group: Any) -> Any:
    """Check a process group, or a device mesh of one dimension. Return the group; None if it has one rank."""
    if group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        call.fail(name, "None, because torch.distributed is not initialised", Unquoted(f"a {type(group).__name__}"))
    if type(group).__name__ == "DeviceMesh":  # an import of its module takes 20 ms
        if group.ndim != 1:
            call.fail(name, "a device mesh of one dimension, such as mesh['tp']", Unquoted(f"{group.ndim} dimensions"))
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        got = Unquoted(f"a {type(group).__name__}")
        call.fail(name, "a ProcessGroup of which this rank is a member, a DeviceMesh or None", got, TypeError)
    return group if group.size() > 1 else None


def columns_over(group: Any, weight: Any) -> int:
    """Return the number of rows of the head on all ranks, with padding."""
    return weight.shape[0] if is_dtensor(weight) else weight.shape[0] * group.size()


def shard_over(group: Any, weight: Any, vocab_size: int) -> Shard:
    """Return the columns of this rank. A DTensor is divided as `torch.chunk` does."""
    rows = -(-columns_over(group, weight) // group.size())
    return Shard(group.group_name, dist.get_rank(group), group.size(), rows, vocab_size)


def is_dtensor(x: Any) -> bool:
    """Return whether `x` is a DTensor, without importing the module that defines it."""
    return type(x).__name__ == "DTensor"


def vocabulary_group(call: Call, weight: Any, tp_group: Any) -> Any:
    """Return the process group over which the head is sharded, or None. A DTensor weight says it itself."""
    group = process_group(call, "tp_group", tp_group)
    if not is_dtensor(weight):
        return group
    mesh, placements = weight.device_mesh, weight.placements
    sharded = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if (
        len(sharded) != 1
        or not placements[sharded[0]].is_shard(0)
        or "Strided" in type(placements[sharded[0]]).__name__
    ):
        expected = (
            "a DTensor with Shard(0) over exactly one mesh dimension (under FSDP, call inside the forward of the "
            "module, for example by fuse_head, so that the other dimension is gathered)"
        )
        call.fail("lm_head", expected, Unquoted(f"a DTensor with placements {tuple(placements)}"), TypeError)
    of_weight = mesh.get_group(sharded[0])
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(of_weight):
        call.fail("tp_group", "None or the group of the DTensor lm_head", Unquoted("a group of other ranks"))
    return of_weight if of_weight.size() > 1 else None


def local(x: Any) -> Any:
    """Return this rank's part of a DTensor, and other objects unchanged. The gradient becomes a DTensor again."""
    return x.to_local() if is_dtensor(x) else x


def local_rows(x: Any) -> Any:
    """Return this rank's rows of a DTensor, and other objects unchanged. A rank without rows gets a row of padding."""
    rows = local(x)
    return F.pad(rows, (0,) * (2 * rows.ndim - 1) + (1,)) if is_dtensor(x) and rows.shape[0] == 0 else rows


def local_hidden(call: Call, hidden: Any, group: Any) -> tuple[Any, bool]:
    """Return plain hidden states, and whether their gradient remains to be summed over the ranks of `group`.

    Hidden states may be a DTensor that is replicated over the mesh of the head. Their gradient is a DTensor of partial
    sums, which the next redistribution of the model adds up.
    """
    if not is_dtensor(hidden):
        return hidden, True
    from torch.distributed.tensor import Partial

    if group is None or hidden.device_mesh.ndim != 1 or not hidden.placements[0].is_replicate():
        expected = "a plain tensor, or a DTensor that is replicated over the mesh dimension of a DTensor lm_head"
        got = Unquoted(f"a DTensor with placements {tuple(hidden.placements)}")
        call.fail("hidden", expected, got, TypeError)
    return hidden.to_local(grad_placements=[Partial()]), False
