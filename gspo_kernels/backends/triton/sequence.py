"""The loss from log-probs and its derivatives with respect to them, in one program per sequence.

A program averages or sums the log-ratios of its tokens, adds up loss and metrics, and writes each token's coefficient,
d(loss)/d(log_prob). The loops over tokens are in `token_passes.py`. `surrogates.py` decides where the clip binds; the
slope is 0 there. An earlier launch counts tokens, because default normalizers need the counts of the full batch. A
later launch adds up the sequences (`totals.py`).

Sums are in fp64. In GSPO the terms of a sequence are equal, and an fp32 sum of equal terms may round in the same
direction every time.

Formulas: `objective.py`. Must match the torch backend's `sequence.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metrics import NAMES
from ...objective import RATIOS, Objective
from ..rows import PolicyResult, PolicyRows
from .launch import launch
from .surrogates import TOKEN_MEAN, TOKEN_RATIO, Bounds, objective_arguments, weight_of_token
from .token_passes import TokenInputs, TokenOutputs, Weights, add_ratio_gradient, sequence_log_ratio, sum_tokens
from .totals import (
    COUNT_POSITIVE,
    ENTROPY,
    HIGH,
    KL,
    LENGTH,
    LOSS,
    LOW,
    MINUS_LOG_RATIO,
    NO_GRADIENT,
    PARTIALS,
    RATIO,
    RATIO_MAX,
    RATIO_MIN,
    SLOTS,
    SUM,
    finish,
    total,
)
from .tuning import sequence_config


@triton.jit
def count_tokens(mask, offsets, lengths, BLOCK: tl.constexpr):
    """Write lengths[i], the number of unmasked tokens of sequence i."""
    i = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + i), tl.load(offsets + i + 1)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        count += tl.load(mask + t, mask=t < end, other=0).to(tl.int32)
    tl.store(lengths + i, tl.sum(count, 0).to(lengths.dtype.element_ty))


@triton.jit(do_not_specialize=["sequences"])
def sequence_loss(
    log_probs,  # [N], as are the next six: the fields of `TokenInputs`
    entropy,
    mask,
    advantages,
    old_log_probs,
    ref_log_probs,
    token_weights,
    offsets,  # [S + 1] int64
    lengths,  # [S]
    normalizer,  # [], or None for the default
    kl_normalizer,  # [], or None for the default
    invalid,  # []: if it is not 0, the result is NaN
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
    k_pos: tl.float64,
    lambda_pos: tl.float64,
    k_neg: tl.float64,
    lambda_neg: tl.float64,
    length_norm: tl.float64,
    kl_coef: tl.float64,
    entropy_coef: tl.float64,
    OBJECTIVE: tl.constexpr,  # ObjectiveConstants
    BLOCK: tl.constexpr,
):
    """Compute loss, derivatives and partial results of one sequence.

    Inputs are read from memory once. Log-probs, mask and coefficients are read again, from the cache.
    """
    ACC: tl.constexpr = OBJECTIVE.ACC
    tokens = TokenInputs(
        log_probs=log_probs,
        entropy=entropy,
        mask=mask,
        advantages=advantages,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        token_weights=token_weights,
    )
    bounds = Bounds(
        log_low=log_low,
        log_high=log_high,
        log_ceiling=log_ceiling,
        clip_low=clip_low,
        clip_high=clip_high,
        ceiling=ceiling,
        temperature_pos=temperature_pos,
        temperature_neg=temperature_neg,
        k_pos=k_pos,
        lambda_pos=lambda_pos,
        k_neg=k_neg,
        lambda_neg=lambda_neg,
    )
    i = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets + i), tl.load(offsets + i + 1)
    length = tl.load(lengths + i)
    divisor = divisor_of(normalizer, lengths, sequences, AGGREGATION=OBJECTIVE.AGGREGATION, ACC=ACC, BLOCK=BLOCK)
    weight = weight_of_token(length, divisor, length_norm, AGGREGATION=OBJECTIVE.AGGREGATION, ACC=ACC)
    kl_weight = tl.zeros_like(weight)
    if OBJECTIVE.HAS_KL:
        divisor = divisor_of(
            kl_normalizer, lengths, sequences, AGGREGATION=OBJECTIVE.KL_AGGREGATION, ACC=ACC, BLOCK=BLOCK
        )
        kl_weight = weight_of_token(length, divisor, length_norm, AGGREGATION=OBJECTIVE.KL_AGGREGATION, ACC=ACC)
        kl_weight = tl.full([], kl_coef, ACC) * kl_weight
    if tl.load(invalid) != 0:
        weight = weight * float("nan")
        kl_weight = kl_weight * float("nan")
    weights = Weights(policy=weight, kl=kl_weight, entropy=-tl.full([], entropy_coef, ACC) * weight)
    u = tl.full([], 0.0, ACC)
    if OBJECTIVE.RATIO != TOKEN_RATIO:
        u = sequence_log_ratio(tokens, bounds, begin=begin, end=end, length=length, OBJECTIVE=OBJECTIVE, BLOCK=BLOCK)
        tl.store(log_ratio + i, u)
    outputs = TokenOutputs(log_ratio=log_ratio, coefficient=coefficient, entropy_coefficient=entropy_coefficient)
    sums = sum_tokens(tokens, outputs, weights, bounds, u=u, begin=begin, end=end, OBJECTIVE=OBJECTIVE, BLOCK=BLOCK)
    # The gradient through a sequence's ratio needs a sum over its tokens, so a second loop adds it. The loop reads
    # coefficients that other threads wrote, hence the barrier.
    tl.debug_barrier()
    mean_d_log_ratio = tl.sum(sums.d_log_ratio, 0).to(ACC) / tl.maximum(length, 1.0)
    n_no_gradient = add_ratio_gradient(
        tokens,
        outputs,
        bounds,
        mean_d_log_ratio=mean_d_log_ratio,
        entropy_weight=weights.entropy,
        begin=begin,
        end=end,
        OBJECTIVE=OBJECTIVE,
        BLOCK=BLOCK,
    )
    _store_partials(
        partials + i, sums, n_no_gradient=n_no_gradient, sequences=sequences, u=u, length=length, OBJECTIVE=OBJECTIVE
    )


@triton.jit
def divisor_of(normalizer, lengths, sequences, AGGREGATION: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """The normalizer, by default the number of tokens for "token-mean", else of non-empty sequences; at least 1.

    Every program recomputes the default from S lengths, which saves a launch.
    """
    if normalizer is not None:
        return tl.load(normalizer).to(ACC)
    else:
        reduction: tl.constexpr = SUM if AGGREGATION == TOKEN_MEAN else COUNT_POSITIVE
        default = total(lengths, sequences, PARTIAL=0, REDUCTION=reduction, BLOCK=BLOCK)
        return tl.maximum(default, 1.0).to(ACC)


@triton.jit
def _store_partials(at, sums, n_no_gradient, sequences, u, length, OBJECTIVE: tl.constexpr):
    """Write the partial results of a sequence from its TokenSums. `at` points to the sequence's first entry."""
    tl.store(at + LOSS * sequences, tl.sum(sums.loss, 0))
    tl.store(at + LENGTH * sequences, length.to(tl.float64))
    tl.store(at + LOW * sequences, tl.sum(sums.n_low, 0).to(tl.float64))
    tl.store(at + HIGH * sequences, tl.sum(sums.n_high, 0).to(tl.float64))
    tl.store(at + MINUS_LOG_RATIO * sequences, tl.sum(sums.minus_log_ratio, 0))
    tl.store(at + NO_GRADIENT * sequences, tl.sum(n_no_gradient, 0).to(tl.float64))
    tl.store(at + KL * sequences, tl.sum(sums.kl, 0))
    tl.store(at + ENTROPY * sequences, tl.sum(sums.entropy, 0))
    if OBJECTIVE.RATIO == TOKEN_RATIO:
        tl.store(at + RATIO * sequences, tl.sum(sums.ratio, 0))
        tl.store(at + RATIO_MIN * sequences, tl.min(sums.ratio_min, 0).to(tl.float64))
        tl.store(at + RATIO_MAX * sequences, tl.max(sums.ratio_max, 0).to(tl.float64))
    else:
        s = tl.exp(u).to(tl.float64)
        filled = length > 0
        tl.store(at + RATIO * sequences, tl.where(filled, s, 0.0))
        tl.store(at + RATIO_MIN * sequences, tl.where(filled, s, float("inf")))
        tl.store(at + RATIO_MAX * sequences, tl.where(filled, s, float("-inf")))


