"""The loss of whole sequences and the closed form of d(loss)/d(log_prob), in plain torch.

Formulas: `objective.py`. Must match the Triton backend's `sequence.py`. A `coefficient` is the derivative of the whole
loss with respect to the log-prob lp_it. With
w_it = c_it o_it dl/du (+ the derivative of the factor [ s ] when `kl_ratio_factor` is set):

    token forms      coefficient_it = w_it                                   + kl_coef c'_it k'_it [ s ]
    sequence form    coefficient_it = (h_it / L_i) sum over t' of w_it'      + kl_coef c'_it k'_it [ s ]

with h_it the mask, for gmpo without the tokens whose bound binds. A surrogate of SCORES has its c_it o_it dl/d(lp)
beside the KL instead of in w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import metrics
from ...layout import segment_sum, sequence_of_row
from ...objective import Objective
from ..precision import multiply_no_nan
from ..rows import PolicyResult, PolicyRows
from .surrogates import SCORES, bounded, divergence_times, kl_and_slope, surrogate


def policy_forward(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective
) -> PolicyResult:
    """Compute the loss and its derivative with respect to every log-prob and entropy, all [N]."""
    offsets, advantages = policy.offsets, policy.advantages
    sequence = sequence_of_row(offsets, mask.shape[0])
    lp = torch.where(mask, log_probs, 0)
    lengths = segment_sum(mask.to(lp.dtype), offsets)
    token_log_ratio, u, binds = _log_ratios(log_probs, mask, lengths, policy, objective)
    by_token = objective.ratio == "token"
    log_ratio = token_log_ratio if by_token else u[sequence]

    value, slope, low, high = surrogate(log_ratio, advantages, objective)
    if binds is not None:
        low, high = binds
    if policy.token_weights is not None:
        value, slope = multiply_no_nan(policy.token_weights, value), multiply_no_nan(policy.token_weights, slope)
    share = _share_of_token(mask, sequence, lengths, objective.aggregation, objective.length_norm, policy.normalizer)
    through_ratio = torch.where(mask, share * slope, 0)  # c o dl/du
    direct = torch.zeros_like(lp)
    if objective.surrogate in SCORES:
        value, through_ratio, direct = multiply_no_nan(value, lp), direct, through_ratio
    loss_rows = torch.where(mask, share * value, 0)

    kl = kl_slope = None
    if policy.ref_log_probs is not None:
        d = torch.where(mask, log_probs - policy.ref_log_probs, 0)
        kl, kl_slope = kl_and_slope(d, token_log_ratio, objective.kl_estimator)
    if objective.kl_coef > 0 and kl is not None and kl_slope is not None:
        kl_share = objective.kl_coef * _kl_share(mask, sequence, lengths, policy, objective)
        if objective.kl_ratio_factor:
            kl_share = torch.where(mask, kl_share * log_ratio.exp(), 0)
            through_ratio = through_ratio + divergence_times(kl, kl_share)
        loss_rows = loss_rows + divergence_times(kl, kl_share)
        direct = direct + divergence_times(kl_slope, kl_share)

    if objective.ratio == "sequence":
        per_sequence = segment_sum(through_ratio, offsets) / lengths.clamp(min=1)
        differentiable = mask if binds is None else mask & ~(low | high)
        through_ratio = torch.where(differentiable, per_sequence[sequence], 0)
    coefficient = through_ratio + direct

    entropy_coefficient = lp.new_empty(0)
    has_gradient = coefficient != 0
    if objective.entropy_coef != 0 and entropy is not None:
        entropy_coefficient = -objective.entropy_coef * share
        loss_rows = loss_rows + torch.where(mask, entropy_coefficient * entropy, 0)
        has_gradient = has_gradient | (entropy_coefficient != 0)

    values = metrics.compute(
        mask=mask,
        offsets=offsets,
        low=low,
        high=high,
        log_ratio=token_log_ratio if by_token else u,
        log_ratio_mask=mask if by_token else lengths > 0,
        token_log_ratio=token_log_ratio,
        has_gradient=has_gradient,
        kl=kl,
        entropy=entropy,
    )
    loss = segment_sum(loss_rows, offsets).sum()
    return PolicyResult(loss, token_log_ratio.clone() if by_token else u, coefficient, entropy_coefficient, values)


def _log_ratios(
    log_probs: Tensor, mask: Tensor, lengths: Tensor, policy: PolicyRows, objective: Objective
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return the log-ratio of each token [N], their mean u [S], and for gmpo where its bounds bind, below and above."""
    # On-policy the difference is exactly 0, and NaN where the log-prob is not finite: that must reach the loss.
    old = log_probs if policy.old_log_probs is None else policy.old_log_probs
    token_log_ratio = averaged = torch.where(mask, log_probs - old, 0)
    binds = None
    if objective.surrogate == "gmpo":
        averaged, low, high = bounded(token_log_ratio, policy.advantages, objective)
        binds = low, high
    return token_log_ratio, segment_sum(averaged, policy.offsets) / lengths.clamp(min=1), binds


def _kl_share(mask: Tensor, sequence: Tensor, lengths: Tensor, policy: PolicyRows, objective: Objective) -> Tensor:
    """c'_it of the KL term, [N]: its own aggregation and normalizer, or those of the policy term."""
    aggregation = objective.kl_aggregation or objective.aggregation
    normalizer = policy.kl_normalizer
    if normalizer is None and aggregation == objective.aggregation:
        normalizer = policy.normalizer
    return _share_of_token(mask, sequence, lengths, aggregation, objective.length_norm, normalizer)


def _share_of_token(
    mask: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    aggregation: str,
    length_norm: float | None,
    normalizer: Tensor | None,
) -> Tensor:
    """c_it: the share of each token over the normalizer, [N]; 0 at masked rows."""
    share = torch.ones_like(lengths)
    if aggregation == "seq-mean-token-mean":
        share = share / lengths.clamp(min=1)
    elif aggregation == "seq-mean-token-sum-norm":
        assert length_norm is not None  # Objective refuses it without
        share = share / length_norm
    if normalizer is None:
        normalizer = (lengths.sum() if aggregation == "token-mean" else (lengths > 0).sum()).clamp(min=1)
    return torch.where(mask, share[sequence] / normalizer.to(share.dtype), 0)
