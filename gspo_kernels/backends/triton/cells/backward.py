"""The sparse backward: compute d_logits of selected cells only, then block-sparse products.

A gradient budget selects cells. Without a budget, this backward computes all cells of the rows with a gradient where
PyTorch may refuse an fp32 product of half-precision operands (`backward.py`).

A part is a range of tiles and a chunk of rows, small enough that its d_logits and its gathered hidden states fit the
workspace. Usually few cells are selected and there is a single part. Then the products are rounded and written
directly. Otherwise they are summed in fp32. Slabs are the outer loop and chunks the inner loop, so that each slab of
d_weight is rounded and written once. Rows are ordered by mass, but d_hidden is summed in the order of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ... import live_tiles
from ...live_tiles import Work
from ...rows import Cached, HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient
from ..gradient_rows import (
    CellRange,
    GradientRows,
    gradient_of_tiles,
    round_to_operands,
    scatter_in_place,
    torch_rounds,
)
from ..slabs import bytes_per_entry, equal_parts, multiplies_copies
from ..split import bytes_of_parts
from ..tuning import Config
from .lists import CellLists, Part, cell_lists
from .products import product_of_hidden, product_of_weight


class CellPlan(NamedTuple):
    """The cells to compute, with the numbers that the host reads from the device."""

    rows: int  # number of rows with a gradient
    sparse: bool  # compute only the listed cells, not all columns
    lists: CellLists
    begin: list[list[int]]  # [chunk][T + 1]: index in `lists.by_tile` of each tile's first cell, then the end
    chunk: int  # rows of a chunk


def choose(
    head: HeadRows, result: HeadResult, coefficient: Tensor, cached: Cached, cell: tuple[int, int], budget: float
) -> tuple[LiveTiles, Work]:
    """Choose the cells to compute (`backends/live_tiles.py`)."""
    # If the dense backward would run in these kernels too, leaving out any cell saves time.
    pays_below = math.inf if multiplies_copies(head) else None
    return live_tiles.choose(head, result, coefficient, cached, cell, budget, pays_below)


def plan_cells(head: HeadRows, live_tiles: LiveTiles, config: Config) -> CellPlan:
    """List the cells to compute. The host reads once: the number of rows, and of cells in each tile."""
    lists, chunk = lists_of(head, live_tiles.cells, config)
    rows, sparse, *begin = torch.cat([live_tiles.counts, lists.tile_begin[:: lists.row_blocks]]).tolist()
    by_chunk = [begin[i : i + lists.tiles + 1] for i in range(0, len(begin) - 1, lists.tiles)]
    return CellPlan(rows, bool(sparse), lists, by_chunk, chunk)


def plan_all_cells(rows: GradientRows, config: Config) -> CellPlan:
    """List all cells of the gathered rows (at least one row). The host reads no values."""
    n = rows.index.shape[0]
    tiles = -(-rows.head.vocab_size // config.block_v)
    row_blocks = -(-n // config.block_n)
    cells = torch.ones(row_blocks, tiles, dtype=torch.bool, device=rows.index.device)
    lists, chunk = lists_of(rows.head, cells, config)
    begin = []
    for first in range(0, row_blocks, lists.row_blocks):
        of_tile = min(lists.row_blocks, row_blocks - first)  # cells of a tile in this chunk
        begin.append([first * tiles + tile * of_tile for tile in range(tiles + 1)])
    return CellPlan(n, True, lists, begin, chunk)


def lists_of(head: HeadRows, cells: Tensor, config: Config) -> tuple[CellLists, int]:
    """List `cells` [row blocks, tiles] bool. Also return the rows per chunk, at most a third of the workspace."""
    row_bytes = _row_bytes(head)
    chunk = equal_parts(cells.shape[0], head.workspace // 3 // (row_bytes * config.block_n)).size
    return cell_lists(cells.contiguous(), chunk), chunk * config.block_n


def cell_backward(
    rows: GradientRows, rows_of_weight: int, config: Config, needs: NeedsGradient, plan: CellPlan
) -> HeadGradients:
    """Compute the gradients of hidden states and weight; None where `needs` is False. There is no bias or adapter.

    `rows_of_weight` is V including the vocabulary's padding, which `rows.head.weight` may lack.
    """
    gradients = _CellGradients(rows, rows_of_weight, config, needs, plan)
    for first_tile, end_tile in pairwise(gradients.slabs):
        gradients.add_slab(first_tile, end_tile)
    return HeadGradients(gradients.finished_hidden(), gradients.d_weight, None, None, None)


class _CellGradients:
    """Sums of d_hidden and d_weight over parts."""

    def __init__(
        self, rows: GradientRows, rows_of_weight: int, config: Config, needs: NeedsGradient, plan: CellPlan
    ) -> None:
        head = rows.head
        self.rows = rows
        self.config = config
        self.plan = plan
        self.n = rows.index.shape[0]
        self.dtype = rows.d_log_probs.dtype
        self.unrounded = torch_rounds(head)
        # If one product covers all cells of a row or column, the kernel can round it to 16 bits directly.
        narrow = head.hidden.dtype != self.dtype
        self.direct_weight = len(plan.begin) == 1 and not self.unrounded
        self.slabs = list(_slabs(head, config, plan, fp32_slab=narrow and needs.weight and not self.direct_weight))
        self.direct_hidden = len(self.slabs) == 2 and not self.unrounded
        self.d_hidden = self.d_weight = None
        if needs.hidden:
            self.d_hidden = torch.zeros(
                head.hidden.shape,
                dtype=head.hidden.dtype if self.direct_hidden else self.dtype,
                device=head.hidden.device,
            )
        if needs.weight:
            self.d_weight = head.weight.new_empty(rows_of_weight, head.hidden.shape[1])
            self.d_weight[head.vocab_size :] = 0
        # With a single chunk, gather hidden states once.
        self.hidden = rows.hidden(slice(0, self.n)) if len(plan.begin) == 1 else None

    def add_slab(self, first_tile: int, end_tile: int) -> None:
        """Compute the cells of a range of tiles. Write d_weight of these columns, and add to d_hidden."""
        d_slab = total = None
        width = self.config.block_v
        low, high = first_tile * width, min(end_tile * width, self.rows.head.vocab_size)
        slab = self.rows.slab(low, high, self.config)
        if self.d_weight is not None:
            d_slab = self.d_weight[low:high]
            total = d_slab  # with several chunks, the sum in full precision
            if not self.direct_weight:
                total = d_slab.zero_() if d_slab.dtype == self.dtype else torch.zeros_like(d_slab, dtype=self.dtype)
        for chunk, begin in enumerate(self.plan.begin):
            cells = begin[end_tile] - begin[first_tile]
            part = Part(self.plan.lists, chunk, first_tile, end_tile, begin[first_tile], cells)
            if cells:
                self._add_part(slab, part, total)
            elif total is not None and self.direct_weight:
                total.zero_()
        if d_slab is not None and total is not None and total is not d_slab:
            d_slab.copy_(total if self.rows.boost is None else total.div_(self.rows.boost))

    def _add_part(self, slab: GradientRows, part: Part, d_slab: Tensor | None) -> None:
        """Compute the cells of a part, and write or add their products to d_hidden and to d_slab [columns, H]."""
        rows, head = self.rows, slab.head
        first_tile = part.first_tile if head.split else 0  # tile that begins at the first row of `head.weight`
        chunk = slice(part.chunk * self.plan.chunk, min((part.chunk + 1) * self.plan.chunk, self.n))
        hidden = rows.hidden(chunk) if self.hidden is None else self.hidden
        cells = CellRange(part.lists.by_tile, part.lists.row_blocks, part.first_cell, part.cells)
        low = -first_tile * self.config.block_v
        d_z = gradient_of_tiles(slab, hidden, chunk, low, head.vocab_size, self.config, self.unrounded, cells)
        d_z = round_to_operands(d_z, rows) if self.unrounded else d_z
        if self.d_hidden is not None:
            index = rows.index[chunk]
            add = not self.direct_hidden
            product_of_hidden(self.d_hidden, d_z, head, first_tile, part, index, rows.boost, add=add)
        if d_slab is not None:
            hidden = hidden[:, -d_slab.shape[1] :]  # if split, the hidden states rounded to bf16
            product_of_weight(d_slab, d_z, hidden, part, rows.boost, add=not self.direct_weight)

    def finished_hidden(self) -> Tensor | None:
        """Convert the sum to d_hidden, [N, H] in the dtype of hidden."""
        if self.d_hidden is None or self.direct_hidden:
            return self.d_hidden
        self.hidden = None  # its memory is needed for the rounded rows
        # All rows are already in place, and rows without a gradient are 0.
        all_rows = torch.arange(self.d_hidden.shape[0], device=self.d_hidden.device)
        return scatter_in_place(self.d_hidden, replace(self.rows, index=all_rows, index_is_all_rows=True), 1024)


def _row_bytes(head: HeadRows) -> int:
    """Bytes of a gathered row of hidden states."""
    return bytes_of_parts(head) or head.hidden.shape[1] * head.hidden.dtype.itemsize


def _slabs(head: HeadRows, config: Config, plan: CellPlan, fp32_slab: bool) -> Iterator[int]:
    """Yield the first tile of each slab, then T. Slabs are as wide as the workspace allows.

    `fp32_slab`: an fp32 sum of the slab of d_weight also takes memory.
    """
    space = head.workspace * 7 // 8 - min(plan.chunk, plan.rows) * _row_bytes(head)
    cell = config.block_n * config.block_v * bytes_per_entry(head, torch_rounds(head))
    tile = config.block_v * (4 * head.hidden.shape[1] if fp32_slab else bytes_of_parts(head))
    first = 0
    tiles = plan.lists.tiles
    yield first
    if max(begin[tiles] - begin[0] for begin in plan.begin) * cell + tiles * tile > space:
        for end in range(2, tiles + 1):
            most = max(begin[end] - begin[first] for begin in plan.begin)
            if most * cell + (end - first) * tile > space:
                first = end - 1
                yield first
    yield tiles
