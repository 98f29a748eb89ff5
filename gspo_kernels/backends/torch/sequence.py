"""Compute the loss from log-probs and, in closed form, its derivative with respect to each log-prob, in plain torch.

Formulas and notation: `objective.py`. Must match the Triton backend's `sequence.py`.

The loss depends on a token's log-prob lp_it in two ways, through the log-ratio u and directly:

    d_log_ratio_it = c_it o_it dl/du  (plus kl_coef c'_it k s with kl_ratio_factor)
    d_log_prob_it  = kl_coef c'_it k'_it  (times s with kl_ratio_factor)

k'_it is the derivative of k. The surrogates in SCORES are a weight times the log-prob. They have no gradient through u:
c_it o_it dl/d(lp_it) goes into d_log_prob.

The coefficient, the derivative of the whole loss with respect to lp_it, is

    ratio="sequence"              h_it mean_d_log_ratio_i + d_log_prob_it
    other ratios                  d_log_ratio_it + d_log_prob_it

where mean_d_log_ratio_i is the sum of d_log_ratio over the sequence divided by L_i, because u_i is a mean over L_i
tokens. h_it is 1 at unmasked tokens, otherwise 0; for gmpo it is also 0 at tokens whose log-ratio is clipped.

With context parallelism (CP) every rank holds some tokens of the same S sequences. Two all-gathers of a few fp64
numbers per sequence then complete the sums: one before the clip gate, which needs the log-ratios of all tokens, and one
after it. The ranks' numbers are added in rank order, so loss, metrics and clip decisions have the same bits on all
ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import sequence_of_row
from ...metrics import NAMES
from ...objective import DIVERGENCES, SCORES, VESPO_TOKEN_BOUND, Objective
from ...ranks.collectives import gather
from ..precision import multiply_no_nan
from ..rows import PolicyResult, PolicyRows
from .surrogates import bounded, divergence_times, dppo, kl_and_slope, surrogate

BOUNDS = ("", "_low", "_high")  # suffixes of clip fractions: either bound, lower, upper


def policy_forward(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective
) -> PolicyResult:
    """Compute the loss and its derivatives with respect to log-probs and entropies, from tensors [N]."""
    offsets, advantages = policy.offsets, policy.advantages
    by_token = objective.ratio == "token"
    sequence = sequence_of_row(offsets, mask.shape[0])  # [N]
    masked = ~mask
    lp = log_probs.masked_fill(masked, 0)
    token_log_ratio, summed, token_bounds = _log_ratios(log_probs, mask, policy, objective)
    lengths, total, invalid = _sums_before_gate(mask, summed, policy)  # [S], [S], []
    policy = policy._replace(invalid=invalid)
    u = total if objective.ratio == "sequence-product" else total / lengths.clamp(min=1)
    log_ratio = token_log_ratio if by_token else u[sequence]  # [N], like all tensors over tokens below

    if objective.surrogate in DIVERGENCES:
        value, slope, low, high = dppo(log_ratio, advantages, lp, objective)
    else:
        value, slope, low, high = surrogate(log_ratio, advantages, objective)
    if token_bounds is not None:
        low, high = token_bounds
    if policy.token_weights is not None:
        value = multiply_no_nan(policy.token_weights, value)
        slope = multiply_no_nan(policy.token_weights, slope)
    weight = _weight_of_token(mask, sequence, lengths, policy, objective, objective.aggregation, policy.normalizer)
    d_log_ratio = (weight * slope).masked_fill(masked, 0)
    d_log_prob = torch.zeros_like(lp)
    if objective.surrogate in SCORES:  # the slope is with respect to the log-prob, and u has no gradient
        value = multiply_no_nan(value, lp)
        d_log_prob = d_log_ratio
        d_log_ratio = torch.zeros_like(lp)
    loss_rows = (weight * value).masked_fill(masked, 0)

    kl = kl_slope = None
    if policy.ref_log_probs is not None:
        d = torch.where(mask, log_probs - policy.ref_log_probs, 0)
        kl, kl_slope = kl_and_slope(d, token_log_ratio, objective.kl_estimator)
    if objective.kl_coef > 0 and kl is not None and kl_slope is not None:
        kl_weight = objective.kl_coef * _kl_weight(mask, sequence, lengths, policy, objective)
        if objective.kl_ratio_factor:
            kl_weight = torch.where(mask, kl_weight * log_ratio.exp(), 0)
            d_log_ratio = d_log_ratio + divergence_times(kl, kl_weight)
        loss_rows = loss_rows + divergence_times(kl, kl_weight)
        d_log_prob = d_log_prob + divergence_times(kl_slope, kl_weight)

    entropy_coefficient = lp.new_empty(0)
    if objective.entropy_coef != 0 and entropy is not None:
        entropy_coefficient = -objective.entropy_coef * weight
        loss_rows = loss_rows + torch.where(mask, entropy_coefficient * entropy, 0)

    free = mask if token_bounds is None else mask & ~(low | high)  # tokens through which u has a gradient
    zero_without_u = zero_with_any_u = None
    if policy.group:
        without_u = d_log_prob if objective.ratio == "sequence" else d_log_ratio + d_log_prob
        zero_without_u = _is_zero(without_u, entropy_coefficient)
        zero_with_any_u = zero_without_u & ~free
    terms = _TokenTerms(
        loss_rows, d_log_ratio, -token_log_ratio, low, high, kl, entropy, zero_without_u, zero_with_any_u
    )
    sums = _sums_after_gate(terms, mask, policy, by_token)
    d_total = sums.columns["d_log_ratio"]
    if objective.ratio == "sequence":
        d_log_ratio = torch.where(free, (d_total.to(lp.dtype) / lengths.clamp(min=1))[sequence], 0)
    coefficient = d_log_ratio + d_log_prob
    if not policy.group:
        n_zero = (mask & _is_zero(coefficient, entropy_coefficient)).sum()
    elif objective.ratio == "sequence":  # a token whose terms cancel exactly is counted as one with a gradient
        n_zero = torch.where(d_total == 0, sums.columns["zero_without_u"], sums.columns["zero_with_any_u"])
    else:
        n_zero = sums.columns["zero_without_u"]
    loss = torch.where(invalid > 0, torch.nan, sums.columns["loss"].to(lp.dtype).sum())
    metrics = _metrics(sums, n_zero, lengths, u, invalid if policy.group else None)
    return PolicyResult(loss, token_log_ratio.clone() if by_token else u, coefficient, entropy_coefficient, metrics)


def _is_zero(coefficient: Tensor, entropy_coefficient: Tensor) -> Tensor:
    """True at tokens without a gradient, [N] bool."""
    is_zero = coefficient == 0
    return is_zero & (entropy_coefficient == 0) if entropy_coefficient.numel() else is_zero


def _log_ratios(
    log_probs: Tensor, mask: Tensor, policy: PolicyRows, objective: Objective
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Compute token log-ratios, the values whose sums give u, and the masks (low, high) of clipped tokens, [N].

    The values are the token log-ratios, for gmpo and vespo bounded. The masks are None except for gmpo.
    """
    # Without old log-probs the difference is 0, or NaN where a log-prob is not finite. Subtract anyway, so that
    # this NaN reaches the loss.
    old = log_probs if policy.old_log_probs is None else policy.old_log_probs
    token_log_ratio = summed = torch.where(mask, log_probs - old, 0)
    token_bounds = None
    if objective.surrogate == "gmpo":
        summed, low, high = bounded(token_log_ratio, policy.advantages, objective)
        token_bounds = low, high
    elif objective.surrogate == "vespo":
        summed = token_log_ratio.clamp(-VESPO_TOKEN_BOUND, VESPO_TOKEN_BOUND)
    return token_log_ratio, summed, token_bounds


