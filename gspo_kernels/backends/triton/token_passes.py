"""The loops over the tokens of one sequence, inside `sequence_loss`.

Formulas: `objective.py`. Must match the torch backend's `sequence.py`. d_log_ratio is the derivative of the loss with
respect to the surrogate's log-ratio. d_log_prob is the derivative with respect to the token's log-prob, without the
part that flows through this log-ratio.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...objective import VESPO_TOKEN_BOUND
from .elementary import at_least, at_most
from .surrogates import (
    DPPO_KL,
    DPPO_TV,
    GMPO,
    PRODUCT_RATIO,
    SEQUENCE_RATIO,
    TOKEN_RATIO,
    VESPO,
    bounded,
    divergence_times,
    dppo,
    kl_and_slope,
    multiply_no_nan,
    surrogate,
    token_log_ratio,
)

TOKEN_BOUND = tl.constexpr(VESPO_TOKEN_BOUND)


class TokenInputs(NamedTuple):
    """Per-token inputs, [N] each; None if absent."""

    log_probs: Any
    entropy: Any
    mask: Any
    advantages: Any
    old_log_probs: Any
    ref_log_probs: Any
    token_weights: Any


class TokenOutputs(NamedTuple):
    """Per-token outputs, [N] each."""

    log_ratio: Any  # written here for ratio="token" only; else [S]
    coefficient: Any
    entropy_coefficient: Any  # or None


class Weights(NamedTuple):
    """Weights of a sequence's tokens, divided by the normalizers."""

    policy: Any
    kl: Any  # times kl_coef
    entropy: Any  # times -entropy_coef


class TokenSums(NamedTuple):
    """Partial sums, [BLOCK]: each covers every BLOCK-th token of a sequence."""

    loss: Any
    d_log_ratio: Any  # for ratio="sequence" only
    minus_log_ratio: Any
    kl: Any
    entropy: Any
    ratio: Any
    ratio_min: Any
    ratio_max: Any
    n_low: Any
    n_high: Any


