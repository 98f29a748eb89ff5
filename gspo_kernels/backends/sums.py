"""Sums over the tokens of each sequence, and the metrics computed from them.

With context parallelism (CP) every rank holds some tokens of the same S sequences. Two all-gathers of a few fp64
numbers per sequence then complete the sums: one before the clip gate, which needs the mean log-ratio of all tokens, and
one after it. The ranks' numbers are added in rank order, so loss, metrics and clip decisions have the same bits on all
ranks.

Notation: `torch/sequence.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..metrics import NAMES
from ..ranks.collectives import gather
from .rows import PolicyRows

BOUNDS = ("", "_low", "_high")  # suffixes of clip fractions: either bound, lower, upper


class TokenTerms(NamedTuple):
    """Per-token values, [N]. Masked tokens may hold anything."""

    loss: Tensor
    d_log_ratio: Tensor
    minus_log_ratio: Tensor
    low: Tensor  # bool: clipped at the lower bound
    high: Tensor  # bool: clipped at the upper bound
    kl: Tensor | None
    entropy: Tensor | None
    zero_without_u: Tensor | None  # bool: the token's gradient is 0 if u has no gradient; only with CP
    zero_with_any_u: Tensor | None  # bool: it is 0 for every gradient of u; only with CP


class Sums(NamedTuple):
    """Sums over the tokens of each sequence on all ranks. Terms that are absent have no column."""

    columns: dict[str, Tensor]  # [S] fp64: by the names of `TokenTerms`, and "ratio" of tokens for ratio="token"
    ratio_min: Tensor | None  # [] smallest token ratio of all sequences; inf without tokens
    ratio_max: Tensor | None  # [] largest; -inf without tokens


def sums_before_gate(mask: Tensor, averaged: Tensor, policy: PolicyRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of unmasked tokens of each sequence [S], their sum of `averaged` [S], and `policy.invalid`."""
    dtype, invalid = averaged.dtype, policy.invalid
    lengths = _segment_sum(mask, policy.offsets)
    total = _segment_sum(averaged, policy.offsets)
    if policy.group:
        own = torch.stack([lengths, total, invalid.double().expand_as(total)])
        lengths, total, of_sequences = _add_ranks(gather(own, policy.group)).unbind()
        invalid = of_sequences[0].to(torch.int64) if len(of_sequences) else invalid
    return lengths.to(dtype), total.to(dtype), invalid


def sums_after_gate(terms: TokenTerms, mask: Tensor, policy: PolicyRows, by_token: bool) -> Sums:
    """Sum the terms of each sequence.

    Args:
        terms: of this rank's tokens.
        mask: True at unmasked tokens, [N].
        policy: offsets and, with CP, the group.
        by_token: True for ratio="token".
    """
    present = {name: x for name, x in terms._asdict().items() if x is not None}
    extremes = []
    if by_token:
        ratio = present["ratio"] = terms.minus_log_ratio.neg().exp()
        extremes = [_smallest(torch.where(mask, x, torch.inf).double()) for x in (ratio, -ratio)]
    sums = _segment_sums(torch.where(mask, torch.stack(list(present.values())), 0), policy.offsets)  # [columns, S]
    if policy.group:
        own = torch.cat([sums, *(x.expand(1, sums.shape[1]) for x in extremes)])
        every = gather(own, policy.group)  # [ranks, columns, S]
        sums = _add_ranks(every[:, : len(present)])
        extremes = [_smallest(every[:, len(present) + i]) for i in range(len(extremes))]
    smallest, minus_largest = extremes or (None, None)
    largest = None if minus_largest is None else -minus_largest
    return Sums(dict(zip(present, sums.unbind(), strict=True)), smallest, largest)


def metrics_of(sums: Sums, n_zero: Tensor, lengths: Tensor, u: Tensor, invalid: Tensor | None) -> Tensor:
    """Compute the metrics in the order of `metrics.NAMES`, and append `invalid` if it is not None.

    Args:
        sums: of all ranks.
        n_zero: number of tokens without a gradient, [] or [S].
        lengths: number of unmasked tokens in each sequence, [S].
        u: log-ratios, [S]. Not used for ratio="token".
        invalid: number of invalid values, [].
    """
    filled = lengths > 0
    tokens = lengths.sum(dtype=torch.float64)
    sequences = filled.sum(dtype=torch.float64)
    per_token = tokens.clamp(min=1)
    per_sequence = sequences.clamp(min=1)
    columns = sums.columns
    low, high = columns["low"], columns["high"]
    clipped = torch.stack([low + high, low, high])  # tokens of each sequence
    clipped_sequences = ((clipped > 0).sum(1) / per_sequence).unbind()
    clipped_tokens = (clipped.sum(1) / per_token).unbind()
    if sums.ratio_min is None or sums.ratio_max is None:
        ratio = u.exp().double()
        count = sequences
        ratio_mean = torch.where(filled, ratio, 0).sum() / per_sequence
        ratio_min = _smallest(torch.where(filled, ratio, torch.inf))
        ratio_max = -_smallest(torch.where(filled, -ratio, torch.inf))
    else:
        count = tokens
        ratio_mean = columns["ratio"].sum() / per_token
        ratio_min, ratio_max = sums.ratio_min, sums.ratio_max
    ratios = torch.where(count > 0, torch.stack([ratio_mean, ratio_min, ratio_max]), 1).unbind()
    values = {
        **{f"clip_fraction{end}": x for end, x in zip(BOUNDS, clipped_sequences, strict=True)},
        **{f"token_clip_fraction{end}": x for end, x in zip(BOUNDS, clipped_tokens, strict=True)},
        **{f"ratio_{name}": x for name, x in zip(("mean", "min", "max"), ratios, strict=True)},
        "kl_to_old": columns["minus_log_ratio"].sum() / per_token,
        "zero_coefficient_share": torch.where(tokens > 0, n_zero.sum() / per_token, 1),
    }
    for name in ("kl", "entropy"):
        values[name] = columns[name].sum() / per_token if name in columns else tokens.new_zeros(())
    appended = [] if invalid is None else [invalid.double()]
    return torch.stack([*(values[name] for name in NAMES), *appended]).to(u.dtype)


def _segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum each sequence's rows, [N] -> [S], fp64. See `layout.segment_sum` for why fp64."""
    return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0)


def _segment_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum each sequence's rows in each line of `x`, [K, N] -> [K, S], fp64, in one reduction."""
    lines, rows = x.shape
    first_row = torch.arange(lines, device=x.device) * rows  # of each line in the flattened tensor
    begins = (first_row[:, None] + offsets[:-1]).flatten()
    ends = torch.cat([begins, begins.new_full((1,), lines * rows)])
    return _segment_sum(x.flatten(), ends).view(lines, offsets.shape[0] - 1)


def _smallest(x: Tensor) -> Tensor:
    """Return the smallest value, [], or inf if there is none. NaN propagates."""
    return torch.cat([x.flatten(), x.new_full((1,), torch.inf)]).amin()


def _add_ranks(x: Tensor) -> Tensor:
    """Add [ranks, ...] in rank order."""
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total