def _kl_weight(mask: Tensor, sequence: Tensor, lengths: Tensor, policy: PolicyRows, objective: Objective) -> Tensor:
    """Compute c'_it, the weight of each token in the KL term, [N].

    The aggregation is `kl_aggregation` or, if that is None, the policy term's. The normalizer is `kl_normalizer` or, if
    that is None, the policy term's where both terms have the same aggregation, else the default of the aggregation.
    """
    aggregation = objective.kl_aggregation or objective.aggregation
    normalizer = policy.kl_normalizer
    if normalizer is None and aggregation == objective.aggregation:
        normalizer = policy.normalizer
    return _weight_of_token(mask, sequence, lengths, policy, objective, aggregation, normalizer)


def _weight_of_token(
    mask: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    policy: PolicyRows,
    objective: Objective,
    aggregation: str,
    normalizer: Tensor | None,
) -> Tensor:
    """Compute c_it, the aggregation's weight of each token divided by the normalizer, [N].

    Masked rows get 0. If the input is invalid, all rows get NaN.
    """
    weight = torch.ones_like(lengths)  # [S]
    if aggregation == "seq-mean-token-mean":
        weight = weight / lengths.clamp(min=1)
    elif aggregation == "seq-mean-token-sum-norm":
        assert objective.length_norm is not None  # Objective rejects this aggregation without it
        weight = weight / objective.length_norm
    if normalizer is None:
        normalizer = (lengths.sum() if aggregation == "token-mean" else (lengths > 0).sum()).clamp(min=1)
    weight = torch.where(mask, weight[sequence] / normalizer.to(weight.dtype), 0)  # [N]
    return torch.where(policy.invalid > 0, torch.nan, weight)


