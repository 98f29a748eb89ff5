"""The loss of whole sequences from their log-probs: one program per sequence, one launch.

A program sums its tokens' log-ratios, normalises by length, clips, adds up loss and metrics, and writes the whole
d(loss)/d(log_prob) of every token. What formulas these are stands in `gspo_kernels.objective`, whose `closed_form` this
equals. Token counts come before it, because a default normalizer counts the whole batch; one program adds up after it.
Sums are in fp64: over equal terms, as GSPO's are, roundings of fp32 sums all go one way.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# Triton types its kernels' arguments in a language of its own.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metrics import NAMES
from ...objective import RATIOS, Objective
from ..rows import PolicyResult, PolicyRows
from .launch import launch
from .surrogates import (
    CISPO,
    GMPO,
    REINFORCE,
    bounded,
    divergence_times,
    kl_and_slope,
    objective_arguments,
    select_times,
    share_of_token,
    surrogate,
    token_log_ratio,
)
from .totals import DEAD, ENTROPY, HIGH, KL, LENGTH, LOSS, LOW, MINUS_R, PARTIALS, RATIO, RATIO_MAX, RATIO_MIN, finish
from .tuning import SEQUENCE


@triton.jit
def count_tokens(mask, offsets, lengths, BLOCK: tl.constexpr):
    """lengths[i] = unmasked tokens of sequence i."""
    i = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + i), tl.load(offsets + i + 1)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        found += tl.load(mask + t, mask=t < end, other=0).to(tl.int32)
    tl.store(lengths + i, tl.sum(found, 0).to(lengths.dtype.element_ty))


@triton.jit(do_not_specialize=["sequences"])
def sequence_loss(
    log_probs,  # [N], as are the next seven
    entropy,  # or None
    mask,  # bool
    advantages,
    old_log_probs,  # or None: the log-probs themselves
    ref_log_probs,  # or None
    token_weights,  # or None
    offsets,  # [S + 1] int64
    lengths,  # [S]
    normalizer,  # []
    kl_normalizer,  # []
    log_ratio,  # out [S], or [N] for ratio="token"
    coefficient,  # out [N]
    entropy_coefficient,  # out [N], or None
    partials,  # out [PARTIALS, S] fp64
    sequences: tl.int64,
    log_low: tl.float64,
    log_high: tl.float64,
    log_ceiling: tl.float64,
    clip_low: tl.float64,
    clip_high: tl.float64,
    ceiling: tl.float64,
    temperature_pos: tl.float64,
    temperature_neg: tl.float64,
    length_norm: tl.float64,
    kl_coef: tl.float64,
    entropy_coef: tl.float64,
    RATIO_KIND: tl.constexpr,  # indexes objective.RATIOS
    SURROGATE: tl.constexpr,  # indexes objective.SURROGATES
    HAS_CEILING: tl.constexpr,
    AGGREGATION: tl.constexpr,  # indexes objective.AGGREGATIONS
    KL_AGGREGATION: tl.constexpr,
    ESTIMATOR: tl.constexpr,  # indexes objective.KL_ESTIMATORS
    HAS_KL: tl.constexpr,  # the loss has a KL term
    KL_RATIO: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bytes: each input once, log-probs, mask and coefficients again, from the cache."""
    i = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + i), tl.load(offsets + i + 1)
    length = tl.load(lengths + i)
    share = share_of_token(length, normalizer, length_norm, AGGREGATION, ACC)
    kl_share = tl.full([], kl_coef, ACC) * share_of_token(length, kl_normalizer, length_norm, KL_AGGREGATION, ACC)
    entropy_share = -tl.full([], entropy_coef, ACC) * share

    u = tl.full([], 0.0, ACC)
    if RATIO_KIND != 2:
        total = tl.zeros([BLOCK], tl.float64)
        for start in range(begin, end, BLOCK):
            t = start + tl.arange(0, BLOCK)
            counts = tl.load(mask + t, mask=t < end, other=0) != 0
            r = token_log_ratio(log_probs, old_log_probs, t, counts)
            if SURROGATE == GMPO:
                advantage = tl.load(advantages + t, mask=counts, other=0.0)
                r, low, high = bounded(r, advantage, log_low, log_high, ACC)
            total += r.to(tl.float64)
        u = tl.sum(total, 0).to(ACC) / tl.maximum(length, 1.0)
        tl.store(log_ratio + i, u)

    loss = tl.zeros([BLOCK], tl.float64)
    through, minus_r, kl_sum, entropy_sum, ratio_sum = loss, loss, loss, loss, loss
    n_low, n_high, n_dead = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    ratio_min, ratio_max = tl.full([BLOCK], float("inf"), ACC), tl.full([BLOCK], float("-inf"), ACC)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        counts = tl.load(mask + t, mask=t < end, other=0) != 0
        r = token_log_ratio(log_probs, old_log_probs, t, counts)
        v = r if RATIO_KIND == 2 else tl.where(counts, u, 0.0)
        advantage = tl.load(advantages + t, mask=counts, other=0.0)
        value, slope, low, high = surrogate(
            v, advantage, log_low, log_high, log_ceiling, clip_low, clip_high, ceiling, temperature_pos,
            temperature_neg, SURROGATE, HAS_CEILING, ACC,
        )  # fmt: skip
        if SURROGATE == GMPO:
            _, low, high = bounded(r, advantage, log_low, log_high, ACC)
        if token_weights is not None:
            weight = tl.load(token_weights + t, mask=counts, other=0.0)
            value, slope = select_times(weight, value), select_times(weight, slope)
        part, loss_of_token, direct = share * slope, share * value, tl.zeros([BLOCK], ACC)
        if (SURROGATE == CISPO) | (SURROGATE == REINFORCE):  # not by the ratio, by the token's own log-prob
            lp = tl.load(log_probs + t, mask=counts, other=0.0)
            part, direct, loss_of_token = direct, part, select_times(share * value, lp)
        if ref_log_probs is not None:
            lp = tl.load(log_probs + t, mask=counts, other=0.0)
            kl, kl_slope = kl_and_slope(lp - tl.load(ref_log_probs + t, mask=counts, other=0.0), r, ESTIMATOR)
            kl_sum += tl.where(counts, kl, 0.0).to(tl.float64)
            if HAS_KL:
                factor = tl.where(counts, kl_share, 0.0)
                if KL_RATIO:
                    factor = tl.where(counts, kl_share * tl.exp(v), 0.0)
                    part += divergence_times(kl, factor)
                loss_of_token += divergence_times(kl, factor)
                direct += divergence_times(kl_slope, factor)
        if entropy is not None:
            h = tl.load(entropy + t, mask=counts, other=0.0)
            entropy_sum += h.to(tl.float64)
            if entropy_coefficient is not None:
                loss_of_token += entropy_share * h
        if RATIO_KIND == 0:
            through += tl.where(counts, part, 0.0).to(tl.float64)
        else:
            direct += tl.where(counts, part, 0.0)
        tl.store(coefficient + t, tl.where(counts, direct, 0.0), mask=t < end)
        loss += tl.where(counts, loss_of_token, 0.0).to(tl.float64)
        minus_r -= r.to(tl.float64)
        n_low += (counts & low).to(tl.int32)
        n_high += (counts & high).to(tl.int32)
        if RATIO_KIND == 2:
            s = tl.exp(r)
            ratio_sum += tl.where(counts, s, 0.0).to(tl.float64)
            ratio_min = tl.minimum(ratio_min, tl.where(counts, s, float("inf")))
            ratio_max = tl.maximum(ratio_max, tl.where(counts, s, float("-inf")))
            tl.store(log_ratio + t, r, mask=t < end)

    # A sequence's gradient through its ratio is a sum over its tokens, known only now. What one thread wrote above
    # another may read here.
    tl.debug_barrier()
    through_ratio = tl.sum(through, 0).to(ACC) / tl.maximum(length, 1.0)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        counts = tl.load(mask + t, mask=t < end, other=0) != 0
        whole = tl.load(coefficient + t, mask=counts, other=0.0)
        if RATIO_KIND == 0:
            inside = counts
            if SURROGATE == GMPO:
                r = token_log_ratio(log_probs, old_log_probs, t, counts)
                advantage = tl.load(advantages + t, mask=counts, other=0.0)
                r, low, high = bounded(r, advantage, log_low, log_high, ACC)
                inside = counts & (low == 0) & (high == 0)
            whole += tl.where(inside, through_ratio, 0.0)
            tl.store(coefficient + t, whole, mask=t < end)
        dead = whole == 0
        if entropy_coefficient is not None:
            bonus = tl.where(counts, entropy_share, 0.0)
            tl.store(entropy_coefficient + t, bonus, mask=t < end)
            dead &= bonus == 0
        n_dead += (counts & dead).to(tl.int32)

    at = partials + i
    tl.store(at + LOSS * sequences, tl.sum(loss, 0))
    tl.store(at + LENGTH * sequences, length.to(tl.float64))
    tl.store(at + LOW * sequences, tl.sum(n_low, 0).to(tl.float64))
    tl.store(at + HIGH * sequences, tl.sum(n_high, 0).to(tl.float64))
    tl.store(at + MINUS_R * sequences, tl.sum(minus_r, 0))
    tl.store(at + DEAD * sequences, tl.sum(n_dead, 0).to(tl.float64))
    tl.store(at + KL * sequences, tl.sum(kl_sum, 0))
    tl.store(at + ENTROPY * sequences, tl.sum(entropy_sum, 0))
    if RATIO_KIND == 2:
        tl.store(at + RATIO * sequences, tl.sum(ratio_sum, 0))
        tl.store(at + RATIO_MIN * sequences, tl.min(ratio_min, 0).to(tl.float64))
        tl.store(at + RATIO_MAX * sequences, tl.max(ratio_max, 0).to(tl.float64))
    else:
        s = tl.exp(u).to(tl.float64)
        filled = length > 0
        tl.store(at + RATIO * sequences, tl.where(filled, s, 0.0))
        tl.store(at + RATIO_MIN * sequences, tl.where(filled, s, float("inf")))
        tl.store(at + RATIO_MAX * sequences, tl.where(filled, s, float("-inf")))


