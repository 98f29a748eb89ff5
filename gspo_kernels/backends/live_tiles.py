"""Choose which cells of d_logits the backward computes, given a gradient budget.

Without a budget, the backward computes all columns of every row with a gradient.

The forward knows the probability P of each tile of the vocabulary, without the target's column. That gives the L1 mass
(sum of absolute values) of d_logits before the backward. With f = |d_log_prob logit_scale| / temperature:

    mass of a tile in a row           f P
    mass of the target's tile         f (P + 1 - p(target))
    mass of a row                     2 f (1 - p(target))

The dropped share is the mass of the dropped cells divided by the total mass of all rows. A soft-cap has a slope of at
most 1, so with a soft-cap the formulas above are upper bounds. The total is then replaced by a lower bound, the mass in
the targets' columns, where the slope is known. So the reported share is never too small.

Rows are sorted by mass, so that light rows share row blocks. Then the lightest cells (row block x tile) are dropped, as
many as the budget allows.

`choose` is plain torch for both backends. It adds in a fixed order, and the host reads no values. It launches about 90
kernels and passes over the table of probabilities a few times, which takes 1 % of a step (benchmarks/NOTES.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ranks.collectives import gather
from ..ranks.shards import columns_of_all_ranks, shard_of
from .rows import Cached, HeadResult, HeadRows, LiveTiles

# Throughput of products over cells, divided by the throughput of products over slabs, measured per device type
# (benchmarks/NOTES.md). ESTIMATED_EFFICIENCY, from instruction counts, is for all other device types.
SPARSE_EFFICIENCY = {"cpu": 0.85}
ESTIMATED_EFFICIENCY = 0.5
CELL_OVERHEAD = 32  # fixed cost of a cell, as an addition to H
# Masses are rounded up to integers, in units of total / _UNITS. Integer sums do not depend on the order, and sums of up
# to 2^22 cells do not overflow.
_UNITS = 2.0**40
MARGIN = 1 - 1e-4  # fp32 masses have a relative error of up to 1e-4, and the budget must not be exceeded


class Work(NamedTuple):
    """Shares of work, 0-dim fp64 tensors."""

    dropped: Tensor  # share of the L1 mass of d_logits that is dropped
    rows: Tensor  # share of the unmasked rows that have a gradient
    tiles: Tensor  # share of all (unmasked row, column) pairs for which the backward computes d_logits
    recomputed: Tensor  # share of all these pairs for which logits are recomputed (rows without cached exponentials)
    mass: Tensor  # total L1 mass of d_logits, dropped or not; 0 if not computed, because nothing is dropped
    tokens: Tensor  # number of unmasked rows


def break_even(width: int, device: torch.device) -> float:
    """The share of d_logits below which computing cells is faster than computing slabs. `width` is H.

    0 while a CUDA graph is captured, because the host cannot read the number of cells.
    """
    if is_captured(device):
        return 0.0
    return SPARSE_EFFICIENCY.get(device.type, ESTIMATED_EFFICIENCY) * width / (width + CELL_OVERHEAD)


def is_captured(device: torch.device) -> bool:
    """True while a CUDA graph is captured. The host then cannot read values or load kernels."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def exact_work(head: HeadRows, has_gradient: Tensor, cached: Cached) -> Work:
    """The work of a backward without a budget. `has_gradient` [N] bool is False at masked rows."""
    tokens = head.mask.sum().double()
    unmasked = tokens.clamp(min=1)
    rows = has_gradient.sum() / unmasked
    recomputed = rows
    if cached.exponentials.numel():
        recomputed = (has_gradient & (cached.place >= cached.n_cached)).sum() / unmasked
    zero = torch.zeros_like(rows)
    return Work(zero, rows, rows, recomputed, zero, tokens)


