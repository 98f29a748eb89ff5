"""Sums over the tokens of sequences that are sharded over ranks (context parallelism).

Every rank holds some tokens of the same S sequences. Two all-gathers of a few fp64 numbers per sequence replace the
sums of `sequence.py`: one before the clip gate, which needs the mean log-ratio of all tokens, and one after it. The
ranks' numbers are added in rank order, so loss, metrics and decisions have the same bits on all ranks. The Triton
backend uses these functions, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...metrics import NAMES
from ...objective import Objective
from ...parallel import gather
from ..rows import PolicyRows


class TokenTerms(NamedTuple):
    """Per-token values of this rank's tokens, [N], in the notation of `sequence.py`; any values at masked tokens."""

    loss: Tensor
    d_log_ratio: Tensor
    d_log_prob: Tensor
    entropy_coefficient: Tensor  # or [0]
    log_ratio: Tensor
    low: Tensor  # bool: clipped at the lower bound
    high: Tensor  # bool: at the upper bound
    kl: Tensor | None
    entropy: Tensor | None


class Totals(NamedTuple):
    """Results over the tokens of all ranks."""

    loss: Tensor  # []
    d_log_ratio: Tensor  # [S]
    metrics: Tensor  # in the order of metrics.NAMES, and the number of invalid values at the end


class _Sums(NamedTuple):
    """Sums over the tokens of each sequence on all ranks, [S] fp64; 0 for what is absent."""

    loss: Tensor
    d_log_ratio: Tensor
    minus_log_ratio: Tensor
    low: Tensor
    high: Tensor
    no_gradient: Tensor  # tokens without a gradient if d_log_ratio of the sequence is 0
    never_gradient: Tensor  # tokens without a gradient for any d_log_ratio
    kl: Tensor
    entropy: Tensor
    ratio: Tensor  # for ratio="token"
    ratio_min: Tensor  # the smallest token ratio of all sequences, in every entry; inf without tokens
    ratio_max: Tensor  # the largest; -inf without tokens


def _sequence_sum(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0)


def _add_ranks(x: Tensor) -> Tensor:
    """Add [ranks, ...] in rank order."""
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total


