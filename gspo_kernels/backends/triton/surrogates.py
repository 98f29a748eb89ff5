"""Surrogates and KL estimators with their derivatives, elementwise, inside a kernel.

Must match the torch backend's `surrogates.py`, which has the formulas.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...objective import AGGREGATIONS, KL_ESTIMATORS, RATIOS, SCORES, SURROGATES, Objective
from .elementary import FAR, at_least, at_most, expm1
from .logit_tile import triton_type

# Kernels compare the indices of names in the tuples of `objective.py`.
SEQUENCE_RATIO, TOKEN_RATIO, PRODUCT_RATIO = (
    tl.constexpr(RATIOS.index(name)) for name in ("sequence", "token", "sequence-product")
)
CLIP, CISPO, SAPO, GMPO, REINFORCE, DPPO_TV, DPPO_KL, VESPO, TOPR = (
    tl.constexpr(SURROGATES.index(name))
    for name in ("clip", "cispo", "sapo", "gmpo", "reinforce", "dppo_tv", "dppo_kl", "vespo", "topr")
)
TOKEN_MEAN, TOKEN_MEAN_OF_SEQUENCE, TOKEN_SUM_OVER_NORM = (
    tl.constexpr(AGGREGATIONS.index(name)) for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
)
K1, K2, ABS, K1_PLUS, K3_PLUS, UNBIASED = (
    tl.constexpr(KL_ESTIMATORS.index(name)) for name in ("k1", "k2", "abs", "k1+", "k3+", "unbiased")
)


class ObjectiveConstants(NamedTuple):
    """Compile-time constants of an objective."""

    RATIO: int  # index in RATIOS
    SURROGATE: int  # index in SURROGATES
    IS_SCORE: bool  # the surrogate is one of SCORES
    AGGREGATION: int  # index in AGGREGATIONS
    KL_AGGREGATION: int  # index in AGGREGATIONS
    KL_ESTIMATOR: int  # index in KL_ESTIMATORS
    HAS_CEILING: bool
    HAS_KL: bool  # the loss has a KL term
    KL_RATIO_FACTOR: bool
    ACC: tl.dtype  # dtype of log-probs and the loss: fp32 or fp64


class Bounds(NamedTuple):
    """Bounds, temperatures, and vespo's k and lambda inside a kernel, fp64."""

    log_low: Any
    log_high: Any
    log_ceiling: Any
    clip_low: Any
    clip_high: Any
    ceiling: Any
    temperature_pos: Any
    temperature_neg: Any
    k_pos: Any
    lambda_pos: Any
    k_neg: Any
    lambda_neg: Any


class Term(NamedTuple):
    """A surrogate's value and derivative. Fields: `Term` of the torch backend."""

    value: Any
    slope: Any
    low: Any
    high: Any


@triton.jit
def token_log_ratio(log_probs, old_log_probs, t, unmasked):
    """Compute lp - old, 0 at masked tokens. Without old log-probs: 0, or NaN where lp is not finite."""
    lp = tl.load(log_probs + t, mask=unmasked, other=0.0)
    if old_log_probs is not None:
        return lp - tl.load(old_log_probs + t, mask=unmasked, other=0.0)
    else:
        return lp - lp


