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

from ..layout import segment_sums
from ..metrics import NAMES
from ..ranks.collectives import gather
from .rows import PolicyRows


class TokenTerms(NamedTuple):
    """Per-token values, [N]. Masked tokens may hold anything."""

    loss: Tensor
    d_log_ratio: Tensor
    minus_log_ratio: Tensor
    low: Tensor  # bool: clipped at the lower bound
    high: Tensor  # bool: clipped at the upper bound
    kl: Tensor | None
    entropy: Tensor | None


class Sums(NamedTuple):
    """Sums over the tokens of each sequence, [S] fp64, on all ranks."""

    loss: Tensor
    d_log_ratio: Tensor
    minus_log_ratio: Tensor
    low: Tensor
    high: Tensor
    no_gradient: Tensor  # tokens without a gradient, if u has none
    never_gradient: Tensor  # tokens without a gradient, whatever the gradient of u is
    kl: Tensor | None
    entropy: Tensor | None
    ratio: Tensor | None  # sum of token ratios, only for ratio="token"
    ratio_min: Tensor | None  # [] smallest token ratio of all sequences; inf without tokens
    ratio_max: Tensor | None  # [] largest; -inf without tokens


def sums_before_gate(mask: Tensor, averaged: Tensor, policy: PolicyRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of unmasked tokens of each sequence [S], their sum of `averaged` [S], and `policy.invalid`."""
    sums = segment_sums(torch.stack([mask.to(averaged.dtype), averaged]), policy.offsets)
    invalid = policy.invalid
    if policy.group:
        own = torch.cat([sums, invalid.double().expand(1, sums.shape[1])])
        every = _add_ranks(gather(own, policy.group))
        sums = every[:2]
        invalid = every[2, 0].to(torch.int64) if every.shape[1] else invalid
    lengths, total = sums.to(averaged.dtype).unbind()
    return lengths, total, invalid


def sums_after_gate(
    terms: TokenTerms, no_gradient: Tensor, free: Tensor, mask: Tensor, policy: PolicyRows, by_token: bool
) -> Sums:
    """Sum the terms of each sequence.

    Args:
        terms: of this rank's tokens.
        no_gradient: True at tokens without a gradient if u has none, [N].
        free: True at the tokens through which u has a gradient, [N].
        mask: True at unmasked tokens, [N].
        policy: offsets and, with CP, the group.
        by_token: True for ratio="token".
    """
    ratio = terms.minus_log_ratio.neg().exp() if by_token else None
    columns = terms._asdict() | {"no_gradient": no_gradient, "never_gradient": no_gradient & ~free, "ratio": ratio}
    present = {name: x for name, x in columns.items() if x is not None}
    values = torch.stack([x.double() for x in present.values()])
    sums = segment_sums(torch.where(mask, values, 0), policy.offsets)  # [columns, S]
    ratio_min = ratio_max = None
    if ratio is not None:
        ratio_min = _smallest(torch.where(mask, ratio, torch.inf).double())
        ratio_max = -_smallest(torch.where(mask, -ratio, torch.inf).double())
    if policy.group:
        extremes = [] if ratio_min is None or ratio_max is None else [ratio_min, -ratio_max]
        own = torch.cat([sums, *(x.expand(1, sums.shape[1]) for x in extremes)])
        every = gather(own, policy.group)  # [ranks, columns, S]
        sums = _add_ranks(every[:, : len(present)])
        if extremes:
            ratio_min = _smallest(every[:, -2])
            ratio_max = -_smallest(every[:, -1])
    of_all = dict.fromkeys(Sums._fields) | dict(zip(present, sums.unbind(), strict=True))
    return Sums(**of_all | {"ratio_min": ratio_min, "ratio_max": ratio_max})  # pyright: ignore[reportArgumentType]


def metrics_of(sums: Sums, no_gradient: Tensor, lengths: Tensor, u: Tensor, invalid: Tensor | None) -> Tensor:
    """Compute the metrics in the order of `metrics.NAMES`, and append `invalid` if it is not None.

    Args:
        sums: of all ranks.
        no_gradient: number of tokens without a gradient, [] or [S].
        lengths: number of unmasked tokens in each sequence, [S].
        u: log-ratios, [S]. Not used for ratio="token".
        invalid: number of invalid values, [].
    """
    filled = lengths > 0
    tokens = lengths.double().sum()
    sequences = filled.sum().double()
    per_token = tokens.clamp(min=1)
    per_sequence = sequences.clamp(min=1)
    count, ratio_sum, ratio_min, ratio_max = tokens, sums.ratio, sums.ratio_min, sums.ratio_max
    if ratio_sum is None or ratio_min is None or ratio_max is None:
        ratio = u.exp().double()
        count = sequences
        ratio_sum = torch.where(filled, ratio, 0)
        ratio_min = _smallest(torch.where(filled, ratio, torch.inf))
        ratio_max = -_smallest(torch.where(filled, -ratio, torch.inf))
    clipped = torch.stack([sums.low + sums.high, sums.low, sums.high])  # tokens of each sequence
    zero = tokens.new_zeros(())
    values = {
        **_named("clip_fraction", (clipped > 0).sum(1) / per_sequence),
        **_named("token_clip_fraction", clipped.sum(1) / per_token),
        "ratio_mean": torch.where(count > 0, ratio_sum.sum() / count.clamp(min=1), 1),
        "ratio_min": torch.where(count > 0, ratio_min, 1),
        "ratio_max": torch.where(count > 0, ratio_max, 1),
        "kl_to_old": sums.minus_log_ratio.sum() / per_token,
        "zero_coefficient_share": torch.where(tokens > 0, no_gradient.sum() / per_token, 1),
        "kl": zero if sums.kl is None else sums.kl.sum() / per_token,
        "entropy": zero if sums.entropy is None else sums.entropy.sum() / per_token,
    }
    appended = [] if invalid is None else [invalid.double()]
    return torch.stack([*(values[name] for name in NAMES), *appended]).to(u.dtype)


def _named(name: str, shares: Tensor) -> dict[str, Tensor]:
    """Name the shares of all, low and high clips, [3]."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), shares.unbind(), strict=True))


def _smallest(x: Tensor) -> Tensor:
    """Return the smallest value, [], or inf if there is none. NaN propagates."""
    return torch.cat([x.flatten(), x.new_full((1,), torch.inf)]).amin()


def _add_ranks(x: Tensor) -> Tensor:
    """Add [ranks, ...] in rank order."""
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total
