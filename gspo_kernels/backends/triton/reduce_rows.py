"""The second forward kernel: combine the tile results into log-probs and entropies.

"Others" are all columns except the target's. Must match the torch backend's `forward.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .elementary import LOG_OF_NOTHING, at_least, at_most, difference, finite, log1p, softplus


class TileSums(NamedTuple):
    """Results of `forward_tile`, [n_tiles, N] each, inside `reduce_rows`."""

    top: Any
    mass: Any
    entropy: Any  # or None


@triton.jit(do_not_specialize=["n_rows", "n_tiles"])
def reduce_rows(
    tile_top,  # this and the next five: as in `forward_tile`
    tile_mass,
    tile_entropy,  # or None
    target_logit,
    order,
    n_unmasked,
    log_probs,  # out [N], as are the next three; 0 in masked rows
    entropy,  # or None
    shift,
    log_total,
    place,  # out [N] int64: index of each row in tile_mass; or None
    n_rows: tl.int64,
    n_tiles: tl.int32,
    HAS_TILE_MASS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Compute log_prob = -softplus(log-sum-exp of the others - z_target), shift, log_total and entropy.

    On peaked rows, subtracting the log-sum-exp of all columns from z_target would lose 1 - p. If HAS_TILE_MASS,
    tile_mass is overwritten with the probability of each tile, without the target's column.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < tl.load(n_unmasked)
    tiles = TileSums(top=tile_top, mass=tile_mass, entropy=tile_entropy)
    largest, mass = _log_sum_exp(
        tiles=tiles, n=n, valid=valid, n_rows=n_rows, n_tiles=n_tiles, ACC=ACC, BLOCK_T=BLOCK_T
    )
    top_others = finite(largest)
    log_others = tl.log(mass)
    target_z = tl.load(target_logit + n, mask=valid, other=0.0)
    over_top, over_top_error = difference(target_z, top_others)
    over_top = tl.where(target_z == float("inf"), float("nan"), over_top)
    margin, margin_error = difference(over_top, log_others)
    log_rest = -softplus(margin)  # log(1 - p)
    # log p = log sigmoid(margin). Add back the rounding errors of both differences, so that log p is rounded only once.
    # Two more roundings would show in the mean over a short sequence.
    correction = (over_top_error + margin_error) * tl.exp(log_rest)
    log_p = tl.minimum(margin, 0.0) + (correction - log1p(tl.exp(-tl.abs(margin))))
    inside = n < n_rows
    rows = tl.load(order + n, mask=inside, other=0)
    tl.store(log_probs + rows, tl.where(valid, log_p, 0.0), mask=inside)
    # The log-sum-exp of all columns is shift + log_total, kept apart because the sum would be rounded.
    top_all = tl.where(target_z > top_others, target_z, top_others)
    tl.store(shift + rows, tl.where(valid, top_all, 0.0), mask=inside)
    larger = tl.where(margin > 0, target_z - top_all, log_others + (top_others - top_all))
    larger += log1p(tl.exp(-tl.abs(margin)))
    tl.store(log_total + rows, tl.where(valid, larger, 0.0), mask=inside)
    if tile_entropy is not None:
        others = _entropy_of_others(
            tiles=tiles,
            top_others=top_others,
            log_others=log_others,
            n=n,
            valid=valid,
            n_rows=n_rows,
            n_tiles=n_tiles,
            ACC=ACC,
            BLOCK_T=BLOCK_T,
        )
        log_rest = at_least(log_rest, LOG_OF_NOTHING)
        target_term = tl.exp(log_p) * at_least(log_p, LOG_OF_NOTHING)
        total = tl.exp(log_rest) * (others - log_rest) - target_term
        tl.store(entropy + rows, tl.where(valid, total, 0.0), mask=inside)
    if place is not None:
        tl.store(place + rows, n, mask=inside)
    if HAS_TILE_MASS:
        _store_shares(
            tiles, top_all, log_total=larger, n=n, valid=valid, n_rows=n_rows, n_tiles=n_tiles, BLOCK_T=BLOCK_T
        )


@triton.jit
def _log_sum_exp(tiles, n, valid, n_rows, n_tiles, ACC: tl.constexpr, BLOCK_T: tl.constexpr):
    """Reduce the others to their largest logit and their mass relative to its exp, each [BLOCK_N]."""
    largest = tl.full([n.shape[0]], float("-inf"), ACC)
    mass = tl.zeros([n.shape[0]], ACC)
    for start in range(0, n_tiles, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = (t[:, None] < n_tiles) & valid[None, :]
        at = t[:, None] * n_rows + n[None, :]
        top = tl.load(tiles.top + at, mask=inside, other=float("-inf"))
        tile_mass = tl.load(tiles.mass + at, mask=inside, other=0.0)
        new_largest = tl.maximum(largest, tl.max(tl.where(tile_mass > 0, top, float("-inf")), 0))
        mass *= tl.exp(largest - finite(new_largest))
        mass += tl.sum(tl.where(tile_mass == 0, 0.0, tile_mass * tl.exp(top - finite(new_largest)[None, :])), 0)
        largest = new_largest
    return largest, mass


@triton.jit
def _entropy_of_others(
    tiles, top_others, log_others, n, valid, n_rows, n_tiles, ACC: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Compute the entropy of the softmax over the others, [BLOCK_N].

    By the chain rule, it is the entropy of the choice of a tile plus the mean entropy within the tiles. All terms are
    positive, so nothing cancels.
    """
    entropy = tl.zeros([n.shape[0]], ACC)
    for start in range(0, n_tiles, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = (t[:, None] < n_tiles) & valid[None, :]
        at = t[:, None] * n_rows + n[None, :]
        top = tl.load(tiles.top + at, mask=inside, other=float("-inf"))
        mass = tl.load(tiles.mass + at, mask=inside, other=0.0)
        log_share = (top - top_others[None, :]) + (tl.log(mass) - log_others[None, :])
        log_share = tl.where(log_share > LOG_OF_NOTHING, log_share, LOG_OF_NOTHING)  # also for NaN: no tile has mass
        tile_entropy = tl.load(tiles.entropy + at, mask=inside, other=0.0)
        entropy += tl.sum(tl.exp(log_share) * (tile_entropy - log_share), 0)
    return entropy


@triton.jit
def _store_shares(tiles, top_all, log_total, n, valid, n_rows, n_tiles, BLOCK_T: tl.constexpr):
    """Multiply each tile's mass by exp(tile's top - log-sum-exp), in place, which makes it a probability."""
    for start in range(0, n_tiles, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        inside = (t[:, None] < n_tiles) & valid[None, :]
        at = t[:, None] * n_rows + n[None, :]
        top = tl.load(tiles.top + at, mask=inside, other=float("-inf"))
        # At most 0, unless the target's column is the only one of the tile. Then its mass is 0 and its top arbitrary.
        over = at_most((top - top_all[None, :]) - log_total[None, :], 0.0)
        mass = tl.load(tiles.mass + at, mask=inside, other=0.0) * tl.exp(over)
        tl.store(tiles.mass + at, mass, mask=inside)