def policy_forward(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective
) -> PolicyResult:
    """Compute the loss and its derivatives with respect to log-probs and entropies, from tensors [N]."""
    n = log_probs.shape[0]
    sequences = policy.offsets.shape[0] - 1
    dtype = log_probs.dtype
    device = log_probs.device
    by_token = objective.ratio == "token"
    has_bonus = objective.entropy_coef != 0
    block = sequence_config(dtype)

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    def contiguous(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    mask = mask.contiguous()
    lengths = empty(sequences)
    launch(count_tokens, sequences, block, mask=mask, offsets=policy.offsets, lengths=lengths, BLOCK=block.block_n)
    kl_aggregation = objective.kl_aggregation or objective.aggregation
    kl_normalizer = policy.kl_normalizer
    if kl_normalizer is None and kl_aggregation == objective.aggregation:
        kl_normalizer = policy.normalizer
    result = PolicyResult(
        loss=empty(),
        log_ratio=empty(n if by_token else sequences),
        coefficient=empty(n),
        entropy_coefficient=empty(n if has_bonus else 0),
        metrics=empty(len(NAMES), kind=torch.float64),
    )
    partials = empty(PARTIALS, sequences, kind=torch.float64)
    launch(
        sequence_loss,
        sequences,
        block,
        log_probs=contiguous(log_probs),
        entropy=contiguous(entropy),
        mask=mask,
        advantages=contiguous(policy.advantages),
        old_log_probs=contiguous(policy.old_log_probs),
        ref_log_probs=contiguous(policy.ref_log_probs),
        token_weights=contiguous(policy.token_weights),
        offsets=policy.offsets,
        lengths=lengths,
        normalizer=policy.normalizer,
        kl_normalizer=kl_normalizer,
        invalid=policy.invalid,
        log_ratio=result.log_ratio,
        coefficient=result.coefficient,
        entropy_coefficient=result.entropy_coefficient if has_bonus else None,
        partials=partials,
        sequences=sequences,
        BLOCK=block.block_n,
        **objective_arguments(objective, kl_aggregation, dtype),
    )
    launch(
        finish,
        1,
        block,
        partials=partials,
        invalid=policy.invalid,
        loss=result.loss,
        metrics=result.metrics,
        sequences=sequences,
        RATIO_KIND=RATIOS.index(objective.ratio),
        SLOTS=SLOTS,
        BLOCK=block.block_n,
    )
    return result