def sums_before_gate(mask: Tensor, averaged: Tensor, policy: PolicyRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lengths of the sequences [S], their sums of `averaged` [N], and the number of invalid values []."""
    own = [_sequence_sum(mask, policy.offsets), _sequence_sum(averaged, policy.offsets)]
    own.append(policy.invalid.double().expand_as(own[0]))
    lengths, total, invalid = _add_ranks(gather(torch.stack(own), policy.group)).unbind()
    invalid = invalid[0].to(torch.int64) if len(invalid) else policy.invalid
    return lengths.to(averaged.dtype), total.to(averaged.dtype), invalid


def totals_of_ranks(
    terms: TokenTerms, free: Tensor, mask: Tensor, lengths: Tensor, u: Tensor, policy: PolicyRows, objective: Objective
) -> Totals:
    """Return loss, d_log_ratio and metrics of all ranks.

    Args:
        terms: of this rank's tokens.
        free: True at the tokens through which u has a gradient, [N].
        mask: True at unmasked tokens, [N].
        lengths: numbers of unmasked tokens on all ranks, [S].
        u: log-ratios, [S].
    """
    by_sequence, dtype = objective.ratio == "sequence", u.dtype
    sums = _sums_after_gate(terms, free, mask, policy, objective)
    no_gradient = sums.no_gradient
    if by_sequence:  # a token whose terms cancel exactly is counted as one with a gradient
        no_gradient = torch.where(sums.d_log_ratio == 0, no_gradient, sums.never_gradient)
    values = _metrics(sums, lengths, u, no_gradient, policy.invalid, objective.ratio == "token")
    loss = torch.where(policy.invalid > 0, torch.nan, sums.loss.sum().to(dtype))
    return Totals(loss, sums.d_log_ratio.to(dtype), values)


def _sums_after_gate(terms: TokenTerms, free: Tensor, mask: Tensor, policy: PolicyRows, objective: Objective) -> _Sums:
    coefficient = terms.d_log_prob if objective.ratio == "sequence" else terms.d_log_ratio + terms.d_log_prob
    no_gradient, ratio = coefficient == 0, None
    if terms.entropy_coefficient.numel():
        no_gradient = no_gradient & (terms.entropy_coefficient == 0)
    if objective.ratio == "token":
        ratio = terms.log_ratio.exp().double()
    per_token = (
        terms.loss,
        terms.d_log_ratio,
        -terms.log_ratio,
        terms.low,
        terms.high,
        no_gradient,
        no_gradient & ~free,
        terms.kl,
        terms.entropy,
        ratio,
    )
    zeros = mask.new_zeros(policy.offsets.shape[0] - 1, dtype=torch.float64)
    own = [zeros if x is None else _sequence_sum(torch.where(mask, x, 0), policy.offsets) for x in per_token]
    infinity = zeros.new_full((1,), torch.inf)
    extremes = [infinity[0], -infinity[0]]
    if ratio is not None:
        extremes = [
            torch.cat([torch.where(mask, ratio, torch.inf), infinity]).amin(),
            torch.cat([torch.where(mask, ratio, -torch.inf), -infinity]).amax(),
        ]
    every = gather(torch.stack([*own, *(x.expand_as(zeros) for x in extremes)]), policy.group)  # [ranks, 12, S]
    return _Sums(*_add_ranks(every[:, :-2]).unbind(), every[:, -2].amin(0), every[:, -1].amax(0))  # pyright: ignore[reportCallIssue]


def _metrics(sums: _Sums, lengths: Tensor, u: Tensor, no_gradient: Tensor, invalid: Tensor, by_token: bool) -> Tensor:
    """Return the metrics of `metrics.compute`, in the order of `metrics.NAMES`, and at the end `invalid`.

    Args:
        sums: of all ranks.
        lengths: numbers of unmasked tokens, [S].
        u: log-ratios, [S].
        no_gradient: numbers of tokens without a gradient, [S].
        invalid: number of invalid values, [].
        by_token: whether ratios are per token.
    """
    filled = lengths > 0
    tokens, sequences = lengths.double().sum(), filled.sum().double()
    per_token, per_sequence = tokens.clamp(min=1), sequences.clamp(min=1)
    ratio = u.exp().double()
    ratio_sum, count = torch.where(filled, ratio, 0).sum(), sequences
    infinity = ratio.new_full((1,), torch.inf)
    ratio_min = torch.cat([torch.where(filled, ratio, torch.inf), infinity]).amin()
    ratio_max = torch.cat([torch.where(filled, ratio, -torch.inf), -infinity]).amax()
    if by_token:
        ratio_sum, count = sums.ratio.sum(), tokens
        ratio_min, ratio_max = (
            torch.cat([sums.ratio_min, infinity]).amin(),
            torch.cat([sums.ratio_max, -infinity]).amax(),
        )
    values = {
        "clip_fraction": (sums.low + sums.high > 0).sum() / per_sequence,
        "clip_fraction_low": (sums.low > 0).sum() / per_sequence,
        "clip_fraction_high": (sums.high > 0).sum() / per_sequence,
        "token_clip_fraction": (sums.low + sums.high).sum() / per_token,
        "token_clip_fraction_low": sums.low.sum() / per_token,
        "token_clip_fraction_high": sums.high.sum() / per_token,
        "ratio_mean": torch.where(count > 0, ratio_sum / count.clamp(min=1), 1),
        "ratio_min": torch.where(count > 0, ratio_min, 1),
        "ratio_max": torch.where(count > 0, ratio_max, 1),
        "kl_to_old": sums.minus_log_ratio.sum() / per_token,
        "zero_coefficient_share": torch.where(tokens > 0, no_gradient.sum() / per_token, 1),
        "kl": sums.kl.sum() / per_token,
        "entropy": sums.entropy.sum() / per_token,
    }
    return torch.stack([*(values[name] for name in NAMES), invalid.double()]).to(u.dtype)
