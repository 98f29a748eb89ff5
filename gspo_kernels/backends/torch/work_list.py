"""The work list of the torch backend's backward: which columns of which rows it computes, and in which order."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from .tiles import Tiles


class Run(NamedTuple):
    """Adjacent columns of one slab that the backward computes together, for one chunk of rows."""

    slab: tuple[int, int]  # (first column, last column + 1) of the slab
    rows: slice  # the chunk
    first: int  # first column of the run
    end: int  # last column of the run + 1
    turn: int  # number of earlier runs of the same chunk; d_hidden is summed in this order


class WorkList:
    """The runs of a backward: all slabs of all chunks, or with `cells` [row blocks, tiles] bool only the True cells."""

    def __init__(self, tiles: Tiles, cells: Tensor | None) -> None:
        self.tiles = tiles
        self.sparse = cells is not None
        self.columns = tiles.cell_columns
        self.cells: list[list[bool]] = [] if cells is None else cells.tolist()
        shape = -(-tiles.head.hidden.shape[0] // tiles.tile_rows), -(-tiles.head.vocab_size // self.columns)
        if cells is not None and tuple(cells.shape) != shape:
            raise RuntimeError(
                f"the forward divided d_logits into {tuple(cells.shape)} cells, the backward into {shape}: "
                "TunableOp must not be switched on or off between them"
            )

    def by_slab(self) -> list[list[Run]]:
        """Return the runs of each slab; slabs without runs are left out."""
        turns: dict[int, int] = {}
        slabs = []
        for low, high in self.tiles.slabs():
            runs = []
            for rows, first, end in self._columns(low, high):
                turn = turns[rows.start] = turns.get(rows.start, -1) + 1
                runs.append(Run((low, high), rows, first, end, turn))
            if runs:
                slabs.append(runs)
        return slabs

    def _columns(self, low: int, high: int) -> list[tuple[slice, int, int]]:
        """Return (chunk, first column, last column + 1) of the runs of a slab."""
        if not self.sparse:
            return [(rows, low, high) for rows in self.tiles.chunks()]
        runs, columns = [], self.columns
        # `cells` covers all rows, sorted so that rows without a gradient come last. Those rows are not gathered, so
        # there may be fewer chunks than rows of `cells`; hence strict=False.
        for rows, cells in zip(self.tiles.chunks(), self.cells, strict=False):
            begin = low // columns
            for computed, group in itertools.groupby(cells[begin : -(-high // columns)]):
                end = begin + len(list(group))
                if computed:
                    runs.append((rows, begin * columns, min(end * columns, high)))
                begin = end
        return runs