@triton.jit
def sequence_log_ratio(tokens, bounds, begin, end, length, OBJECTIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Average or sum the log-ratios of a sequence's unmasked tokens; for gmpo and vespo, the bounded log-ratios."""
    ACC: tl.constexpr = OBJECTIVE.ACC
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        unmasked = tl.load(tokens.mask + t, mask=t < end, other=0) != 0
        r = token_log_ratio(tokens.log_probs, tokens.old_log_probs, t, unmasked)
        if OBJECTIVE.SURROGATE == GMPO:
            advantage = tl.load(tokens.advantages + t, mask=unmasked, other=0.0)
            r, _, _ = bounded(r, advantage, bounds, ACC)
        elif OBJECTIVE.SURROGATE == VESPO:
            r = at_most(at_least(r, -TOKEN_BOUND), TOKEN_BOUND)
        total += r.to(tl.float64)
    u = tl.sum(total, 0).to(ACC)
    if OBJECTIVE.RATIO != PRODUCT_RATIO:
        u = u / tl.maximum(length, 1.0)
    return u


@triton.jit
def sum_tokens(tokens, outputs, weights, bounds, u, begin, end, OBJECTIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the TokenSums and write coefficients. For ratio="sequence", `add_ratio_gradient` completes them."""
    ACC: tl.constexpr = OBJECTIVE.ACC
    loss = tl.zeros([BLOCK], tl.float64)
    d_log_ratio, minus_r, kl_sum, entropy_sum, ratio_sum = loss, loss, loss, loss, loss
    n_low, n_high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    ratio_min, ratio_max = tl.full([BLOCK], float("inf"), ACC), tl.full([BLOCK], float("-inf"), ACC)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        unmasked = tl.load(tokens.mask + t, mask=t < end, other=0) != 0
        r = token_log_ratio(tokens.log_probs, tokens.old_log_probs, t, unmasked)
        log_ratio = r if OBJECTIVE.RATIO == TOKEN_RATIO else tl.where(unmasked, u, 0.0)
        loss_t, d_log_ratio_t, d_log_prob_t, low, high = _policy_term(
            tokens, weights, bounds, t=t, unmasked=unmasked, log_ratio=log_ratio, r=r, OBJECTIVE=OBJECTIVE
        )
        if tokens.ref_log_probs is not None:
            lp = tl.load(tokens.log_probs + t, mask=unmasked, other=0.0)
            d = lp - tl.load(tokens.ref_log_probs + t, mask=unmasked, other=0.0)
            kl, kl_slope = kl_and_slope(d, r, ESTIMATOR=OBJECTIVE.KL_ESTIMATOR)
            kl_sum += tl.where(unmasked, kl, 0.0).to(tl.float64)
            if OBJECTIVE.HAS_KL:
                factor = tl.where(unmasked, weights.kl, 0.0)
                if OBJECTIVE.KL_RATIO_FACTOR:
                    factor = tl.where(unmasked, weights.kl * tl.exp(log_ratio), 0.0)
                    d_log_ratio_t += divergence_times(kl, factor)
                loss_t += divergence_times(kl, factor)
                d_log_prob_t += divergence_times(kl_slope, factor)
        if tokens.entropy is not None:
            h = tl.load(tokens.entropy + t, mask=unmasked, other=0.0)
            entropy_sum += h.to(tl.float64)
            if outputs.entropy_coefficient is not None:
                loss_t += weights.entropy * h
        if OBJECTIVE.RATIO == SEQUENCE_RATIO:
            d_log_ratio += tl.where(unmasked, d_log_ratio_t, 0.0).to(tl.float64)
        else:
            d_log_prob_t += tl.where(unmasked, d_log_ratio_t, 0.0)
        tl.store(outputs.coefficient + t, tl.where(unmasked, d_log_prob_t, 0.0), mask=t < end)
        loss += tl.where(unmasked, loss_t, 0.0).to(tl.float64)
        minus_r -= r.to(tl.float64)
        n_low += (unmasked & low).to(tl.int32)
        n_high += (unmasked & high).to(tl.int32)
        if OBJECTIVE.RATIO == TOKEN_RATIO:
            s = tl.exp(r)
            ratio_sum += tl.where(unmasked, s, 0.0).to(tl.float64)
            ratio_min = tl.minimum(ratio_min, tl.where(unmasked, s, float("inf")))
            ratio_max = tl.maximum(ratio_max, tl.where(unmasked, s, float("-inf")))
            tl.store(outputs.log_ratio + t, r, mask=t < end)
    return TokenSums(
        loss=loss,
        d_log_ratio=d_log_ratio,
        minus_log_ratio=minus_r,
        kl=kl_sum,
        entropy=entropy_sum,
        ratio=ratio_sum,
        ratio_min=ratio_min,
        ratio_max=ratio_max,
        n_low=n_low,
        n_high=n_high,
    )


@triton.jit
def _policy_term(tokens, weights, bounds, t, unmasked, log_ratio, r, OBJECTIVE: tl.constexpr):
    """Compute the policy term of the loss, its d_log_ratio and d_log_prob, and whether a lower or an upper bound binds.

    `log_ratio` is the surrogate's log-ratio, `r` the token's.
    """
    ACC: tl.constexpr = OBJECTIVE.ACC
    advantage = tl.load(tokens.advantages + t, mask=unmasked, other=0.0)
    if (OBJECTIVE.SURROGATE == DPPO_TV) | (OBJECTIVE.SURROGATE == DPPO_KL):
        lp = tl.load(tokens.log_probs + t, mask=unmasked, other=0.0)
        term = dppo(log_ratio, advantage, lp, bounds, OBJECTIVE)
    else:
        term = surrogate(log_ratio, advantage, bounds, OBJECTIVE)
    value, slope, low, high = term.value, term.slope, term.low, term.high
    if OBJECTIVE.SURROGATE == GMPO:
        _, low, high = bounded(r, advantage, bounds, ACC)
    if tokens.token_weights is not None:
        weight = tl.load(tokens.token_weights + t, mask=unmasked, other=0.0)
        value, slope = multiply_no_nan(weight, value), multiply_no_nan(weight, slope)
    d_log_ratio, loss, d_log_prob = weights.policy * slope, weights.policy * value, tl.zeros_like(r)
    if OBJECTIVE.IS_SCORE:  # the slope is with respect to the token's log-prob
        lp = tl.load(tokens.log_probs + t, mask=unmasked, other=0.0)
        d_log_ratio, d_log_prob, loss = d_log_prob, d_log_ratio, multiply_no_nan(weights.policy * value, lp)
    return loss, d_log_ratio, d_log_prob, low, high


@triton.jit
def add_ratio_gradient(
    tokens, outputs, bounds, mean_d_log_ratio, entropy_weight, begin, end, OBJECTIVE: tl.constexpr, BLOCK: tl.constexpr
):
    """Add `mean_d_log_ratio`, the gradient through a sequence's ratio, to its coefficients (for ratio="sequence").

    Write entropy coefficients. Return the number of tokens without a gradient, [BLOCK] partial sums as in TokenSums.
    """
    ACC: tl.constexpr = OBJECTIVE.ACC
    n_no_gradient = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        unmasked = tl.load(tokens.mask + t, mask=t < end, other=0) != 0
        coefficient = tl.load(outputs.coefficient + t, mask=unmasked, other=0.0)
        if OBJECTIVE.RATIO == SEQUENCE_RATIO:
            free = unmasked  # no bound binds at the token
            if OBJECTIVE.SURROGATE == GMPO:
                r = token_log_ratio(tokens.log_probs, tokens.old_log_probs, t, unmasked)
                advantage = tl.load(tokens.advantages + t, mask=unmasked, other=0.0)
                r, low, high = bounded(r, advantage, bounds, ACC)
                free = unmasked & (low == 0) & (high == 0)
            coefficient += tl.where(free, mean_d_log_ratio, 0.0)
            tl.store(outputs.coefficient + t, coefficient, mask=t < end)
        no_gradient = coefficient == 0
        if outputs.entropy_coefficient is not None:
            entropy_coefficient = tl.where(unmasked, entropy_weight, 0.0)
            tl.store(outputs.entropy_coefficient + t, entropy_coefficient, mask=t < end)
            no_gradient &= entropy_coefficient == 0
        n_no_gradient += (unmasked & no_gradient).to(tl.int32)
    return n_no_gradient
