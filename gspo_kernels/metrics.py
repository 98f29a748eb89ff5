"""Names of the metrics that losses and backwards report. Values are 0-dim tensors on the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "last_backward",
]

NAMES = (
    "clip_fraction",  # share of non-empty sequences that have a clipped token
    "clip_fraction_low",  # the same, for tokens clipped at 1 - clip_low (negative advantage)
    "clip_fraction_high",  # at 1 + clip_high (positive advantage), or at dual_clip or delta (negative advantage)
    "token_clip_fraction",  # share of unmasked tokens that are clipped (the paper's "fraction of clipped tokens")
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
WORK_NAMES = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")


def named_work(work: Tensor, products: int) -> dict[str, Tensor]:
    """Name the fields of `live_tiles.Work`; `products` is the number of matrix products per live tile."""
    dropped, rows, tiles, recomputed = work.unbind()
    passes = 1 + (products - 1) * tiles + recomputed if products else torch.ones_like(tiles)
    return dict(zip(WORK_NAMES, (dropped, rows, tiles, passes), strict=True))


_last_backward: dict[str, Tensor] = {}


def record_backward(work: Tensor, *, d_hidden: bool, d_weight: bool) -> None:
    """Record the metrics that `last_backward` returns. `work` [4] holds the fields of `live_tiles.Work`.

    Compiled backwards record nothing, because this runs only while they are traced, on tensors without values.
    """
    global _last_backward
    if type(work) is Tensor:
        _last_backward = named_work(work, d_hidden + d_weight + 1)


def last_backward() -> dict[str, Tensor]:
    """Return the metrics of the most recent backward of `linear_log_probs` in this process.

    The keys are dropped_gradient_mass, live_row_share, live_tile_share and passes, documented in `LossOutput`. The dict
    is empty before the first backward. Values are 0-dim fp64 tensors on the device of the backward; the host does not
    wait for them. Each backward creates a new dict, so a dict that you hold does not change.
    """
    return _last_backward