def policy_forward(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective
) -> PolicyResult:
    """The loss and its derivative with respect to every log-prob and entropy, all [N] rows of whole sequences."""
    n, sequences, dtype, device = log_probs.shape[0], policy.offsets.shape[0] - 1, log_probs.dtype, log_probs.device
    by_token, bonus = objective.ratio == "token", objective.entropy_coef != 0

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device=device)

    def flat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    mask, lengths = mask.contiguous(), empty(sequences)
    launch(
        count_tokens, sequences, SEQUENCE, mask=mask, offsets=policy.offsets, lengths=lengths, BLOCK=SEQUENCE.block_n
    )
    kl_aggregation = objective.kl_aggregation or objective.aggregation
    normalizer = policy.normalizer
    kl_normalizer = policy.kl_normalizer
    if kl_normalizer is None and kl_aggregation == objective.aggregation:
        kl_normalizer = normalizer
    normalizer = _normalizer(objective.aggregation, lengths) if normalizer is None else normalizer
    kl_normalizer = _normalizer(kl_aggregation, lengths) if kl_normalizer is None else kl_normalizer

    result = PolicyResult(
        empty(), empty(n if by_token else sequences), empty(n), empty(n if bonus else 0), empty(len(NAMES))
    )
    partials = empty(PARTIALS.value, sequences, of=torch.float64)
    launch(
        sequence_loss,
        sequences,
        SEQUENCE,
        log_probs=flat(log_probs),
        entropy=flat(entropy),
        mask=mask,
        advantages=flat(policy.advantages),
        old_log_probs=flat(policy.old_log_probs),
        ref_log_probs=flat(policy.ref_log_probs),
        token_weights=flat(policy.token_weights),
        offsets=policy.offsets,
        lengths=lengths,
        normalizer=normalizer,
        kl_normalizer=kl_normalizer,
        log_ratio=result.log_ratio,
        coefficient=result.coefficient,
        entropy_coefficient=result.entropy_coefficient if bonus else None,
        partials=partials,
        sequences=sequences,
        BLOCK=SEQUENCE.block_n,
        **objective_arguments(objective, kl_aggregation, dtype),
    )
    launch(
        finish,
        1,
        SEQUENCE,
        partials=partials,
        loss=result.loss,
        values=result.metrics,
        sequences=sequences,
        RATIO_KIND=RATIOS.index(objective.ratio),
        BLOCK=SEQUENCE.block_n,
    )
    return result


def _normalizer(aggregation: str, lengths: Tensor) -> Tensor:
    """What the sums are divided by if the caller does not say."""
    counted = lengths if aggregation == "token-mean" else (lengths > 0).to(lengths.dtype)
    return counted.sum().clamp(min=1)
