"""Surrogates and KL estimators with their derivatives, elementwise.

Notation: `objective.py`. Must match the Triton backend's `surrogates.py`; the oracle is in `reference.py`.

A surrogate is a function l(u, A) of the log-ratio u and the advantage A, returned with its derivative dl/du. Those in
SCORES have no gradient through the ratio. They are -weight A log p(token), and their slope is the derivative with
respect to log p(token). gmpo bounds token log-ratios before they are averaged (`bounded`). The surrogate of this mean
is -s A, as for "none". vespo bounds token log-ratios before they are added up.

Elements are selected before exp and products, because exp(u) may be inf where a ratio is clipped, and 0 * inf is NaN.
An advantage of 0 contributes exactly 0. Clip decisions compare u, not s = exp(u), because fp32 resolves u near 0 better
than s near 1. NaN is never clipped, so that it reaches the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...objective import Objective

# Log-ratios above 80 are set to 80 for sapo: exp(80) is finite in fp32, and the sigmoid is flat there.
_FAR = 80.0


class Term(NamedTuple):
    """A surrogate's value and derivative, in the shape of the log-ratios."""

    value: Tensor  # l; for SCORES, l divided by the log-prob
    slope: Tensor  # dl/du; for SCORES, dl/d(log_prob)
    low: Tensor  # bool: clipped at the lower bound
    high: Tensor  # bool: clipped at an upper bound


