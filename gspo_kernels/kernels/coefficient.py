"""The terms of an objective on the device, elementwise: what `gspo_kernels.objective` computes with torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..objective import AGGREGATIONS, KL_ESTIMATORS, RATIOS, Objective
from .elementary import expm1
from .logit_tile import triton_type


@triton.jit
def surrogate_and_slope(
    u, advantage, log_low, log_high, log_ceiling, clip_low, clip_high, ceiling,
    CLIP: tl.constexpr, HAS_CEILING: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(l(u, A), dl/du, clipped below, clipped above); the gate selects before anything is multiplied."""
    low = tl.zeros_like(u) != 0
    high = low
    if CLIP:
        low = (advantage < 0) & (u < tl.full([], log_low, ACC))
        high = (advantage > 0) & (u > tl.full([], log_high, ACC))
        if HAS_CEILING:
            high |= (advantage < 0) & (u > tl.full([], log_ceiling, ACC))
    free = (low | high | (advantage == 0)) == 0
    slope = tl.where(free, -tl.exp(tl.where(free, u, 0.0)) * advantage, 0.0)
    bound = tl.where(low, tl.full([], 1.0 - clip_low, ACC), tl.full([], 1.0 + clip_high, ACC))
    if HAS_CEILING:
        bound = tl.where((advantage < 0) & (low == 0), tl.full([], ceiling, ACC), bound)
    value = tl.where(low | high, -bound * advantage, slope)
    return value, slope, low, high


@triton.jit
def kl_and_slope(d, ESTIMATOR: tl.constexpr):
    """k(d) and dk/dd of the k1, k2 and k3 estimators."""
    if ESTIMATOR == 0:
        return d, d * 0.0 + 1.0
    elif ESTIMATOR == 1:
        return 0.5 * d * d, d
    else:
        decay = expm1(-d)
        return decay + d, -decay


@triton.jit
def select_times(factor, x):
    """factor * x, exactly 0 where the factor is."""
    return tl.where(factor == 0, 0.0, factor * x)


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
    return dict(
        log_low=math.log1p(-objective.clip_low),
        log_high=math.log1p(objective.clip_high),
        log_ceiling=math.log(ceiling),
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ceiling=ceiling,
        length_norm=objective.length_norm or 1.0,
        kl_coef=objective.kl_coef,
        entropy_coef=objective.entropy_coef,
        RATIO_KIND=RATIOS.index(objective.ratio),
        CLIP=objective.surrogate == "clip",
        HAS_CEILING=math.isfinite(ceiling),
        AGGREGATION=AGGREGATIONS.index(objective.aggregation),
        KL_AGGREGATION=AGGREGATIONS.index(kl_aggregation),
        ESTIMATOR=KL_ESTIMATORS.index(objective.kl_estimator),
        HAS_KL=objective.kl_coef > 0,
        KL_RATIO=objective.kl_ratio_factor,
        ACC=triton_type(dtype),
    )
