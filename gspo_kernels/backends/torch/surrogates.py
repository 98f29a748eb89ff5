"""What one token adds to the loss, and its derivative: a function for each surrogate and each estimator of KL.

Notation of `objective.py`. A surrogate is l(u, A) with its derivative dl/du. Two of them, SCORES, do not differentiate
their ratio: they are -weight A log p(token), and what they give as derivative is that with respect to the token's own
log-prob. gmpo bounds log-ratios before they are averaged (`bounded`), after which its surrogate is that of "none".

A derivative is selected before anything is multiplied: exp(u) of a clipped row may be inf and 0 * inf is NaN. A zero
advantage contributes exactly 0. Decisions are taken on u, not on s, which keeps fp32's full resolution near 1. NaN is
never clipped, so that it reaches the loss.

Formulas: `objective.py`. Must match the Triton backend's `surrogates.py`; the oracle's functions are in `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...objective import Objective

SCORES = ("cispo", "reinforce")
# exp of it is finite in fp32, and a sigmoid of it has no slope left.
_FAR = 80.0


class Term(NamedTuple):
    """Elementwise, in the shape of the log-ratios."""

    value: Tensor  # l; of SCORES it is to be multiplied by the log-prob
    slope: Tensor  # dl/du; of SCORES dl/d(log_prob)
    low: Tensor  # bool: the lower bound binds
    high: Tensor  # bool: an upper bound binds


def bounded(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """gmpo: a token's log-ratio as it enters the mean, and where its bound binds: below, above.

    GMPO, arXiv 2507.20673: bounds in log space, from above for a positive advantage and from below for a negative one.
    """
    low = (advantages < 0) & (log_ratio < -objective.clip_low)
    high = (advantages > 0) & (log_ratio > objective.clip_high)
    inside = torch.where(low, -objective.clip_low, log_ratio)
    return torch.where(high, objective.clip_high, inside), low, high


def surrogate(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """The term of `objective.surrogate`, whatever the ratio is one of."""
    return _TERMS[objective.surrogate](log_ratio, advantages, objective)


def _clip(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-min(s A, clip(s) A), under a ceiling on s where A < 0."""
    log_low, log_high = objective.log_window
    low = (advantages < 0) & (u < log_low)
    high = (advantages > 0) & (u > log_high)
    if math.isfinite(objective.ceiling):
        high |= (advantages < 0) & (u > math.log(objective.ceiling))
    free = ~(low | high | (advantages == 0))
    slope = torch.where(free, -torch.where(free, u, 0).exp() * advantages, 0)
    # A ratio is bound at the top of the window by a positive advantage, at the ceiling or the bottom by a negative one.
    bound = torch.full_like(u, 1 + objective.clip_high)
    bound.masked_fill_(advantages < 0, objective.ceiling if math.isfinite(objective.ceiling) else 0.0)
    bound.masked_fill_(low, 1 - objective.clip_low)
    return Term(torch.where(low | high, -bound * advantages, slope), slope, low, high)


def _none(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-s A."""
    never = torch.zeros_like(u, dtype=torch.bool)
    free = advantages != 0
    slope = torch.where(free, -torch.where(free, u, 0).exp() * advantages, 0)
    return Term(slope, slope, never, never)


def _cispo(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-clip(s) A log p, the ratio a constant (CISPO, arXiv 2506.13585): bound for either sign, never flat."""
    log_low, log_high = objective.log_window
    counts = advantages != 0
    low, high = counts & (u < log_low), counts & (u > log_high)
    weight = torch.where(counts & ~low & ~high, u, 0).exp()
    weight = torch.where(low, 1 - objective.clip_low, torch.where(high, 1 + objective.clip_high, weight))
    slope = torch.where(counts, -weight * advantages, 0)
    return Term(slope, slope, low, high)


def _sapo(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-A (4 / tau) sigmoid(tau (s - 1)), tau by the sign of A (arXiv 2511.20347): a soft gate instead of a clip."""
    never = torch.zeros_like(u, dtype=torch.bool)
    temperature = torch.full_like(u, objective.sapo_temperature_neg)
    temperature.masked_fill_(advantages > 0, objective.sapo_temperature_pos)
    s = u.clamp(max=_FAR).exp()
    gate = torch.sigmoid(temperature * (s - 1))
    counts = advantages != 0
    value = torch.where(counts, -4 * gate / temperature * advantages, 0)
    slope = torch.where(counts, -4 * (gate * torch.sigmoid(temperature * (1 - s))) * s * advantages, 0)
    return Term(value, slope, never, never)


def _reinforce(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-A log p: no ratio."""
    never = torch.zeros_like(u, dtype=torch.bool)
    return Term(-advantages, -advantages, never, never)


_TERMS: dict[str, Callable[[Tensor, Tensor, Objective], Term]] = {
    "clip": _clip,
    "none": _none,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _none,
    "reinforce": _reinforce,
}


def kl_and_slope(d: Tensor, log_ratio: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """k(d) and dk/d(log_prob), elementwise, d = log_prob - ref_log_prob (Schulman, "Approximating KL divergence").

    "k1+", "k3+": with the gradient of k2, whose expectation is that of the KL (verl). "unbiased": k3 times the token's
    own ratio w, differentiated (DeepSeek-V3.2, arXiv 2512.02556); its slope is w k3 + w (1 - exp(-d)) = w d.
    """
    if estimator == "unbiased":
        ratio = log_ratio.exp()
        return divergence_times(torch.expm1(-d) + d, ratio), divergence_times(d, ratio)
    kind = estimator.removesuffix("+")
    if kind == "k1":
        value, slope = d, torch.ones_like(d)
    elif kind == "abs":
        value, slope = d.abs(), torch.where(d.isnan(), d, d.sign())
    elif kind == "k2":
        value, slope = 0.5 * d * d, d
    else:
        decay = torch.expm1(-d)
        value, slope = decay + d, -decay
    return value, d if estimator.endswith("+") else slope


def divergence_times(kl: Tensor, ratio: Tensor) -> Tensor:
    """kl * ratio, exactly 0 without a divergence even if the ratio exploded; but a ratio that is NaN is to be seen."""
    return torch.where((kl == 0) & ratio.isinf(), 0, kl * ratio)
