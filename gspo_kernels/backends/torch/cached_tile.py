"""Tiles of the exponentials that the forward cached, so that the backward need not recompute their logits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ranks.shards import shard_of, widest_shard
from ..live_tiles import leading
from ..rows import CACHED_FACTOR, Cached, HeadResult, HeadRows
from .tiles import Tiles, tiling


def cache_rows(head: HeadRows, cache_bytes: int) -> int:
    """Number of rows whose exponentials fit into `cache_bytes`: full tiles of rows, or all N."""
    rows = tiling(head).rows
    n = head.hidden.shape[0]
    fit = cache_bytes // (rows * max(widest_shard(head), 1) * head.hidden.dtype.itemsize) * rows
    most: Any = torch.sym_min(fit, n)  # under torch.compile, one graph for all batches
    return most


def empty_cached(head: HeadRows, tile_mass: bool, cache_rows: int) -> Cached:
    """Allocate what the forward keeps. Tensors that are not requested are empty."""
    tiles = tiling(head)
    n = head.hidden.shape[0]
    padded = -(-n // tiles.rows) * tiles.rows
    slabs = -(-head.vocab_size // tiles.columns)
    cells = -(-head.vocab_size // tiles.cell_columns)
    if head.shard:
        cells = sum(shard_of(head.shard).tiles(tiles.cell_columns))
    make = partial(torch.empty, device=head.hidden.device)
    return Cached(
        place=make(n if tile_mass or cache_rows else 0, dtype=torch.int64),
        tile_mass=make((cells, padded) if tile_mass else (0, 0), dtype=tiles.dtype).zero_(),
        exponentials=make((cache_rows, head.vocab_size) if cache_rows else (0, 0), dtype=head.hidden.dtype),
        top=make((slabs, padded) if cache_rows else (0, 0), dtype=tiles.dtype).zero_(),
        n_cached=make(1 if cache_rows else 0, dtype=torch.int64),
    )


def lift(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round exponentials, which are at most 1, to `dtype`. For fp16, multiply them by CACHED_FACTOR first."""
    return (x * CACHED_FACTOR if dtype == torch.float16 else x).to(dtype)


class CachedTiles:
    """Tiles of p = exp(log_scale) E for the first gathered rows, where E are the cached exponentials.

    log_scale is constant within a row of a slab, so p costs one multiplication per entry.
    """

    def __init__(self, tiles: Tiles, cached: Cached, result: HeadResult) -> None:
        self.tiles = tiles
        self.exponentials = cached.exponentials
        slabs = len(tiles.slabs)
        if cached.top.shape[0] != slabs:
            raise RuntimeError(
                "TunableOp must not be switched on or off between forward and backward: the forward cached "
                f"{cached.top.shape[0]} slabs of exponentials, and the backward has {slabs}"
            )
        self.rows = int(leading((cached.place < cached.n_cached)[tiles.index]))
        index = tiles.index[: self.rows]
        self.place = cached.place[index]  # [rows]
        log_scale = cached.top[:, self.place] - result.shift[index] - result.log_total[index]  # [slabs, rows]
        if self.exponentials.dtype == torch.float16:
            log_scale -= math.log(CACHED_FACTOR)
        self.log_scale = F.pad(log_scale, (0, tiles.padded - self.rows))  # [slabs, padded]
        self.places = self._places()

    def _places(self) -> dict[int, tuple[int, int, bool]]:
        """Map the first row of each chunk to its first and last place, and whether its places are adjacent.

        The host reads them all at once, not tile by tile, because every read waits for the GPU.
        """
        chunks = {x.start: self.place[x] for x in self.tiles.chunks() if x.start < self.rows}
        if not chunks:
            return {}
        facts = [torch.stack([x[0], x[-1], (x.diff() == 1).all().to(x.dtype)]) for x in chunks.values()]
        host = torch.stack(facts).tolist()
        return {start: (first, last, near == 1) for start, (first, last, near) in zip(chunks, host, strict=True)}

    def hold(self, rows: slice) -> bool:
        """True if the exponentials of all rows of a chunk were cached."""
        return min(rows.stop, self.tiles.count) <= self.rows

    def scale(self, rows: slice, low: int) -> Tensor:
        """The log_scale of a chunk in the slab that contains column `low`, [rows]."""
        return self.log_scale[low // self.tiles.tile_columns, rows]

    def tile(self, rows: slice, low: int, high: int) -> Tensor:
        """E of a chunk in columns low to high, [rows, high - low]. It may be a view: do not write to it."""
        place = self.place[rows.start : min(rows.stop, self.rows)]
        first, last, adjacent = self.places[rows.start]
        columns = self.exponentials[:, low:high]
        tile = columns[first : last + 1] if adjacent else columns.index_select(0, place)
        missing = rows.stop - rows.start - len(place)  # the last chunk is padded
        return F.pad(tile, (0, 0, 0, missing)) if missing else tile
