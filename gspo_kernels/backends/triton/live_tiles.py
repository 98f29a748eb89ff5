"""The choice of the cells that the backward computes, by kernels.

Formulas: `backends/live_tiles.py`, whose `choose` this must match. Nothing is read on the host. Sums are in a fixed
order, so the same batch always gives the same cells.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..live_tiles import MARGIN, Work, break_even, kept_first, pairs, recomputed_share
from ..live_tiles import choose as choose_in_torch
from ..rows import HeadResult, HeadRows, Kept, LiveTiles
from .launch import launch
from .masses import ROWS, TOTAL, UNITS, UNMASKED, masses_of_cells, masses_of_rows
from .slabs import multiplies_copies
from .totals import SUM, total
from .tuning import LIST

SIZE, DROPPED = (tl.constexpr(i) for i in range(2))  # rows of the partial sums of `keep_cells`


@triton.jit(do_not_specialize=["limit", "n_cells", "tiles", "vocab", "row_programs"])
def keep_cells(
    index,  # [K] int64: cells by increasing mass
    sums,  # [K] int64: cumulative sums of their masses, in units
    mass,  # [row blocks, tiles]
    row_partials,  # of `row_masses`
    kept,  # out [row blocks, tiles] uint8
    partials,  # out [2, programs] fp64: (row, column) pairs of the kept cells, mass of the dropped ones
    limit: tl.int64,
    n_cells: tl.int32,
    tiles: tl.int32,
    vocab: tl.int32,
    row_programs: tl.int32,
    ROWS_OF_CELL: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the cells to keep: all but the lightest, whose masses sum to at most `limit`."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = tl.load(index + k, mask=k < n_cells, other=0)
    rows = total(row_partials, row_programs, PARTIAL=ROWS, REDUCTION=SUM, BLOCK=BLOCK).to(tl.int64)
    height = rows - cell // tiles * ROWS_OF_CELL
    height = tl.minimum(tl.where(k < n_cells, height, 0), ROWS_OF_CELL)
    keep = (height > 0) & (tl.load(sums + k, mask=k < n_cells, other=0) > limit)
    tl.store(kept + cell, keep.to(tl.uint8), mask=k < n_cells)
    width = tl.minimum(vocab - cell % tiles * COLUMNS, COLUMNS)
    dropped = tl.load(mass + cell, mask=(height > 0) & (keep == 0), other=0.0).to(tl.float64)
    at = partials + tl.program_id(0)
    tl.store(at + SIZE * tl.num_programs(0), tl.sum(tl.where(keep, height * width, 0).to(tl.float64), 0))
    tl.store(at + DROPPED * tl.num_programs(0), tl.sum(dropped, 0))


@triton.jit(do_not_specialize=["n_cells", "tiles", "vocab", "row_programs", "cell_programs"])
def decide(
    kept,  # [row blocks, tiles] uint8
    row_partials,
    partials,  # of `keep_cells`
    cells,  # out [row blocks, tiles] uint8
    counts,  # out [2] int64: as in `LiveTiles`
    work,  # out [3] fp64: the fields of `Work`
    most_share: tl.float64,  # the kept cells alone are computed if their share is below this
    n_cells: tl.int32,
    tiles: tl.int32,
    vocab: tl.int32,
    row_programs: tl.int32,
    cell_programs: tl.int32,
    ROWS_OF_CELL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decide between the kept cells and all cells, and write counts and shares of work."""
    rows = total(row_partials, row_programs, PARTIAL=ROWS, REDUCTION=SUM, BLOCK=BLOCK)
    size = total(partials, cell_programs, PARTIAL=SIZE, REDUCTION=SUM, BLOCK=BLOCK)
    all_pairs = rows * vocab
    pays = (rows > 0) & (size / tl.maximum(all_pairs, 1.0) < most_share)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_rows = i // tiles * ROWS_OF_CELL < rows
    keep = tl.load(kept + i, mask=i < n_cells, other=0) != 0
    tl.store(cells + i, tl.where(pays, keep, has_rows).to(tl.uint8), mask=i < n_cells)
    if tl.program_id(0) == 0:
        batch_mass = total(row_partials, row_programs, PARTIAL=TOTAL, REDUCTION=SUM, BLOCK=BLOCK)
        unmasked = tl.maximum(total(row_partials, row_programs, PARTIAL=UNMASKED, REDUCTION=SUM, BLOCK=BLOCK), 1.0)
        dropped = total(partials, cell_programs, PARTIAL=DROPPED, REDUCTION=SUM, BLOCK=BLOCK)
        tl.store(counts, rows.to(tl.int64))
        tl.store(counts + 1, pays.to(tl.int64))
        tl.store(work, tl.where(pays, dropped / tl.where(batch_mass > 0, batch_mass, 1.0), 0.0))
        tl.store(work + 1, rows / unmasked)
        tl.store(work + 2, tl.where(pays, size, all_pairs) / (unmasked * vocab))


def choose(
    head: HeadRows, result: HeadResult, coefficient: Tensor, kept: Kept, cell: tuple[int, int], budget: float
) -> tuple[LiveTiles, Work]:
    """Choose the cells to compute, so that at most a share `budget` of the L1 mass of d_logits is dropped.

    `cell` is the shape of a cell, (rows, columns).
    """
    if head.shard:
        return choose_in_torch(head, result, coefficient, kept, cell, budget)
    rows = masses_of_rows(head, result, coefficient)
    order = rows.key.sort(descending=True, stable=True).indices  # [N]
    if kept.exponentials.numel():
        order = kept_first(order, rows.key >= 0, kept)
    mass, units = masses_of_cells(head, kept, rows, order, cell)
    light, index = units.view(-1).sort(stable=True)
    heavy, cells = (torch.empty_like(units, dtype=torch.uint8) for _ in range(2))
    cell_programs = -(-units.numel() // LIST.block_n)
    partials, work = rows.partials.new_empty(2, cell_programs), rows.partials.new_empty(3)
    counts = order.new_empty(2)
    shared = dict(
        kept=heavy,
        row_partials=rows.partials,
        partials=partials,
        n_cells=units.numel(),
        tiles=units.shape[1],
        vocab=head.vocab_size,
        row_programs=rows.partials.shape[1],
        ROWS_OF_CELL=cell[0],
        BLOCK=LIST.block_n,
    )
    launch(
        keep_cells,
        cell_programs,
        LIST,
        index=index,
        sums=light.cumsum(0),
        mass=mass,
        limit=int(budget * MARGIN * UNITS.value),
        COLUMNS=cell[1],
        **shared,
    )
    launch(
        decide,
        max(cell_programs, 1),  # for an empty batch, too
        LIST,
        cells=cells,
        counts=counts,
        work=work,
        # Where all cells would take the same kernels, fewer always pay.
        most_share=math.inf if multiplies_copies(head) else break_even(head.hidden.shape[1], head.hidden.device),
        cell_programs=cell_programs,
        **shared,
    )
    dropped, live_rows, live_tiles = work.unbind()
    recomputed = live_tiles
    if kept.exponentials.numel():
        live = cells.view(torch.bool) * pairs(counts[0], cell, head.vocab_size, cells)
        unmasked = (head.mask.sum() * head.vocab_size).clamp(min=1)
        recomputed = recomputed_share(live.sum(1) / unmasked, order, rows.key >= 0, kept, cell[0])
    return LiveTiles(order, cells.view(torch.bool), counts), Work(dropped, live_rows, live_tiles, recomputed)
