"""Log-probs and entropies of a head, tile by tile. Must match the Triton backend's `forward.py`.

Logits are fp32 (fp64 for fp64 inputs) and never rounded to half precision. For each row, a slab of the vocabulary is
reduced to its largest logit and its mass, the sum of exp(logit - largest), both without the target's column. At the
end, a reduction in a fixed order adds up the slabs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ranks.collectives import gather_tiles
from ...ranks.shards import shard_of
from ..precision import exact_products
from ..rows import Cache, Cached, HeadResult, HeadRows
from .cached_tile import empty_cached, lift
from .tiles import LOG_OF_NOTHING, Tiles


def head_forward(head: HeadRows) -> HeadResult:
    """Compute log-probs (and entropies) of the target ids."""
    return forward_and_cache(head)[0]


def forward_and_cache(head: HeadRows, tile_mass: bool = False, cache: Cache | None = None) -> tuple[HeadResult, Cached]:
    """Compute log-probs and entropies. Cache tile probabilities if `tile_mass`, and exponentials if `cache`."""
    index = head.mask.nonzero()[:, 0]
    cached = None
    if tile_mass or cache is not None:
        cached = empty_cached(head, tile_mass, 0 if cache is None else cache.rows)
    if cached is not None and cache is not None:  # first the rows that may have a gradient
        first = cache.may_have_gradient[index]
        index = torch.cat([index[first], index[~first]])
        cached.n_cached.copy_(first.sum().clamp(max=cache.rows))
    tiles = Tiles(head, index)
    if cached is None:
        cached = _nothing_cached(head.hidden, tiles.dtype)
    totals = _SlabTotals(tiles, cached)
    with exact_products(tiles.device):
        tiles.run(totals.reduce, tiles.tasks())
    target_logit = tiles.at_slab_of_target(totals.at_target)
    if head.shard:
        target_logit = totals.add_other_ranks(target_logit)
    # Tensors are [padded] from here on, or [slabs, padded]. "Others" are the columns other than the target's.
    top = totals.top
    top_others = _finite(top.amax(0))
    log_slabs = torch.where(top == -math.inf, -math.inf, top - top_others + totals.log_mass)  # [slabs, padded]
    log_others = log_slabs.logsumexp(0)  # log-sum-exp of (logit - top_others) over the others
    # log p = log sigmoid(margin) with margin = target_logit - top_others - log_others. On rows where p is near 1, the
    # simpler target_logit - (log-sum-exp of all columns) would lose the digits of 1 - p.
    over_top, over_top_error = _difference(target_logit, top_others)
    margin, margin_error = _difference(torch.where(target_logit == math.inf, math.nan, over_top), log_others)
    # Add back the rounding errors of both differences, so that only log p itself is rounded. Otherwise they would show
    # in the mean over a short sequence.
    correction = (over_top_error + margin_error) * F.sigmoid(-margin)
    log_probs = margin.clamp(max=0) + (correction - margin.abs().neg().exp().log1p())
    entropy = _entropy(log_probs, margin, log_slabs - log_others, totals.entropy) if head.entropy else None
    shift = torch.maximum(top_others, target_logit)
    log_total = torch.logaddexp(log_others + (top_others - shift), target_logit - shift)
    entropy = log_probs.new_empty(0) if entropy is None else tiles.scatter(entropy)
    result = HeadResult(tiles.scatter(log_probs), entropy, tiles.scatter(shift), tiles.scatter(log_total))
    if tile_mass:
        scale = totals.of_cells((top - shift - log_total).exp_())
        cached.tile_mass[:, : tiles.padded].mul_(scale[: len(cached.tile_mass)])
    if cache is not None:
        cached.top[:, : tiles.padded] = totals.own_top
    if cached.place.numel():
        cached.place.zero_()[tiles.index] = torch.arange(tiles.count, device=tiles.device)
    return result, cached


def _nothing_cached(hidden: Tensor, dtype: torch.dtype) -> Cached:
    """A `Cached` of empty tensors. `dtype` is the dtype of logits."""
    return Cached(
        place=hidden.new_empty(0, dtype=torch.int64),
        tile_mass=hidden.new_empty(0, 0, dtype=dtype),
        exponentials=hidden.new_empty(0, 0),
        top=hidden.new_empty(0, 0, dtype=dtype),
        n_cached=hidden.new_empty(0, dtype=torch.int64),
    )


class _SlabTotals:
    """Results of each slab for each row, [slabs, padded]. All but `at_target` exclude the target's column."""

    def __init__(self, tiles: Tiles, cached: Cached) -> None:
        self.tiles = tiles
        self.cached = cached
        self.slabs = tiles.slabs
        self.cell_columns = tiles.cell_columns
        shape = len(self.slabs), tiles.padded
        # Largest logit; log of sum exp(z - top); logit of the target, or the slab's first logit if it is elsewhere.
        self.top, self.log_mass, self.at_target = tiles.zeros(3, *shape)
        # Entropy of the softmax over the slab.
        self.entropy = tiles.zeros(*shape) if tiles.head.entropy else tiles.zeros(0, tiles.padded)
        # [cells, ...]: sum of exp(z - top of the slab) over a cell's columns, or [0, 0]
        cells = -(-tiles.head.vocab_size // self.cell_columns)
        sharded = tiles.head.shard and len(cached.tile_mass)
        self.tile_mass = tiles.zeros(cells, tiles.padded) if sharded else cached.tile_mass
        self.own_top = self.top  # of this rank's slabs, where `top` is of all ranks
        self.rows_to_cache = int(cached.n_cached) if len(cached.exponentials) else 0

    def reduce(self, task: tuple[int, list[slice]]) -> None:
        """Compute and reduce the logits of one slab for several chunks of rows."""
        s, chunks = task
        low, high = self.slabs[s]
        tiles, columns, entropy = self.tiles, self.cell_columns, self.tiles.head.entropy
        weight = tiles.weight_slab(low, high)
        for rows in chunks:
            z = tiles.logits(rows, weight, low, high)  # [rows, columns of the slab]
            in_slab, column = tiles.target_columns(rows, low, high)
            logit = z.gather(1, column)  # [rows, 1]
            self.at_target[s, rows] = logit[:, 0]
            z.scatter_(1, column, torch.where(in_slab[:, None], -math.inf, logit))
            top = z.amax(1)
            z.sub_(_finite(top)[:, None])
            weights = z.exp() if entropy else z.exp_()
            if rows.start < self.rows_to_cache:
                keep = slice(rows.start, min(rows.stop, self.rows_to_cache))
                self.cached.exponentials[keep, low:high] = lift(
                    weights[: keep.stop - keep.start], tiles.head.hidden.dtype
                )
            # The mass of each cell: [rows, cells of the slab].
            cells = F.pad(weights, (0, -weights.shape[1] % columns)).reshape(len(weights), -1, columns).sum(2)
            if len(self.tile_mass):
                self.tile_mass[low // columns : low // columns + cells.shape[1], rows] = cells.t()
            mass = cells.sum(1)
            self.top[s, rows], self.log_mass[s, rows] = top, mass.log()
            if entropy:
                mean = weights.mul_(z.clamp_(min=LOG_OF_NOTHING)).sum(1)
                self.entropy[s, rows] = torch.where(mass > 0, mass.log() - mean / mass, 0)

    def add_other_ranks(self, target_logit: Tensor) -> Tensor:
        """Gather the slabs of all ranks. Return the targets' logits, [padded]."""
        shard, width = shard_of(self.tiles.head.shard), self.tiles.tile_columns
        slabs = [(x, width) for x in (self.top, self.log_mass, self.entropy)[: 3 if len(self.entropy) else 2]]
        cells = [(self.tile_mass, self.cell_columns)] if len(self.tile_mass) else []
        gathered = gather_tiles(shard, [*slabs, *cells], target_logit)
        self.top, self.log_mass = gathered[:2]
        if len(self.entropy):
            self.entropy = gathered[2]
        if cells:
            self.cached.tile_mass[:, : self.tiles.padded] = gathered[len(slabs)]
        return gathered[-1]

    def of_cells(self, x: Tensor) -> Tensor:
        """Repeat each slab's value for all its cells: `x` [slabs, padded] -> [cells or more, padded]."""
        width, shard = self.tiles.tile_columns, self.tiles.head.shard
        if not shard:
            return x.repeat_interleave(width // self.cell_columns, 0)
        cells = -(-shard_of(shard).widths(width, x.device) // self.cell_columns)  # of each slab
        return x.repeat_interleave(cells, 0, output_size=len(self.cached.tile_mass))


def _difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a - b and its rounding error (D. E. Knuth). The error is 0 where a - b is not finite."""
    d = a - b
    minus_b = d - a
    return d, ((a - (d - minus_b)) - (b + minus_b)).nan_to_num(0, 0, 0)


def _finite(top: Tensor) -> Tensor:
    """Replace -inf by 0 in `top`, so that subtracting it before exp gives no NaN."""
    return torch.where(top == -math.inf, 0, top)


def _entropy(log_probs: Tensor, margin: Tensor, log_share: Tensor, slab_entropy: Tensor) -> Tensor:
    """Compute the entropy of each row, [padded].

    By the chain rule, it is the sum of the entropies of three choices: target or not, which slab, and which column of
    the slab. No term is negative, so nothing cancels.

    Args:
        log_probs: of the targets, [padded].
        margin: log(p / (1 - p)) of the targets, [padded].
        log_share: log of each slab's share of the other columns' probability, [slabs, padded].
        slab_entropy: entropy of the softmax over each slab, [slabs, padded].
    """
    # Also replaces the NaN of rows in which no other column has mass.
    log_share = torch.where(log_share > LOG_OF_NOTHING, log_share, LOG_OF_NOTHING)
    of_others = (log_share.exp() * (slab_entropy - log_share)).sum(0)
    log_p_others = F.logsigmoid(-margin).clamp(min=LOG_OF_NOTHING)
    return log_p_others.exp() * (of_others - log_p_others) - log_probs.exp() * log_probs.clamp(min=LOG_OF_NOTHING)
