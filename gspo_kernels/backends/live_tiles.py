"""With a gradient budget: choose which cells of d_logits the backward computes.

Without a budget, a backward takes every row with a gradient and all columns, and nothing here chooses.

The forward knows the probability P of every tile of the vocabulary for every row, without the target's column. So the
L1 mass of d_logits is known before anything is recomputed. With f = |d_log_prob| scale / temperature of a row:

    mass of a tile       f P                   of the target's tile f (P + 1 - p(target))
    mass of the row      2 f (1 - p(target))

With a soft-cap, whose slope is at most 1, the mass of a tile is an upper bound. The total is then replaced by the
targets' own entries, whose slope is known, so the reported dropped share is never too small.

Rows are ordered by their mass, so that light rows share blocks. Then the lightest cells (row block x tile) are dropped
while their sum fits the budget.

Plain torch on any device, in a fixed order of additions; nothing is read on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import HeadResult, HeadRows, LiveTiles, TileShares

# A product over scattered cells does this share of the operations per second that it does over whole slabs, and has a
# fixed cost of so many elements of H per cell (benchmarks/NOTES.md).
SPARSE_EFFICIENCY, CELL_OVERHEAD = 0.85, 32
_UNITS = 2.0**44  # a mass as an integer: sums are exact, whatever order a device adds them in
_MARGIN = 1 - 1e-4  # fp32 masses are that exact, and the budget must not be exceeded


class Work(NamedTuple):
    """0-dim tensors, fp64."""

    dropped: Tensor  # the dropped share of the L1 mass of d_logits
    rows: Tensor  # share of the unmasked rows that have a gradient
    tiles: Tensor  # share of (unmasked row, column) that the backward computes


def sparse_pays(rows: Any, width: int, vocab: int, share: Any) -> Any:
    """Return whether computing a `share` of [rows, vocab] cell by cell is faster than all of it slab by slab.

    Takes numbers or tensors. False for an empty batch.
    """
    dense = rows * vocab * width
    sparse = share * rows * vocab * (width + CELL_OVERHEAD) / SPARSE_EFFICIENCY
    return sparse < dense


def all_columns(device: torch.device) -> LiveTiles:
    """Return what a backward computes that drops nothing: every row with a gradient, and all columns."""
    order, counts = (torch.empty(0, dtype=torch.int64, device=device) for _ in range(2))
    return LiveTiles(order, torch.empty(0, 0, dtype=torch.bool, device=device), counts)


def exact_work(head: HeadRows, live: Tensor) -> Work:
    """Return the work of a backward that drops nothing; `live` [N] bool: rows with a gradient."""
    share = (live & head.mask).sum().double() / head.mask.sum().clamp(min=1)
    return Work(torch.zeros_like(share), share, share)


def choose(
    head: HeadRows, result: HeadResult, coefficient: Tensor, tiles: TileShares, budget: float
) -> tuple[LiveTiles, Work]:
    """Choose what to compute so that at most `budget` of the L1 mass of d_logits is dropped."""
    n, vocab = head.hidden.shape[0], head.vocab_size
    live = head.mask & (coefficient != 0)
    factor = torch.where(live, coefficient.abs() * abs(head.logit_scale), 0)
    if head.temperature is not None:
        factor = torch.where(live, factor / head.temperature, 0)
    at_target = factor * torch.where(live, -torch.expm1(result.log_probs), 0)
    order = torch.where(live, at_target, -1).sort(descending=True, stable=True).indices
    total, rows = _least_mass(head, result, at_target), live.sum()

    blocks = -(-n // tiles.block_rows)
    padded_order = F.pad(order, (0, blocks * tiles.block_rows - n))  # to a multiple of a block; padding weighs nothing
    weighs = F.pad(live[order], (0, padded_order.shape[0] - n))
    mass = tiles.share.index_select(1, tiles.place[padded_order]).mul_(factor[padded_order])
    mass.masked_fill_(~weighs, 0)  # the share of a masked row is undefined, and 0 * NaN is not 0
    target_tile = torch.where(live, head.target_ids, 0).clamp(0, vocab - 1)[padded_order] // tiles.columns
    at = (target_tile, torch.arange(padded_order.shape[0], device=order.device))
    mass[at] += torch.where(weighs, at_target[padded_order], 0)
    mass = mass.unflatten(1, (blocks, tiles.block_rows)).sum(2).t()

    height = (rows - torch.arange(blocks, device=order.device) * tiles.block_rows).clamp(0, tiles.block_rows)
    first = torch.arange(mass.shape[1], device=order.device) * tiles.columns
    size = height[:, None].double() * (vocab - first).clamp(max=tiles.columns)  # (row, column) pairs of each cell
    everything = (height > 0)[:, None].expand_as(mass)
    kept = everything & ~_lightest(mass.double(), total, budget)
    share = (size * kept).sum() / (rows * vocab).clamp(min=1)
    pays = sparse_pays(rows, head.hidden.shape[1], vocab, share) & (not _captured(mass))
    cells = torch.where(pays, kept, everything)
    dropped = torch.where(cells | ~everything, 0, mass.double()).sum() / torch.where(total > 0, total, 1)
    counted = head.mask.sum().clamp(min=1)
    work = Work(dropped, rows / counted.double(), (size * cells).sum() / (counted * vocab))
    return LiveTiles(order, cells, torch.stack([rows, pays.to(rows.dtype)])), work


def _least_mass(head: HeadRows, result: HeadResult, at_target: Tensor) -> Tensor:
    """Return the L1 mass of d_logits over all rows, or with a soft-cap a lower bound of it."""
    if head.logit_softcap is None:
        return 2 * at_target.double().sum()
    logit = (result.log_probs + result.log_total + result.shift) * (1 if head.temperature is None else head.temperature)
    slope = (1 - (logit / head.logit_softcap).square() - 1e-5).clamp(min=0)  # less than fp32 may have rounded up
    return torch.where(at_target == 0, 0, at_target * slope).double().sum()


def _captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured. Then the host cannot read how many cells are left: compute all."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _lightest(mass: Tensor, total: Tensor, budget: float) -> Tensor:
    """Return the lightest cells whose sum is at most `budget` of the total; none whose mass is not finite."""
    finite = mass.isfinite() & total.isfinite() & (total > 0)
    units = torch.where(finite, mass / total * _UNITS, 2 * _UNITS).ceil().clamp(max=2 * _UNITS)
    light, index = units.to(torch.int64).flatten().sort(stable=True)
    over = light.cumsum(0) > int(budget * _MARGIN * _UNITS)
    dropped = over.cumsum(0) == 0  # up to the first that is too much: later sums may have overflown
    return torch.empty_like(dropped).index_copy_(0, index, dropped).view_as(mass)