def bounded(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Bound token log-ratios for gmpo, and mark the tokens clipped at the lower and at the upper bound.

    GMPO (arXiv 2507.20673) bounds log-ratios from above for a positive advantage, from below for a negative one.
    """
    low = (advantages < 0) & (log_ratio < -objective.clip_low)
    high = (advantages > 0) & (log_ratio > objective.clip_high)
    inside = torch.where(low, -objective.clip_low, log_ratio)
    return torch.where(high, objective.clip_high, inside), low, high


def surrogate(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """Compute the term of `objective.surrogate` from log-ratios of tokens or sequences."""
    return _TERMS[objective.surrogate](log_ratio, advantages, objective)


def _clip(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-min(s A, clip(s) A), with an upper bound on s (the ceiling) where A < 0."""
    log_low, log_high = objective.log_window
    negative = advantages < 0
    low = negative & (u < log_low)
    high = (advantages > 0) & (u > log_high)
    if math.isfinite(objective.ceiling):
        high |= negative & (u > math.log(objective.ceiling))
    clipped = low | high
    constant = clipped | (advantages == 0)
    minus_advantages = -advantages
    slope = (u.masked_fill(constant, 0).exp() * minus_advantages).masked_fill(constant, 0)
    # The bound is 1 + clip_high for a positive advantage, and 1 - clip_low or the ceiling for a negative one.
    bound = torch.full_like(u, 1 + objective.clip_high)
    bound.masked_fill_(negative, objective.ceiling if math.isfinite(objective.ceiling) else 0.0)
    bound.masked_fill_(low, 1 - objective.clip_low)
    return Term(torch.where(clipped, bound * minus_advantages, slope), slope, low, high)


def _none(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-s A."""
    never = torch.zeros_like(u, dtype=torch.bool)
    free = advantages != 0
    slope = torch.where(free, -torch.where(free, u, 0).exp() * advantages, 0)
    return Term(slope, slope, never, never)


def _cispo(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-clip(s) A log p, with clip(s) treated as a constant (CISPO, arXiv 2506.13585).

    Both bounds apply to advantages of either sign. Clipped tokens keep a gradient.
    """
    log_low, log_high = objective.log_window
    nonzero = advantages != 0
    low, high = nonzero & (u < log_low), nonzero & (u > log_high)
    weight = torch.where(nonzero & ~low & ~high, u, 0).exp()
    weight = torch.where(low, 1 - objective.clip_low, torch.where(high, 1 + objective.clip_high, weight))
    slope = torch.where(nonzero, -weight * advantages, 0)
    return Term(slope, slope, low, high)


def _sapo(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-A (4 / tau) sigmoid(tau (s - 1)), where tau depends on the sign of A (SAPO, arXiv 2511.20347)."""
    never = torch.zeros_like(u, dtype=torch.bool)
    temperature = torch.full_like(u, objective.sapo_temperature_neg)
    temperature.masked_fill_(advantages > 0, objective.sapo_temperature_pos)
    s = u.clamp(max=_FAR).exp()
    gate = torch.sigmoid(temperature * (s - 1))
    nonzero = advantages != 0
    value = torch.where(nonzero, -4 * gate / temperature * advantages, 0)
    slope = torch.where(nonzero, -4 * (gate * torch.sigmoid(temperature * (1 - s))) * s * advantages, 0)
    return Term(value, slope, never, never)


def _reinforce(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-A log p, which has no ratio."""
    never = torch.zeros_like(u, dtype=torch.bool)
    return Term(-advantages, -advantages, never, never)


def _vespo(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-phi(s) A log p, with phi(s) = exp(lambda) s^k exp(-lambda s) as a constant (VESPO, arXiv 2602.10693).

    k and lambda depend on the sign of A. s is bounded to `log_window`. phi is computed in log space.
    """
    log_low, log_high = objective.log_window
    nonzero = advantages != 0
    low, high = nonzero & (u < log_low), nonzero & (u > log_high)
    u = u.clamp(log_low, log_high)
    k, rate = torch.full_like(u, objective.vespo_k_pos), torch.full_like(u, objective.vespo_lambda_pos)
    k.masked_fill_(advantages < 0, objective.vespo_k_neg)
    rate.masked_fill_(advantages < 0, objective.vespo_lambda_neg)
    weight = (k * u - rate * torch.expm1(u)).exp()
    slope = torch.where(nonzero, -weight * advantages, 0)
    return Term(slope, slope, low, high)


def _topr(u: Tensor, advantages: Tensor, objective: Objective) -> Term:
    """-A log p, times min(s, 1) as a constant where A < 0 (TOPR, arXiv 2503.14286)."""
    negative = advantages < 0
    high = negative & (u > 0)
    slope = -torch.where(negative & ~high, u, 0).exp() * advantages
    return Term(slope, slope, torch.zeros_like(high), high)


def dppo(u: Tensor, advantages: Tensor, log_probs: Tensor, objective: Objective) -> Term:
    """-s A, or 0 at tokens outside the trust region (DPPO, arXiv 2602.04879).

    With dual_clip, min(s, dual_clip) replaces s in value and slope.
    """
    divergence = _divergence(log_probs, log_probs - u, objective.surrogate)
    low = (advantages < 0) & (u < 0) & (divergence > objective.clip_low)
    high = (advantages > 0) & (u > 0) & (divergence > objective.clip_high)
    free = ~(low | high | (advantages == 0))
    s = torch.where(free, u, 0).exp()
    if math.isfinite(objective.ceiling):
        s = s.clamp(max=objective.ceiling)
    slope = torch.where(free, -s * advantages, 0)
    return Term(slope, slope, low, high)


def _divergence(log_p: Tensor, log_q: Tensor, surrogate: str) -> Tensor:
    """Divergence of the Bernoulli distributions with probabilities p (new) and q (old)."""
    log_p, log_q = (x.clamp(max=0) for x in (log_p, log_q))  # a sampler's bf16 log-probs may be rounded above 0
    q = log_q.exp()
    if surrogate == "dppo_tv":
        return (log_p.exp() - q).abs()
    other_p, other_q = (-torch.expm1(x) for x in (log_p, log_q))  # 1 - p and 1 - q, accurate near 0
    sampled = torch.where(q == 0, 0, q * (log_q - log_p))
    return sampled + torch.where(other_q == 0, 0, other_q * (other_q.log() - other_p.log()))


_TERMS: dict[str, Callable[[Tensor, Tensor, Objective], Term]] = {
    "clip": _clip,
    "none": _none,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _none,
    "reinforce": _reinforce,
    "vespo": _vespo,
    "topr": _topr,
}


def kl_and_slope(d: Tensor, log_ratio: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Compute k(d) and dk/d(log_prob), for d = log_prob - ref_log_prob (Schulman, "Approximating KL divergence").

    "k1+" and "k3+" have the values of k1 and k3, but the gradient of k2, whose expectation is the gradient of the KL
    (verl). "unbiased" is k3 times the token's ratio w (DeepSeek-V3.2, arXiv 2512.02556). Its slope is
    w k3 + w (1 - exp(-d)) = w d.
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
    """Multiply kl by ratio. Where kl is 0, the product is 0 even if the ratio is inf. NaN propagates."""
    return torch.where((kl == 0) & ratio.isinf(), 0, kl * ratio)