def work_of_all_ranks(work: Work, head: HeadRows, result: HeadResult, coefficient: Tensor, group: str) -> Work:
    """Combine the work of all ranks that share the tokens, by one all-gather of six numbers."""
    _, at_target = _mass_at_target(head, result, coefficient, head.mask & (coefficient != 0))
    total, unmasked = _least_mass(head, result, at_target), head.mask.sum().double()
    shares = (work.rows, work.tiles, work.recomputed)
    own = torch.stack([work.dropped * total, *(x.double() * unmasked for x in shares), total, unmasked])
    dropped, *sums, total, unmasked = gather(own, group).sum(0).unbind()
    rows, tiles, recomputed = (x / unmasked.clamp(min=1) for x in sums)
    return Work(dropped / torch.where(total > 0, total, 1), rows, tiles, recomputed, total, unmasked)


def leading(flags: Tensor) -> Tensor:
    """Count the True values before the first False in `flags` [n]; [] int64."""
    n = flags.shape[0]
    return torch.where(F.pad(flags, (0, 1)), n, torch.arange(n + 1, device=flags.device)).amin()


def cached_first(order: Tensor, has_gradient: Tensor, cached: Cached) -> Tensor:
    """Reorder `order` [N]: first rows with a gradient and cached exponentials, then other rows with a gradient.

    A row block is recomputed unless the exponentials of all its rows are cached.
    """
    if not cached.exponentials.numel():
        return order
    rank = has_gradient.to(torch.uint8) + (has_gradient & (cached.place < cached.n_cached)).to(torch.uint8)
    return order[rank[order].sort(descending=True, stable=True).indices]


def recomputed_share(of_block: Tensor, order: Tensor, has_gradient: Tensor, cached: Cached, block_rows: int) -> Tensor:
    """Sum `of_block` [row blocks of `order`] over the row blocks that are recomputed (see `cached_first`)."""
    if not cached.exponentials.numel():
        return of_block.sum()
    block = torch.arange(of_block.shape[0], device=of_block.device)
    last = torch.minimum((block + 1) * block_rows, has_gradient.sum())
    n_cached = leading((cached.place < cached.n_cached)[order])
    return torch.where(last <= n_cached, 0, of_block).sum()


