"""What the public functions return, and how it is filled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import metrics
from .backends.rows import PolicyResult
from .inputs.policy import PolicyInputs
from .objective import Objective


class LogProbOutput(NamedTuple):
    """Log-probs and entropies in nats, fp32 (fp64 for fp64 hidden states), 0 at masked positions."""

    log_probs: Tensor  # shape of target_ids
    entropy: Tensor | None  # shape of target_ids; None unless asked for


class LossOutput(NamedTuple):
    """The loss, and what a trainer wants to see of it.

    Only `loss` is differentiable (for terms of your own use `linear_log_probs` and `policy_loss`). The rest is detached
    and for reading: log_probs and entropy are kept for the backward, which raises if they were changed in place.

    metrics, all 0-dim tensors on the device, nothing is read on the host:
        clip_fraction: share of non-empty sequences in which the clip binds on a token, by the sign of the advantage;
            clip_fraction_low at 1 - clip_low, clip_fraction_high at 1 + clip_high or at dual_clip / delta.
        token_clip_fraction: the same as a share of tokens, with _low and _high too.
            What binds is the surrogate's bound: cispo's for either sign, of gmpo a token's own.
        ratio_mean, ratio_min, ratio_max: of s over non-empty sequences, over tokens for ratio="token".
        kl_to_old: mean over tokens of old - new log-prob, nats: an estimate of KL(old || new) from samples, so it may
            be negative.
        zero_coefficient_share: share of tokens that cost no backward.
        live_row_share: share of tokens whose loss has a gradient, the rest; this and the next three only from
            `gspo_fused_loss`.
        live_tile_share: of tokens times vocabulary, the share that a backward computes.
        dropped_gradient_mass: the share of the L1 mass of d_logits that it leaves out, at most gradient_budget; with a
            soft-cap an upper bound of that share, twice as much or more.
        passes: matrix passes of 2 N H V operations, N tokens, of forward and backward, the padding of tiles not
            counted: 4 if all is computed for d_hidden and d_weight, 3 for one of them, 1 without autograd.
        kl: mean over tokens of the objective's estimator; only with ref_log_probs.
        entropy: mean over tokens, nats; only where entropies are computed.
        rollout_weight_mean, ...: of `sampler_mismatch.Correction`; only with objective.rollout_correction.
        invalid: how many values were refused (out-of-range ids, NaN advantages, ...); more than 0 makes the loss NaN.
    """

    loss: Tensor  # []
    log_probs: Tensor  # shape of the tokens, fp32, 0 at masked positions
    entropy: Tensor | None  # shape of the tokens, nats
    log_ratio: Tensor  # u = log s per sequence, [B] or [S], for gmpo of bounded ratios; per token for ratio="token"
    metrics: dict[str, Tensor]


def loss_output(
    result: PolicyResult,
    policy: PolicyInputs,
    log_probs: Tensor,
    entropy: Tensor | None,
    objective: Objective,
    invalid: Tensor,
) -> LossOutput:
    """Return to the caller's shapes; invalid values turn the loss, and so its gradient, into NaN."""
    shape = policy.layout.shape
    loss = result.loss * torch.where(invalid > 0, torch.nan, 1.0).to(result.loss.dtype)
    has_kl = policy.rows.ref_log_probs is not None
    named = metrics.as_dict(result.metrics, invalid, kl=has_kl, entropy=entropy is not None)
    return LossOutput(
        loss,
        log_probs.view(shape),
        None if entropy is None else entropy.detach().view(shape),
        result.log_ratio.view(shape) if objective.ratio == "token" else result.log_ratio,
        named | policy.rollout_metrics,
    )
