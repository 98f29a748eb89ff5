"""The results of the public functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backends.rows import PolicyResult
from .inputs.policy import PolicyInputs
from .metrics import NAMES, WORK_NAMES, named_work
from .objective import Objective


class LogProbOutput(NamedTuple):
    """Log-probs and entropies in nats, fp32 (fp64 for fp64 hidden states), 0 at masked positions."""

    log_probs: Tensor  # shape of target_ids
    entropy: Tensor | None  # shape of target_ids; None unless requested
    extra_log_probs: Tensor | None = None  # shape of extra_ids, 0 where absent; None without extra_ids


class LossOutput(NamedTuple):
    """The loss, and the log-probs, log-ratios and metrics that a trainer logs.

    Only `loss` is differentiable; the other fields are detached. To add your own terms to the loss, use
    `linear_log_probs` and `policy_loss` instead. Do not modify the fields in place: the backward reads log_probs and
    entropy, and raises an error if they have changed.

    `metrics` holds 0-dim fp64 tensors on the device; the host does not wait for them. `gspo_kernels.metrics.combine`
    combines the metrics of micro-batches and ranks. "Tokens" are unmasked tokens here. Clip fractions, ratios, KL and
    entropy ignore token weights: a token with weight 0 is part of its sequence's ratio, and counts as clipped if its
    ratio is outside the window.

    - clip_fraction: share of non-empty sequences with a clipped token. clip_fraction_low counts sequences with a token
      clipped at 1 - clip_low, clip_fraction_high sequences with a token clipped at 1 + clip_high, dual_clip or delta.
    - token_clip_fraction, token_clip_fraction_low, token_clip_fraction_high: share of clipped tokens, by the same
      bounds. The sign of the advantage decides which bound applies, except for cispo and vespo. For gmpo, token
      ratios are clipped. `Objective` says which bounds vespo and topr have.
    - ratio_mean, ratio_min, ratio_max: mean, smallest and largest ratio s of the non-empty sequences, or of the tokens
      for ratio="token"; 1 if there are none.
    - kl_to_old: mean over tokens of old - new log-prob, in nats. It estimates KL(old || new) from samples and may be
      negative.
    - zero_coefficient_share: share of tokens without a gradient, which cost no backward; 1 if there are no tokens. With
      kl_log_probs, the KL term does not count, because its gradient goes to those log-probs.
    - live_row_share: share of tokens with a gradient, 1 - zero_coefficient_share. Only `gspo_fused_loss` returns this
      and the next four metrics.
    - live_tile_share: share of all (token, vocabulary column) pairs that the backward computes.
    - dropped_gradient_mass: share of the L1 mass of the logits' gradient that the backward leaves out, at most
      gradient_budget. With a soft-cap this is an upper bound; the true share may be half of it or less.
    - passes: operations of the matrix products in forward and backward, divided by 2 N H V, for N unmasked tokens.
      Padding of tiles is not counted. The value is 4 if the backward computes d_hidden and d_weight for every row, 3
      if it computes only one of them, 1 without autograd. Logits kept by `cache_mib` are not recomputed: if all are
      kept, 4 becomes 3.
    - gradient_mass: L1 mass of the logits' gradient, of which dropped_gradient_mass is a share; with a soft-cap, a
      lower bound. 0 if it was not computed, because the backward leaves nothing out.
    - kl: mean over tokens of the objective's KL estimator, in nats; only with ref_log_probs.
    - entropy: mean over tokens, in nats; only if entropies are computed.
    - kept_singletons: share of tokens whose kept set has one id; only with kept_sets.
    - kept_mass: mean over tokens of the kept ids' share of the probability; only from `policy_loss` with kl_log_probs.
    - rollout_weight_mean, ...: metrics of `sampler_mismatch.Correction`; only with objective.rollout_correction.
    - tokens: number of unmasked tokens.
    - sequences: number of non-empty sequences.
    - ratios: number of ratios in ratio_mean, which is `tokens` for ratio="token", otherwise `sequences`.
    - invalid: number of invalid values (ids out of range, NaN advantages, positive log-probs, ...), int64. If it is
      not 0, the loss is NaN.
    """

    loss: Tensor  # []
    log_probs: Tensor  # [B, T] or [N], fp32 (fp64 for fp64 inputs), 0 at masked positions
    entropy: Tensor | None  # [B, T] or [N], in nats
    # log s per sequence, [B] or [S]; per token for ratio="token". For gmpo and vespo, of the bounded token ratios.
    log_ratio: Tensor
    metrics: dict[str, Tensor]


def loss_output(
    result: PolicyResult,
    policy: PolicyInputs,
    log_probs: Tensor,
    entropy: Tensor | None,
    objective: Objective,
) -> LossOutput:
    """Reshape a backend's result to the caller's shapes, and name its metrics."""
    shape = policy.layout.shape  # (B, T) or (N,)
    has_kl = policy.rows.ref_log_probs is not None
    named = _named_metrics(result.metrics, policy.rows.invalid, kl=has_kl, entropy=entropy is not None)
    return LossOutput(
        result.loss,
        log_probs.view(shape),
        None if entropy is None else entropy.detach().view(shape),
        result.log_ratio.view(shape) if objective.ratio == "token" else result.log_ratio,
        named | policy.rollout_metrics,
    )


def _named_metrics(values: Tensor, invalid: Tensor, *, kl: bool, entropy: bool) -> dict[str, Tensor]:
    """Name the metrics. Add "invalid", the number of invalid ids, advantages, offsets and other values.

    If sequences are sharded over ranks, `values` ends with this number, summed over all ranks.
    """
    if values.shape[0] > len(NAMES):
        invalid = values[-1].to(invalid.dtype)
    named: dict[str, Tensor] = dict(zip(NAMES, values[: len(NAMES)].unbind(), strict=True))
    if not kl:
        del named["kl"]
    if not entropy:
        del named["entropy"]
    named["invalid"] = invalid
    return named


def work_metrics(
    work: Tensor, zero_coefficient_share: Tensor, *, d_hidden: bool, d_weight: bool, has_backward: bool
) -> dict[str, Tensor]:
    """Compute the metrics that tell how much the backward computes.

    Args:
        work: [6], the fields of `live_tiles.Work`; [0] if the backward is exact and recomputes all logits.
        zero_coefficient_share: [], the metric.
        d_hidden, d_weight: whether the backward computes these gradients.
        has_backward: whether any operand of the head needs a gradient.
    """
    products = d_hidden + d_weight + has_backward  # matrix products per live tile, including its logits
    if work.numel():
        return named_work(work, products)
    live = 1 - zero_coefficient_share
    passes = torch.rsub(zero_coefficient_share, 1 + products, alpha=products)  # 1 + products * live, in one launch
    zero = torch.zeros_like(live)
    return dict(zip(WORK_NAMES, (zero, live, live, passes, zero), strict=True))
