"""The terms of an objective on the device, elementwise: what `gspo_kernels.surrogates` computes with torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ...objective import AGGREGATIONS, KL_ESTIMATORS, RATIOS, SURROGATES, Objective
from .elementary import FAR, at_most, expm1
from .logit_tile import triton_type

# How the kernels know the surrogates: these numbers index `objective.SURROGATES`.
CLIP, NONE, CISPO, SAPO, GMPO, REINFORCE = (tl.constexpr(i) for i in range(6))


@triton.jit
def token_log_ratio(log_probs, old_log_probs, t, counts):
    """lp - old, 0 where a token does not count; without old log-probs 0, or NaN where lp is not finite."""
    lp = tl.load(log_probs + t, mask=counts, other=0.0)
    if old_log_probs is not None:
        return lp - tl.load(old_log_probs + t, mask=counts, other=0.0)
    else:
        return lp - lp


@triton.jit
def surrogate(
    u, advantage, log_low, log_high, log_ceiling, clip_low, clip_high, ceiling, temperature_pos, temperature_neg,
    KIND: tl.constexpr, HAS_CEILING: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(l, its derivative, bound below, bound above), as `surrogates.Term`: of dl/du, or by the log-prob."""
    counts = advantage != 0
    low = counts & (counts == 0)
    high = low
    if KIND == CLIP:
        low = (advantage < 0) & (u < tl.full([], log_low, ACC))
        high = (advantage > 0) & (u > tl.full([], log_high, ACC))
        if HAS_CEILING:
            high |= (advantage < 0) & (u > tl.full([], log_ceiling, ACC))
    elif KIND == CISPO:
        low, high = counts & (u < tl.full([], log_low, ACC)), counts & (u > tl.full([], log_high, ACC))
    free = counts & (low == 0) & (high == 0)
    slope = tl.where(free, -tl.exp(tl.where(free, u, 0.0)) * advantage, 0.0)
    bound = tl.where(low, tl.full([], 1.0 - clip_low, ACC), tl.full([], 1.0 + clip_high, ACC))
    if HAS_CEILING:
        bound = tl.where((advantage < 0) & (low == 0), tl.full([], ceiling, ACC), bound)
    value = tl.where(low | high, -bound * advantage, slope)
    if KIND == CISPO:
        slope = value
    elif KIND == SAPO:
        temperature = tl.where(advantage > 0, tl.full([], temperature_pos, ACC), tl.full([], temperature_neg, ACC))
        s = tl.exp(at_most(u, FAR))
        gate = 1.0 / (1.0 + tl.exp(temperature * (1.0 - s)))
        rest = 1.0 / (1.0 + tl.exp(temperature * (s - 1.0)))
        value = tl.where(counts, -4.0 * gate / temperature * advantage, 0.0)
        slope = tl.where(counts, -4.0 * (gate * rest) * s * advantage, 0.0)
    elif KIND == REINFORCE:
        slope, value = -advantage, -advantage
    return value, slope, low, high


@triton.jit
def bounded(r, advantage, log_low, log_high, ACC: tl.constexpr):
    """(gmpo's log-ratio of a token, bound below, bound above)."""
    least, most = tl.full([], log_low, ACC), tl.full([], log_high, ACC)
    low, high = (advantage < 0) & (r < least), (advantage > 0) & (r > most)
    return tl.where(high, most, tl.where(low, least, r)), low, high


@triton.jit
def kl_and_slope(d, r, ESTIMATOR: tl.constexpr):
    """k(d) and its derivative by the log-prob; ESTIMATOR indexes `objective.KL_ESTIMATORS`."""
    if ESTIMATOR == 1:
        value, slope = 0.5 * d * d, d
    elif ESTIMATOR == 3:
        value, slope = tl.abs(d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    elif (ESTIMATOR == 0) | (ESTIMATOR == 4):
        value, slope = d, tl.zeros_like(d) + 1.0
    else:
        decay = expm1(-d)
        value, slope = decay + d, -decay
    if (ESTIMATOR == 4) | (ESTIMATOR == 5):
        slope = d
    elif ESTIMATOR == 6:
        ratio = tl.exp(r)
        value, slope = divergence_times(value, ratio), divergence_times(d, ratio)
    return value, slope


@triton.jit
def select_times(factor, x):
    """factor * x, exactly 0 where one of them is."""
    return tl.where((factor == 0) | (x == 0), 0.0, factor * x)


@triton.jit
def divergence_times(kl, ratio):
    """kl * ratio, exactly 0 without a divergence even if the ratio is inf; NaN stays."""
    return tl.where((kl == 0) & (tl.abs(ratio) == float("inf")), 0.0, kl * ratio)


@triton.jit
def share_of_token(length, normalizer, length_norm, AGGREGATION: tl.constexpr, ACC: tl.constexpr):
    """The weight of a token over the normalizer; AGGREGATION indexes `objective.AGGREGATIONS`."""
    share = tl.full([], 1.0, ACC)
    if AGGREGATION == 0:
        share = share / tl.maximum(length, 1.0)
    elif AGGREGATION == 3:
        share = share / tl.full([], length_norm, ACC)
    return share / tl.load(normalizer)


def objective_arguments(objective: Objective, kl_aggregation: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the functions above need of an objective, by the names `sequence_loss` gives it."""
    ceiling = objective.ceiling
    log_low, log_high = objective.log_window
    return dict(
        log_low=log_low,
        log_high=log_high,
        log_ceiling=math.log(ceiling),
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ceiling=ceiling,
        temperature_pos=objective.sapo_temperature_pos,
        temperature_neg=objective.sapo_temperature_neg,
        length_norm=objective.length_norm or 1.0,
        kl_coef=objective.kl_coef,
        entropy_coef=objective.entropy_coef,
        RATIO_KIND=RATIOS.index(objective.ratio),
        SURROGATE=SURROGATES.index(objective.surrogate),
        HAS_CEILING=math.isfinite(ceiling),
        AGGREGATION=AGGREGATIONS.index(objective.aggregation),
        KL_AGGREGATION=AGGREGATIONS.index(kl_aggregation),
        ESTIMATOR=KL_ESTIMATORS.index(objective.kl_estimator),
        HAS_KL=objective.kl_coef > 0,
        KL_RATIO=objective.kl_ratio_factor,
        ACC=triton_type(dtype),
    )