@triton.jit
def surrogate(u, advantage, bounds, OBJECTIVE: tl.constexpr):
    """Compute the Term of OBJECTIVE.SURROGATE at log-ratio `u`. `bounds` is a Bounds."""
    ACC: tl.constexpr = OBJECTIVE.ACC
    nonzero = advantage != 0
    low = nonzero & (nonzero == 0)
    high = low
    if OBJECTIVE.SURROGATE == CLIP:
        low = (advantage < 0) & (u < tl.full([], bounds.log_low, ACC))
        high = (advantage > 0) & (u > tl.full([], bounds.log_high, ACC))
        if OBJECTIVE.HAS_CEILING:
            high |= (advantage < 0) & (u > tl.full([], bounds.log_ceiling, ACC))
    elif (OBJECTIVE.SURROGATE == CISPO) | (OBJECTIVE.SURROGATE == VESPO):
        low = nonzero & (u < tl.full([], bounds.log_low, ACC))
        high = nonzero & (u > tl.full([], bounds.log_high, ACC))
    elif OBJECTIVE.SURROGATE == TOPR:
        high = (advantage < 0) & (u > 0)
    free = nonzero & (low == 0) & (high == 0)
    slope = tl.where(free, -tl.exp(tl.where(free, u, 0.0)) * advantage, 0.0)
    bound = tl.where(low, tl.full([], 1.0 - bounds.clip_low, ACC), tl.full([], 1.0 + bounds.clip_high, ACC))
    if OBJECTIVE.HAS_CEILING:
        bound = tl.where((advantage < 0) & (low == 0), tl.full([], bounds.ceiling, ACC), bound)
    value = tl.where(low | high, -bound * advantage, slope)
    if OBJECTIVE.SURROGATE == CISPO:
        slope = value
    elif OBJECTIVE.SURROGATE == SAPO:
        temperature = tl.where(
            advantage > 0, tl.full([], bounds.temperature_pos, ACC), tl.full([], bounds.temperature_neg, ACC)
        )
        s = tl.exp(at_most(u, FAR))
        gate = 1.0 / (1.0 + tl.exp(temperature * (1.0 - s)))
        one_minus_gate = 1.0 / (1.0 + tl.exp(temperature * (s - 1.0)))
        value = tl.where(nonzero, -4.0 * gate / temperature * advantage, 0.0)
        slope = tl.where(nonzero, -4.0 * (gate * one_minus_gate) * s * advantage, 0.0)
    elif OBJECTIVE.SURROGATE == REINFORCE:
        slope, value = -advantage, -advantage
    elif OBJECTIVE.SURROGATE == VESPO:
        slope = tl.where(nonzero, -vespo_weight(u, advantage, bounds, ACC) * advantage, 0.0)
        value = slope
    elif OBJECTIVE.SURROGATE == TOPR:
        slope = -tl.exp(tl.where(free & (advantage < 0), u, 0.0)) * advantage
        value = slope
    return Term(value=value, slope=slope, low=low, high=high)


@triton.jit
def vespo_weight(u, advantage, bounds, ACC: tl.constexpr):
    """exp(lambda) s^k exp(-lambda s), computed from the log-ratio."""
    u = at_most(at_least(u, tl.full([], bounds.log_low, ACC)), tl.full([], bounds.log_high, ACC))
    k = tl.where(advantage < 0, tl.full([], bounds.k_neg, ACC), tl.full([], bounds.k_pos, ACC))
    rate = tl.where(advantage < 0, tl.full([], bounds.lambda_neg, ACC), tl.full([], bounds.lambda_pos, ACC))
    return tl.exp(k * u - rate * expm1(u))


@triton.jit
def dppo(u, advantage, lp, bounds, OBJECTIVE: tl.constexpr):
    """Compute the Term of DPPO at log-ratio `u` and log-prob `lp` of a token. `bounds` is a Bounds."""
    ACC: tl.constexpr = OBJECTIVE.ACC
    d = divergence(lp, lp - u, OBJECTIVE.SURROGATE)
    low = (advantage < 0) & (u < 0) & (d > tl.full([], bounds.clip_low, ACC))
    high = (advantage > 0) & (u > 0) & (d > tl.full([], bounds.clip_high, ACC))
    free = (advantage != 0) & (low == 0) & (high == 0)
    s = tl.exp(tl.where(free, u, 0.0))
    if OBJECTIVE.HAS_CEILING:
        s = at_most(s, tl.full([], bounds.ceiling, ACC))
    slope = tl.where(free, -s * advantage, 0.0)
    return Term(value=slope, slope=slope, low=low, high=high)


