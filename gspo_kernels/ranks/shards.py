"""Which columns of a sharded vocabulary each rank holds (tensor parallelism)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .dtensors import is_dtensor


class Shard(NamedTuple):
    """A rank's columns of a sharded vocabulary."""

    group: str  # name of the process group
    rank: int
    ranks: int
    rows: int  # rows of lm_head on each rank; for a DTensor, the last ranks may hold fewer
    vocab_size: int  # columns on all ranks, without padding

    @property
    def text(self) -> str:
        """This shard as a string, which `shard_of` parses."""
        return f"{self.rank} {self.ranks} {self.rows} {self.vocab_size} {self.group}"

    @property
    def first(self) -> int:
        """This rank's first column."""
        return self.rank * self.rows

    def columns(self, rank: int | None = None) -> int:
        """Number of columns on a rank (default: this rank), without padding."""
        rank = self.rank if rank is None else rank
        return max(min(self.vocab_size - rank * self.rows, self.rows), 0)

    def tiles(self, width: int) -> list[int]:
        """Number of tiles on each rank. A tile has `width` columns, or fewer at the end of a shard."""
        return [-(-self.columns(rank) // width) for rank in range(self.ranks)]

    def tile_of(self, column: Tensor, width: int) -> Tensor:
        """Index of the tile that contains each column, int64. Tiles and columns are counted over all ranks."""
        return column // self.rows * -(-self.rows // width) + column % self.rows // width

    def widths(self, width: int, device: torch.device) -> Tensor:
        """Number of columns in each tile of all ranks, [tiles] int64."""
        tile = torch.arange(sum(self.tiles(width)), device=device)
        rank, tile = tile // -(-self.rows // width), tile % -(-self.rows // width)
        columns = (self.vocab_size - rank * self.rows).clamp(max=self.rows)
        return (columns - tile * width).clamp(max=width)

    def own_tiles(self, x: Tensor, width: int) -> Tensor:
        """Select this rank's tiles from `x` [..., tiles of all ranks]. A rank without tiles gets one tile of zeros."""
        tiles = self.tiles(width)
        first = sum(tiles[: self.rank])
        own = x[..., first : first + tiles[self.rank]]
        return own if own.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


@functools.lru_cache
def shard_of(text: str) -> Shard:
    """Parse `Shard.text`."""
    *numbers, group = text.split(" ", 4)
    return Shard(group, *map(int, numbers))


def widest_shard(head: Any) -> int:
    """The largest column count of any rank. Caches are sized by it, so that all ranks keep the same rows."""
    return shard_of(head.shard).columns(0) if head.shard else head.vocab_size


def first_column(shard: str) -> int:
    """This rank's first vocabulary column; 0 without tensor parallelism."""
    return shard_of(shard).first if shard else 0


def columns_of_all_ranks(shard: str, vocab_size: int) -> int:
    """Number of vocabulary columns on all ranks together, without padding."""
    return shard_of(shard).vocab_size if shard else vocab_size


def columns_over(group: Any, weight: Any) -> int:
    """Number of rows of the head on all ranks together, including padding."""
    return weight.shape[0] if is_dtensor(weight) else weight.shape[0] * group.size()


def shard_over(group: Any, weight: Any, vocab_size: int) -> Shard:
    """Make this rank's Shard. A DTensor is divided like `torch.chunk` divides."""
    rows = -(-columns_over(group, weight) // group.size())
    return Shard(group.group_name, dist.get_rank(group), group.size(), rows, vocab_size)