def choose(
    head: HeadRows,
    result: HeadResult,
    coefficient: Tensor,
    cached: Cached,
    cell: tuple[int, int],
    budget: float,
    pays_below: float | None = None,
) -> tuple[LiveTiles, Work]:
    """Choose the cells to compute, so that at most a share `budget` of the L1 mass of d_logits is dropped.

    `cell` is the shape of a cell, (rows, columns). Cells are dropped only if the remaining share is below `pays_below`,
    by default `break_even`.
    """
    if pays_below is None:
        pays_below = break_even(head.hidden.shape[1], head.hidden.device)
    block_rows, columns = cell
    n = head.hidden.shape[0]
    device = head.hidden.device
    vocab = columns_of_all_ranks(head.shard, head.vocab_size)
    has_gradient = head.mask & (coefficient != 0)  # [N]
    rows = has_gradient.sum()
    factor, at_target = _mass_at_target(head, result, coefficient, has_gradient)
    total = _least_mass(head, result, at_target)
    order = torch.where(has_gradient, at_target, -1).sort(descending=True, stable=True).indices  # [N]
    order = cached_first(order, has_gradient, cached)

    # Mass and size of every cell, [row blocks, tiles].
    blocks = -(-n // block_rows)
    padded_order = F.pad(order, (0, blocks * block_rows - n))  # [n padded to row blocks]
    has_mass = torch.arange(len(padded_order), device=device) < rows  # rows with a gradient are first
    mass = cached.tile_mass.index_select(1, cached.place[padded_order]).mul_(factor[padded_order])  # [tiles, n padded]
    mass.masked_fill_(~has_mass, 0)  # the share of a masked row is undefined, and 0 * NaN is not 0
    target_tile = _tile_of_target(head, has_gradient, columns)[None, padded_order]
    at_target_tile = mass.gather(0, target_tile) + torch.where(has_mass, at_target[padded_order], 0)
    mass.scatter_(0, target_tile, at_target_tile)
    mass = mass.unflatten(1, (blocks, block_rows)).sum(2).t().double()
    height = has_mass.view(blocks, block_rows).sum(1, dtype=torch.float64)
    size = height[:, None] * _widths(head, columns, mass.shape[1])  # (row, column) pairs
    all_cells = size > 0  # cells that contain a row with a gradient

    light = _lightest(mass, total, budget) & all_cells
    heavy = all_cells & ~light
    share = (size * heavy).sum() / (rows * vocab).clamp(min=1)
    pays = (rows > 0) & (share < pays_below)
    cells = torch.where(pays, heavy, all_cells)
    dropped = torch.where(light & pays, mass, 0).sum() / torch.where(total > 0, total, 1)
    tokens = head.mask.sum().double()
    unmasked = tokens.clamp(min=1)
    of_block = (size * cells).sum(1)  # (row, column) pairs, [row blocks]
    pairs = unmasked * vocab
    recomputed = recomputed_share(of_block / pairs, order, has_gradient, cached, block_rows)
    work = Work(dropped, rows / unmasked, of_block.sum() / pairs, recomputed, total, tokens)
    own_cells = shard_of(head.shard).own_tiles(cells, columns) if head.shard else cells
    return LiveTiles(order, own_cells, torch.stack([rows, pays.to(rows.dtype)])), work


def _widths(head: HeadRows, columns: int, tiles: int) -> Tensor:
    """Number of columns in each tile, [tiles]."""
    device = head.hidden.device
    if head.shard:  # each shard may end with a narrower tile
        return shard_of(head.shard).widths(columns, device)
    widths = torch.full((tiles,), columns, device=device)
    widths[-1:] = head.vocab_size - (tiles - 1) * columns
    return widths


def _tile_of_target(head: HeadRows, has_gradient: Tensor, columns: int) -> Tensor:
    """The tile that contains each row's target, [N] int64; arbitrary for rows without a gradient."""
    if not head.shard:
        return torch.where(has_gradient, head.target_ids, 0).clamp(0, head.vocab_size - 1) // columns
    shard = shard_of(head.shard)
    ids = torch.where(has_gradient, head.target_ids + shard.first, 0).clamp(0, shard.vocab_size - 1)
    return shard.tile_of(ids, columns)


def _mass_at_target(
    head: HeadRows, result: HeadResult, coefficient: Tensor, has_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """The factor f, and the mass in the target's column, f (1 - p(target)), [N] each; 0 in rows without a gradient."""
    factor = torch.where(has_gradient, coefficient.abs() * abs(head.logit_scale), 0)
    if head.temperature is not None:
        factor = torch.where(has_gradient, factor / head.temperature, 0)
    return factor, factor * torch.where(has_gradient, -torch.expm1(result.log_probs), 0)


def _least_mass(head: HeadRows, result: HeadResult, at_target: Tensor) -> Tensor:
    """Total L1 mass of d_logits, []; with a soft-cap, a lower bound."""
    if head.logit_softcap is None:
        return 2 * at_target.sum(dtype=torch.float64)
    logit = (result.log_probs + result.log_total + result.shift) * (1 if head.temperature is None else head.temperature)
    # Subtract 1e-5, so that this stays a lower bound despite fp32 rounding.
    slope = (1 - (logit / head.logit_softcap).square() - 1e-5).clamp(min=0)
    return torch.where(at_target == 0, 0, at_target * slope).sum(dtype=torch.float64)


def _lightest(mass: Tensor, total: Tensor, budget: float) -> Tensor:
    """Mark the lightest cells, as many as fit into `budget * total`: True in a bool mask shaped like `mass`.

    Cells with a mass that is not finite are never True. If the total is not finite and positive, no cell is True.
    """
    limit = int(budget * MARGIN * _UNITS)
    total = total / total * total  # NaN if it is 0 or infinite
    units = (mass / total * _UNITS).nan_to_num(nan=limit + 1, posinf=limit + 1)
    light, index = units.ceil().clamp(max=limit + 1).to(torch.int64).flatten().sort(stable=True)
    dropped = light.cumsum(0) <= limit
    return torch.empty_like(dropped).index_copy_(0, index, dropped).view_as(mass)
