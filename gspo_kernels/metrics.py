"""The numbers a trainer logs, as 0-dim tensors on the device: computing them never makes the host wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .layout import segment_sum

NAMES = (
    "clip_fraction",  # share of non-empty sequences where the clip binds on a token, by sign of the advantage
    "clip_fraction_low",  # ... at 1 - clip_low (negative advantage)
    "clip_fraction_high",  # ... at 1 + clip_high (positive advantage), or at dual_clip / delta (negative advantage)
    "token_clip_fraction",  # the same three as shares of unmasked tokens (the paper's "fraction of clipped tokens")
    "token_clip_fraction_low",
    "token_clip_fraction_high",
    "ratio_mean",  # of s over non-empty sequences, or over tokens for ratio="token"; 1 where there are none
    "ratio_min",
    "ratio_max",
    "kl_to_old",  # mean over tokens of old - lp: k1 estimate of KL(old || policy) on samples of the old policy, nats
    "zero_coefficient_share",  # share of unmasked tokens that need no backward
    "kl",  # mean over tokens of the chosen estimator against ref_log_probs, nats; only with ref_log_probs
    "entropy",  # mean over tokens, nats; only where entropies are computed
)


def compute(
    *,
    mask: Tensor,  # [N] bool
    offsets: Tensor,  # [S + 1]
    low: Tensor,  # [N] bool: clipped at the lower bound
    high: Tensor,  # [N] bool
    log_ratio: Tensor,  # [S], or [N] for ratio="token"
    log_ratio_counts: Tensor,  # like log_ratio, bool: which of them are real
    token_log_ratio: Tensor,  # [N], 0 at masked rows
    live: Tensor,  # [N] bool: rows with a gradient
    kl: Tensor | None,  # [N]
    entropy: Tensor | None,  # [N]
) -> Tensor:
    """Return the metrics in the order of `NAMES`, [len(NAMES)]; 0 where `kl` or `entropy` is absent."""
    dtype = token_log_ratio.dtype
    tokens = mask.sum().clamp(min=1).to(dtype)
    sequences = (segment_sum(mask.to(dtype), offsets) > 0).sum().clamp(min=1)

    def of_tokens(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0).sum() / tokens

    def of_sequences(x: Tensor) -> Tensor:
        return (segment_sum((mask & x).to(dtype), offsets) > 0).sum().to(dtype) / sequences

    either = low | high
    ratio = log_ratio.exp()
    count = log_ratio_counts.sum()
    total = torch.where(log_ratio_counts, ratio, 0).sum()
    zero = ratio.new_zeros(())
    values = [
        of_sequences(either),
        of_sequences(low),
        of_sequences(high),
        of_tokens(either),
        of_tokens(low),
        of_tokens(high),
        torch.where(count > 0, total / count.clamp(min=1), 1),
        torch.where(count > 0, _extreme(ratio, log_ratio_counts, torch.amin, torch.inf), 1),
        torch.where(count > 0, _extreme(ratio, log_ratio_counts, torch.amax, -torch.inf), 1),
        of_tokens(-token_log_ratio),
        of_tokens((~live).to(dtype)),
        zero if kl is None else of_tokens(kl),
        zero if entropy is None else of_tokens(entropy),
    ]
    return torch.stack([value.to(dtype) for value in values])


def _extreme(ratio: Tensor, counts: Tensor, reduce: Callable[[Tensor], Tensor], neutral: float) -> Tensor:
    # The extra element lets an empty batch through.
    return reduce(torch.cat([torch.where(counts, ratio, neutral), ratio.new_full((1,), neutral)]))


def as_dict(values: Tensor, invalid: Tensor, *, kl: bool, entropy: bool) -> dict[str, Tensor]:
    """Return the metrics by name, with "invalid": how many ids, advantages, offsets, ... failed the checks."""
    named: dict[str, Tensor] = dict(zip(NAMES, values.unbind(), strict=True))
    if not kl:
        del named["kl"]
    if not entropy:
        del named["entropy"]
    named["invalid"] = invalid
    return named


def work_metrics(work: Tensor, products: int) -> dict[str, Tensor]:
    """Return `live_tiles.Work` by name, and the matrix passes of forward and backward with `products` per live tile."""
    dropped, rows, tiles = work.unbind()
    passes = 1 + products * tiles
    names = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")
    return dict(zip(names, (dropped, rows, tiles, passes), strict=True))
