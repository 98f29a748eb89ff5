"""Metrics of a loss, as 0-dim tensors on the device. The host does not wait for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layout import segment_sum

NAMES = (
    "clip_fraction",  # share of non-empty sequences that have a clipped token
    "clip_fraction_low",  # the same, for tokens clipped at 1 - clip_low (negative advantage)
    "clip_fraction_high",  # at 1 + clip_high (positive advantage), or at dual_clip or delta (negative advantage)
    "token_clip_fraction",  # share of clipped tokens among unmasked tokens (the paper's "fraction of clipped tokens")
    "token_clip_fraction_low",
    "token_clip_fraction_high",
    "ratio_mean",  # mean of s over non-empty sequences, or over tokens for ratio="token"; 1 if there are none
    "ratio_min",
    "ratio_max",
    "kl_to_old",  # mean over tokens of old - new log-prob, nats: the k1 estimate of KL(old || new)
    "zero_coefficient_share",  # share of unmasked tokens without a gradient, which cost no backward; 1 without tokens
    "kl",  # mean over tokens of the objective's estimator against ref_log_probs, nats; only with ref_log_probs
    "entropy",  # mean over tokens, nats; only if entropies are computed
)


def compute(
    *,
    mask: Tensor,  # [N] bool
    offsets: Tensor,  # [S + 1]
    low: Tensor,  # [N] bool: clipped at the lower bound
    high: Tensor,  # [N] bool
    log_ratio: Tensor,  # [S], or [N] for ratio="token"
    log_ratio_mask: Tensor,  # bool, shape of log_ratio: non-empty sequences, or unmasked tokens
    token_log_ratio: Tensor,  # [N], 0 at masked rows
    has_gradient: Tensor,  # [N] bool
    kl: Tensor | None,  # [N]
    entropy: Tensor | None,  # [N]
) -> Tensor:
    """Return the metrics in the order of `NAMES`, [len(NAMES)]. If `kl` or `entropy` is None, its metric is 0."""
    dtype = token_log_ratio.dtype
    tokens = mask.sum().clamp(min=1).to(dtype)
    sequences = (segment_sum(mask.to(dtype), offsets) > 0).sum().clamp(min=1)

    def token_mean(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0).sum() / tokens

    def sequence_share(x: Tensor) -> Tensor:
        return (segment_sum((mask & x).to(dtype), offsets) > 0).sum().to(dtype) / sequences

    clipped = low | high
    ratio = log_ratio.exp()
    count = log_ratio_mask.sum()
    total = torch.where(log_ratio_mask, ratio, 0).sum()
    zero = ratio.new_zeros(())
    values = [
        sequence_share(clipped),
        sequence_share(low),
        sequence_share(high),
        token_mean(clipped),
        token_mean(low),
        token_mean(high),
        torch.where(count > 0, total / count.clamp(min=1), 1),
        torch.where(count > 0, _extreme(ratio, log_ratio_mask, torch.amin, torch.inf), 1),
        torch.where(count > 0, _extreme(ratio, log_ratio_mask, torch.amax, -torch.inf), 1),
        token_mean(-token_log_ratio),
        torch.where(mask.any(), token_mean((~has_gradient).to(dtype)), 1),
        zero if kl is None else token_mean(kl),
        zero if entropy is None else token_mean(entropy),
    ]
    return torch.stack([value.to(dtype) for value in values])


def _extreme(ratio: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor], neutral: float) -> Tensor:
    """Return the smallest or largest ratio where `mask` is true."""
    # amin and amax reject an empty tensor, so one neutral element is added.
    return reduce(torch.cat([torch.where(mask, ratio, neutral), ratio.new_full((1,), neutral)]))


def as_dict(values: Tensor, invalid: Tensor, *, kl: bool, entropy: bool) -> dict[str, Tensor]:
    """Return the metrics by name. "invalid" is the number of invalid ids, advantages, offsets, ...

    If sequences are sharded over ranks, the last entry of `values` is this number over all ranks.
    """
    if values.shape[0] > len(NAMES):
        invalid = values[-1].to(invalid.dtype)
    named: dict[str, Tensor] = dict(zip(NAMES, values[: len(NAMES)].unbind(), strict=True))
    if not kl:
        del named["kl"]
    if not entropy:
        del named["entropy"]
    named["invalid"] = invalid
    return named


def work_metrics(work: Tensor, zero_coefficient_share: Tensor, products: int) -> dict[str, Tensor]:
    """Return the metrics that say how much the backward computes.

    Args:
        work: [4], the fields of `live_tiles.Work`; [0] if the backward is exact and recomputes all logits.
        zero_coefficient_share: [], the metric.
        products: number of matrix products that the backward computes per live tile.
    """
    if work.numel() == 0:
        rows = tiles = 1 - zero_coefficient_share
        dropped = torch.zeros_like(rows)
        passes = torch.rsub(zero_coefficient_share, 1 + products, alpha=products)  # 1 + products * tiles
    else:
        dropped, rows, tiles, recomputed = work.unbind()
        passes = 1 + (products - 1) * tiles + recomputed if products else torch.ones_like(tiles)
    names = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")
    return dict(zip(names, (dropped, rows, tiles, passes), strict=True))


_last_backward: dict[str, Tensor] = {}


def record_backward(work: Tensor, products: int) -> None:
    """Record the metrics that `last_backward` returns. Arguments: as of `work_metrics`, `work` not empty."""
    global _last_backward
    _last_backward = work_metrics(work, work[0], products)


def last_backward() -> dict[str, Tensor]:
    """Return what the most recent backward of `linear_log_probs` in this process computed.

    The result has the four keys dropped_gradient_mass, live_row_share, live_tile_share and passes, which `LossOutput`
    documents. It is empty before the first backward. Values are 0-dim fp64 tensors on the device of the backward; the
    host does not wait for them. Each backward replaces the dict, so a dict that was returned does not change.
    """
    return _last_backward