# -- sums over the tokens of each sequence, and the metrics computed from them


class _TokenTerms(NamedTuple):
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


class _Sums(NamedTuple):
    """The sums of each sequence over its tokens on all ranks. A term that is None has no column."""

    columns: dict[str, Tensor]  # [S] fp64: by the names of `_TokenTerms`, and "ratio" of tokens for ratio="token"
    ratio_min: Tensor | None  # [] smallest token ratio of all sequences; inf if no token is unmasked
    ratio_max: Tensor | None  # [] largest; -inf if no token is unmasked


def _sums_before_gate(mask: Tensor, summed: Tensor, policy: PolicyRows) -> tuple[Tensor, Tensor, Tensor]:
    """Count the unmasked tokens of each sequence, add up `summed` over them, and count the invalid values.

    With CP, all three are totals over the ranks: [S], [S] and [].
    """
    dtype, invalid = summed.dtype, policy.invalid
    lengths = _segment_sum(mask, policy.offsets)
    total = _segment_sum(summed, policy.offsets)
    if policy.group:
        own = torch.stack([lengths, total, invalid.double().expand_as(total)])
        lengths, total, of_sequences = _add_ranks(gather(own, policy.group)).unbind()
        invalid = of_sequences[0].to(torch.int64) if len(of_sequences) else invalid
    return lengths.to(dtype), total.to(dtype), invalid


def _sums_after_gate(terms: _TokenTerms, mask: Tensor, policy: PolicyRows, by_token: bool) -> _Sums:
    """Sum the terms of each sequence.

    Args:
        terms: of this rank's tokens.
        mask: True at unmasked tokens, [N].
        policy: offsets and, with CP, the group.
        by_token: True for ratio="token".
    """
    present = {name: x for name, x in terms._asdict().items() if x is not None}
    extremes = mask.new_empty(0, dtype=torch.float64)  # [2] with ratio="token": of the ratios and of minus the ratios
    if by_token:
        ratio = present["ratio"] = terms.minus_log_ratio.neg().exp()
        extremes = _smallest(torch.where(mask, torch.stack([ratio, -ratio]), torch.inf).double())
    sums = _segment_sums(torch.where(mask, torch.stack(list(present.values())), 0), policy.offsets)  # [columns, S]
    if policy.group:
        own = torch.cat([sums, extremes[:, None].expand(-1, sums.shape[1])])
        every = gather(own, policy.group)  # [ranks, columns, S]
        sums = _add_ranks(every[:, : len(present)])
        extremes = _smallest(every[:, len(present) :].transpose(0, 1))
    smallest, minus_largest = extremes.unbind() if by_token else (None, None)
    largest = None if minus_largest is None else -minus_largest
    return _Sums(dict(zip(present, sums.unbind(), strict=True)), smallest, largest)


def _metrics(sums: _Sums, n_zero: Tensor, lengths: Tensor, u: Tensor, invalid: Tensor | None) -> Tensor:
    """Compute the metrics in the order of `metrics.NAMES`, fp64, and append `invalid` if it is not None.

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
        ratio_min, minus_max = _smallest(torch.where(filled, torch.stack([ratio, -ratio]), torch.inf)).unbind()
        ratio_max = -minus_max
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
    values |= {"tokens": tokens, "sequences": sequences, "ratios": count}
    appended = [] if invalid is None else [invalid.double()]
    return torch.stack([*(values[name] for name in NAMES), *appended])


def _segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum each sequence's rows, [N] -> [S], fp64. See `layout.segment_sum` for why fp64."""
    return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0)


def _segment_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """Apply `_segment_sum` to each line of `x`, [K, N] -> [K, S], in one reduction."""
    lines, rows = x.shape
    first_row = torch.arange(lines, device=x.device) * rows  # of each line in the flattened tensor
    begins = (first_row[:, None] + offsets[:-1]).flatten()
    ends = torch.cat([begins, begins.new_full((1,), lines * rows)])
    return _segment_sum(x.flatten(), ends).view(lines, offsets.shape[0] - 1)


def _smallest(x: Tensor) -> Tensor:
    """The smallest value of each line, [K, ...] -> [K]; inf for an empty line. NaN propagates."""
    return torch.cat([x.flatten(1), x.new_full((len(x), 1), torch.inf)], 1).amin(1)


def _add_ranks(x: Tensor) -> Tensor:
    """Add [ranks, ...] in rank order."""
    total = x[0]
    for term in x[1:]:
        total = total + term
    return total
