"""The partial results of sequences, and the kernel that reduces them to the loss and the metrics.

Must match the sums in `torch/sequence.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from ...metrics import NAMES
from .surrogates import TOKEN_RATIO

# Indices into the partial results, [PARTIALS, S] fp64. Each covers the unmasked tokens of a sequence.
PARTIALS = 11
(
    LOSS,  # sum
    LENGTH,  # number of tokens
    LOW,  # number of tokens clipped at the lower bound
    HIGH,  # ... at an upper bound
    MINUS_LOG_RATIO,  # sum of old - lp
    NO_GRADIENT,  # number of tokens without a gradient
    KL,  # sum
    ENTROPY,  # sum
    RATIO,  # sum of the token ratios for ratio="token", else the sequence's ratio
    RATIO_MIN,  # smallest token ratio for ratio="token", else the sequence's ratio
    RATIO_MAX,  # largest token ratio for ratio="token", else the sequence's ratio
) = (tl.constexpr(i) for i in range(PARTIALS))

# Index of each metric in the result, the same as in `metrics.NAMES`.
MetricSlots = namedtuple("MetricSlots", NAMES)
SLOTS = MetricSlots(*range(len(NAMES)))

# How `total` reduces a row of partial results.
SUM, COUNT_POSITIVE, COUNT_CLIPPED, MIN, MAX = (tl.constexpr(i) for i in range(5))


@triton.jit(do_not_specialize=["sequences"])
def finish(
    partials,  # [PARTIALS, S]
    invalid,  # []: if it is not 0, the loss is NaN
    loss,  # out []
    metrics,  # out [len(NAMES)] fp64
    sequences: tl.int64,
    RATIO_KIND: tl.constexpr,
    SLOTS: tl.constexpr,  # MetricSlots
    BLOCK: tl.constexpr,
):
    """Reduce the partial results to the loss and the metrics. Launched as a single program."""
    low = total(partials, sequences, PARTIAL=LOW, REDUCTION=SUM, BLOCK=BLOCK)
    high = total(partials, sequences, PARTIAL=HIGH, REDUCTION=SUM, BLOCK=BLOCK)
    sequences_low = total(partials, sequences, PARTIAL=LOW, REDUCTION=COUNT_POSITIVE, BLOCK=BLOCK)
    sequences_high = total(partials, sequences, PARTIAL=HIGH, REDUCTION=COUNT_POSITIVE, BLOCK=BLOCK)
    sequences_clipped = total(partials, sequences, PARTIAL=LOW, REDUCTION=COUNT_CLIPPED, BLOCK=BLOCK)
    length = total(partials, sequences, PARTIAL=LENGTH, REDUCTION=SUM, BLOCK=BLOCK)
    filled = total(partials, sequences, PARTIAL=LENGTH, REDUCTION=COUNT_POSITIVE, BLOCK=BLOCK)
    tokens, filled_or_1 = tl.maximum(length, 1.0), tl.maximum(filled, 1.0)
    ratios = length if RATIO_KIND == TOKEN_RATIO else filled
    ratio = total(partials, sequences, PARTIAL=RATIO, REDUCTION=SUM, BLOCK=BLOCK)
    smallest = total(partials, sequences, PARTIAL=RATIO_MIN, REDUCTION=MIN, BLOCK=BLOCK)
    largest = total(partials, sequences, PARTIAL=RATIO_MAX, REDUCTION=MAX, BLOCK=BLOCK)
    total_loss = total(partials, sequences, PARTIAL=LOSS, REDUCTION=SUM, BLOCK=BLOCK)
    _store(loss, tl.where(tl.load(invalid) != 0, float("nan"), total_loss))
    _store(metrics + SLOTS.clip_fraction, sequences_clipped / filled_or_1)
    _store(metrics + SLOTS.clip_fraction_low, sequences_low / filled_or_1)
    _store(metrics + SLOTS.clip_fraction_high, sequences_high / filled_or_1)
    _store(metrics + SLOTS.token_clip_fraction, (low + high) / tokens)
    _store(metrics + SLOTS.token_clip_fraction_low, low / tokens)
    _store(metrics + SLOTS.token_clip_fraction_high, high / tokens)
    _store(metrics + SLOTS.ratio_mean, tl.where(ratios > 0, ratio / tl.maximum(ratios, 1.0), 1.0))
    # tl.min and tl.max ignore NaN. The sum of the ratios is NaN if any ratio is.
    smallest = tl.where(ratio != ratio, ratio, tl.where(ratios > 0, smallest, 1.0))
    largest = tl.where(ratio != ratio, ratio, tl.where(ratios > 0, largest, 1.0))
    _store(metrics + SLOTS.ratio_min, smallest)
    _store(metrics + SLOTS.ratio_max, largest)
    minus_log_ratio = total(partials, sequences, PARTIAL=MINUS_LOG_RATIO, REDUCTION=SUM, BLOCK=BLOCK)
    _store(metrics + SLOTS.kl_to_old, minus_log_ratio / tokens)
    no_gradient = total(partials, sequences, PARTIAL=NO_GRADIENT, REDUCTION=SUM, BLOCK=BLOCK)
    _store(metrics + SLOTS.zero_coefficient_share, tl.where(length > 0, no_gradient / tokens, 1.0))
    _store(metrics + SLOTS.kl, total(partials, sequences, PARTIAL=KL, REDUCTION=SUM, BLOCK=BLOCK) / tokens)
    _store(metrics + SLOTS.entropy, total(partials, sequences, PARTIAL=ENTROPY, REDUCTION=SUM, BLOCK=BLOCK) / tokens)
    _store(metrics + SLOTS.tokens, length)
    _store(metrics + SLOTS.sequences, filled)
    _store(metrics + SLOTS.ratios, ratios)


@triton.jit
def _store(at, value):
    """Write a value in the dtype of the tensor that `at` points to."""
    tl.store(at, value.to(at.dtype.element_ty))


@triton.jit
def total(partials, n, PARTIAL: tl.constexpr, REDUCTION: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce row PARTIAL of partial results [rows, n], in fp64.

    COUNT_CLIPPED, with PARTIAL=LOW, counts the sequences with LOW + HIGH > 0.
    """
    neutral = float("inf") if REDUCTION == MIN else float("-inf") if REDUCTION == MAX else 0.0
    acc = tl.full([BLOCK], neutral, tl.float64)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(partials + PARTIAL * n + i, mask=i < n, other=neutral)
        if REDUCTION == SUM:
            acc += x
        elif REDUCTION == COUNT_POSITIVE:
            acc += tl.where(x > 0, 1.0, 0.0)
        elif REDUCTION == COUNT_CLIPPED:
            x += tl.load(partials + HIGH * n + i, mask=i < n, other=0.0)
            acc += tl.where(x > 0, 1.0, 0.0)
        elif REDUCTION == MIN:
            acc = tl.minimum(acc, x)
        else:
            acc = tl.maximum(acc, x)
    if REDUCTION == MIN:
        return tl.min(acc, 0)
    elif REDUCTION == MAX:
        return tl.max(acc, 0)
    else:
        return tl.sum(acc, 0)
