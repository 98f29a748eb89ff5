"""The L1 mass of d_logits, of rows and of cells, by kernels.

Formulas: `backends/live_tiles.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import HeadResult, HeadRows, Kept
from .elementary import expm1
from .launch import launch
from .totals import SUM, total
from .tuning import CELL_MASSES, LIST

# Masses are rounded up to integers, in units of total / UNITS. Sums over 2^22 cells do not overflow.
UNITS = tl.constexpr(2.0**40)
# Rows of the partial sums of `row_masses`.
TOTAL, ROWS, UNMASKED = (tl.constexpr(i) for i in range(3))


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


class RowMasses(NamedTuple):
    """Results of the kernel `row_masses`."""

    key: Tensor  # [N]
    factor: Tensor  # [N]
    partials: Tensor  # [3, programs] fp64


def masses_of_rows(head: HeadRows, result: HeadResult, coefficient: Tensor) -> RowMasses:
    """Compute the L1 mass of each row's d_logits, and sums over rows."""
    n, temperature, softcap = coefficient.shape[0], head.temperature, head.logit_softcap
    programs = -(-n // LIST.block_n)
    masses = RowMasses(
        key=torch.empty_like(coefficient),
        factor=torch.empty_like(coefficient),
        partials=torch.empty(3, programs, dtype=torch.float64, device=coefficient.device),
    )
    launch(
        row_masses,
        programs,
        LIST,
        mask=head.mask.contiguous(),
        coefficient=coefficient,
        log_probs=result.log_probs,
        shift=result.shift,
        log_total=result.log_total,
        temperature=temperature,
        **masses._asdict(),
        n_rows=n,
        stride_temperature=temperature.stride(0) if temperature is not None and temperature.ndim else 0,
        logit_scale=head.logit_scale,
        logit_softcap=softcap or 0.0,
        HAS_SOFTCAP=softcap is not None,
        BLOCK=LIST.block_n,
    )
    return masses


def masses_of_cells(
    head: HeadRows, kept: Kept, rows: RowMasses, order: Tensor, cell: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Compute the mass of each cell, also in units of total / UNITS, rounded up; both are [row blocks, tiles].

    `order` [N] lists rows with a gradient first. `cell` is the shape of a cell, (rows, columns).
    """
    (block_rows, columns), tiles = cell, kept.share.shape[0]
    blocks = -(-order.shape[0] // block_rows)
    mass, units = rows.key.new_empty(blocks, tiles), order.new_empty(blocks, tiles)
    launch(
        cell_masses,
        blocks * -(-tiles // CELL_MASSES.block_v),
        CELL_MASSES,
        share=kept.share,
        place=kept.place,
        order=order,
        target_ids=head.target_ids.contiguous(),
        **rows._asdict(),
        mass=mass,
        units=units,
        n_gathered=kept.share.shape[1],
        tiles=tiles,
        row_programs=rows.partials.shape[1],
        ROWS_OF_CELL=block_rows,
        COLUMNS=columns,
        BLOCK_T=CELL_MASSES.block_v,
        BLOCK=LIST.block_n,
    )
    return mass, units
