"""The choice of the cells that the backward computes, by kernels.

Formulas: `backends/live_tiles.py`, whose `choose` this must match. Nothing is read on the host. Sums are in a fixed
order, so the same batch always gives the same cells.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..live_tiles import MARGIN, Work, break_even, kept_first, pairs, recomputed_share
from ..rows import HeadResult, HeadRows, Kept, LiveTiles
from .elementary import expm1
from .launch import launch
from .totals import SUM, total
from .tuning import CELL_MASSES, LIST

# Masses are rounded up to integers, in units of total / UNITS. Sums over 2^22 cells do not overflow.
UNITS = tl.constexpr(2.0**40)
# Rows of the partial sums of `row_masses`, and of those of `keep_cells`.
TOTAL, ROWS, UNMASKED = (tl.constexpr(i) for i in range(3))
SIZE, DROPPED = (tl.constexpr(i) for i in range(2))


@triton.jit(do_not_specialize=["n_rows", "stride_temperature"])
def row_masses(
    mask,  # [N]
    coefficient,  # [N]
    log_probs,  # [N], as are the next two: fields of `HeadResult`
    shift,
    log_total,
    temperature,  # [] or [N], or None
    key,  # out [N]: mass of the target's column, -1 in rows without a gradient
    factor,  # out [N]: |coefficient| scale / temperature, 0 in rows without a gradient
    partials,  # out [3, programs] fp64: least L1 mass, rows with a gradient, unmasked rows
    n_rows: tl.int32,
    stride_temperature: tl.int64,
    logit_scale: tl.float64,
    logit_softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the L1 mass of each row's d_logits, and sums over rows."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    unmasked = tl.load(mask + n, mask=n < n_rows, other=0) != 0
    c = tl.load(coefficient + n, mask=unmasked, other=0.0)
    live = unmasked & (c != 0)
    scale = tl.abs(c) * tl.abs(tl.full([], logit_scale, c.dtype))
    t = tl.full([BLOCK], 1.0, c.dtype)
    if temperature is not None:
        t = tl.load(temperature + n * stride_temperature, mask=live, other=1.0)
        scale /= t
    scale = tl.where(live, scale, 0.0)
    log_p = tl.load(log_probs + n, mask=live, other=0.0)
    at_target = scale * tl.where(live, -expm1(log_p), 0.0)
    tl.store(key + n, tl.where(live, at_target, -1.0), mask=n < n_rows)
    tl.store(factor + n, scale, mask=n < n_rows)
    least = 2.0 * at_target.to(tl.float64)
    if HAS_SOFTCAP:
        logit = log_p + tl.load(log_total + n, mask=live, other=0.0) + tl.load(shift + n, mask=live, other=0.0)
        capped = logit * t / tl.full([], logit_softcap, c.dtype)
        slope = 1.0 - capped * capped - 1e-5
        least = tl.where(at_target == 0, 0.0, at_target.to(tl.float64) * tl.where(slope < 0, 0.0, slope))
    at = partials + tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(at + TOTAL * programs, tl.sum(least, 0))
    tl.store(at + ROWS * programs, tl.sum(live.to(tl.float64), 0))
    tl.store(at + UNMASKED * programs, tl.sum(unmasked.to(tl.float64), 0))


@triton.jit(do_not_specialize=["n_gathered", "tiles", "row_programs"])
def cell_masses(
    share,  # [tiles, n]: as in `TileShares`
    place,  # [N] int64
    order,  # [N] int64: rows by decreasing mass
    target_ids,  # [N] int64
    key,  # this and the next two: results of `row_masses`
    factor,
    partials,
    mass,  # out [row blocks, tiles]
    units,  # out [row blocks, tiles] int64: mass in units of total / UNITS, rounded up
    n_gathered: tl.int64,
    tiles: tl.int32,
    row_programs: tl.int32,
    ROWS_OF_CELL: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the mass of BLOCK_T cells of one row block."""
    tile_programs = (tiles + BLOCK_T - 1) // BLOCK_T
    block, first = tl.program_id(0) // tile_programs, (tl.program_id(0) % tile_programs) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    k = block * ROWS_OF_CELL + tl.arange(0, ROWS_OF_CELL)
    rows = total(partials, row_programs, PARTIAL=ROWS, REDUCTION=SUM, BLOCK=BLOCK).to(tl.int32)
    live = k < rows  # rows with a gradient are first in the order
    row = tl.load(order + k, mask=live, other=0)
    at_target = tl.load(key + row, mask=live, other=0.0)
    column = tl.load(place + row, mask=live, other=0)
    inside = live[None, :] & (t[:, None] < tiles)
    p = tl.load(share + t.to(tl.int64)[:, None] * n_gathered + column[None, :], mask=inside, other=0.0)
    m = p * tl.load(factor + row, mask=live, other=0.0)[None, :]
    target_tile = (tl.load(target_ids + row, mask=live, other=-1) // COLUMNS).to(tl.int32)
    m += tl.where(live[None, :] & (target_tile[None, :] == t[:, None]), at_target[None, :], 0.0)
    cell_mass = tl.sum(m, 1)
    batch_mass = total(partials, row_programs, PARTIAL=TOTAL, REDUCTION=SUM, BLOCK=BLOCK)
    wide = cell_mass.to(tl.float64)
    exact = wide / batch_mass * UNITS
    exact = tl.where(exact <= 2.0 * UNITS, exact, 2.0 * UNITS)  # NaN, and any mass relative to a total of 0
    exact = tl.where(batch_mass < float("inf"), exact, 2.0 * UNITS)
    at = block.to(tl.int64) * tiles + t
    tl.store(mass + at, cell_mass, mask=t < tiles)
    tl.store(units + at, tl.ceil(exact).to(tl.int64), mask=t < tiles)


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
    pairs = rows * vocab
    pays = (rows > 0) & (size / tl.maximum(pairs, 1.0) < most_share)
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
        tl.store(work + 2, tl.where(pays, size, pairs) / (unmasked * vocab))


def choose(
    head: HeadRows, result: HeadResult, coefficient: Tensor, kept: Kept, cell: tuple[int, int], budget: float
) -> tuple[LiveTiles, Work]:
    """Choose the cells to compute, so that at most a share `budget` of the L1 mass of d_logits is dropped.

    `cell` is the shape of a cell, (rows, columns).
    """
    n, device, (size, columns) = head.hidden.shape[0], head.hidden.device, cell
    tiles, blocks, softcap = kept.share.shape[0], -(-n // size), head.logit_softcap
    n_cells, row_programs = blocks * tiles, -(-n // LIST.block_n)
    cell_programs = -(-n_cells // LIST.block_n)

    def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    key, factor = torch.empty_like(coefficient), torch.empty_like(coefficient)  # [N]
    row_partials, partials, work = empty(3, row_programs), empty(2, cell_programs), empty(3)
    mass, units = empty(blocks, tiles, dtype=key.dtype), empty(blocks, tiles, dtype=torch.int64)
    heavy, cells = (empty(blocks, tiles, dtype=torch.uint8) for _ in range(2))
    counts, temperature = empty(2, dtype=torch.int64), head.temperature
    cell_arguments = dict(tiles=tiles, row_programs=row_programs, ROWS_OF_CELL=size)
    launch(
        row_masses,
        row_programs,
        LIST,
        mask=head.mask.contiguous(),
        coefficient=coefficient,
        log_probs=result.log_probs,
        shift=result.shift,
        log_total=result.log_total,
        temperature=temperature,
        key=key,
        factor=factor,
        partials=row_partials,
        n_rows=n,
        stride_temperature=temperature.stride(0) if temperature is not None and temperature.ndim else 0,
        logit_scale=head.logit_scale,
        logit_softcap=softcap or 0.0,
        HAS_SOFTCAP=softcap is not None,
        BLOCK=LIST.block_n,
    )
    order = kept_first(key.sort(descending=True, stable=True).indices, key >= 0, kept)  # [N]
    launch(
        cell_masses,
        blocks * -(-tiles // CELL_MASSES.block_v),
        CELL_MASSES,
        share=kept.share,
        place=kept.place,
        order=order,
        target_ids=head.target_ids.contiguous(),
        key=key,
        factor=factor,
        partials=row_partials,
        mass=mass,
        units=units,
        n_gathered=kept.share.shape[1],
        COLUMNS=columns,
        BLOCK_T=CELL_MASSES.block_v,
        BLOCK=LIST.block_n,
        **cell_arguments,
    )
    light, index = units.view(-1).sort(stable=True)
    launch(
        keep_cells,
        cell_programs,
        LIST,
        index=index,
        sums=light.cumsum(0),
        mass=mass,
        row_partials=row_partials,
        kept=heavy,
        partials=partials,
        limit=int(budget * MARGIN * UNITS.value),
        n_cells=n_cells,
        vocab=head.vocab_size,
        COLUMNS=columns,
        BLOCK=LIST.block_n,
        **cell_arguments,
    )
    launch(
        decide,
        max(cell_programs, 1),  # for an empty batch, too
        LIST,
        kept=heavy,
        row_partials=row_partials,
        partials=partials,
        cells=cells,
        counts=counts,
        work=work,
        most_share=break_even(head.hidden.shape[1], device),
        n_cells=n_cells,
        vocab=head.vocab_size,
        cell_programs=cell_programs,
        BLOCK=LIST.block_n,
        **cell_arguments,
    )
    dropped, live_rows, live_tiles = work.unbind()
    recomputed = live_tiles
    if kept.exponentials.numel():
        live = cells.view(torch.bool) * pairs(counts[0], cell, head.vocab_size, cells)
        unmasked = (head.mask.sum() * head.vocab_size).clamp(min=1)
        recomputed = recomputed_share(live.sum(1) / unmasked, order, key >= 0, kept, size)
    return LiveTiles(order, cells.view(torch.bool), counts), Work(dropped, live_rows, live_tiles, recomputed)