@triton.jit
def divergence(log_p, log_q, SURROGATE: tl.constexpr):
    """Divergence of the Bernoulli distributions with probabilities p (new) and q (old)."""
    log_p, log_q = at_most(log_p, 0.0), at_most(log_q, 0.0)
    q = tl.exp(log_q)
    if SURROGATE == DPPO_TV:
        return tl.abs(tl.exp(log_p) - q)
    else:
        other_p, other_q = -expm1(log_p), -expm1(log_q)
        sampled = tl.where(q == 0, 0.0, q * (log_q - log_p))
        return sampled + tl.where(other_q == 0, 0.0, other_q * (tl.log(other_q) - tl.log(other_p)))


@triton.jit
def bounded(log_ratio, advantage, bounds, ACC: tl.constexpr):
    """Bound a token log-ratio for gmpo. Also say whether the lower bound binds, and whether the upper bound does."""
    least, most = tl.full([], bounds.log_low, ACC), tl.full([], bounds.log_high, ACC)
    low, high = (advantage < 0) & (log_ratio < least), (advantage > 0) & (log_ratio > most)
    return tl.where(high, most, tl.where(low, least, log_ratio)), low, high


@triton.jit
def kl_and_slope(d, log_ratio, ESTIMATOR: tl.constexpr):
    """Compute k(d) and dk/d(log_prob), for d = log_prob - ref_log_prob."""
    if ESTIMATOR == K2:
        value, slope = 0.5 * d * d, d
    elif ESTIMATOR == ABS:
        value, slope = tl.abs(d), tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    elif (ESTIMATOR == K1) | (ESTIMATOR == K1_PLUS):
        value, slope = d, tl.zeros_like(d) + 1.0
    else:
        decay = expm1(-d)
        value, slope = decay + d, -decay
    if (ESTIMATOR == K1_PLUS) | (ESTIMATOR == K3_PLUS):
        slope = d
    elif ESTIMATOR == UNBIASED:
        ratio = tl.exp(log_ratio)
        value, slope = divergence_times(value, ratio), divergence_times(d, ratio)
    return value, slope


@triton.jit
def multiply_no_nan(factor, x):
    """Multiply factor by x; exactly 0 where either is 0, like `precision.multiply_no_nan`."""
    return tl.where((factor == 0) | (x == 0), 0.0, factor * x)


@triton.jit
def divergence_times(kl, ratio):
    """Multiply kl by ratio. Where kl is 0, the product is 0 even if the ratio is inf. NaN propagates."""
    return tl.where((kl == 0) & (tl.abs(ratio) == float("inf")), 0.0, kl * ratio)


@triton.jit
def weight_of_token(length, normalizer, length_norm, AGGREGATION: tl.constexpr, ACC: tl.constexpr):
    """A token's aggregation weight, divided by the normalizer, in a sequence of `length` unmasked tokens."""
    weight = tl.full([], 1.0, ACC)
    if AGGREGATION == TOKEN_MEAN_OF_SEQUENCE:
        weight = weight / tl.maximum(length, 1.0)
    elif AGGREGATION == TOKEN_SUM_OVER_NORM:
        weight = weight / tl.full([], length_norm, ACC)
    return weight / normalizer


def objective_arguments(objective: Objective, kl_aggregation: str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of `sequence_loss` that depend only on objective and dtype, by name."""
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
        k_pos=objective.vespo_k_pos,
        lambda_pos=objective.vespo_lambda_pos,
        k_neg=objective.vespo_k_neg,
        lambda_neg=objective.vespo_lambda_neg,
        length_norm=objective.length_norm or 1.0,
        kl_coef=objective.kl_coef,
        entropy_coef=objective.entropy_coef,
        OBJECTIVE=ObjectiveConstants(
            RATIO=RATIOS.index(objective.ratio),
            SURROGATE=SURROGATES.index(objective.surrogate),
            IS_SCORE=objective.surrogate in SCORES,
            AGGREGATION=AGGREGATIONS.index(objective.aggregation),
            KL_AGGREGATION=AGGREGATIONS.index(kl_aggregation),
            KL_ESTIMATOR=KL_ESTIMATORS.index(objective.kl_estimator),
            HAS_CEILING=math.isfinite(ceiling),
            HAS_KL=objective.kl_coef > 0,
            KL_RATIO_FACTOR=objective.kl_ratio_factor,
            ACC=triton_type(dtype),
        ),
    )
