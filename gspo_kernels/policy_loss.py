"""`policy_loss`: the loss, its gradient in closed form, and the metrics, from per-token log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .backends.dispatch import pick_backend
from .inputs.head import token_mask
from .inputs.policy import PolicyArguments, policy_rows
from .objective import Objective
from .outputs import LossOutput, loss_output
from .validation import Call


def policy_loss(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    objective: Objective = Objective(),  # noqa: B008 - frozen
    normalizer: float | Tensor | None = None,
    kl_normalizer: float | Tensor | None = None,
    backend: str = "auto",
) -> LossOutput:
    """Compute the loss of an objective from per-token log-probs. Formulas: `gspo_kernels.objective`.

    Args:
        log_probs: log-probs of the current policy, [B, T], or [N] with cu_seqlens; fp32 or fp64, differentiable.
            Masked positions may hold any value, NaN included. NaN at an unmasked token raises no error, but makes the
            loss NaN. This also holds for old_log_probs and ref_log_probs.
        advantages: per sequence [B], [B, 1] or [S], or per token [B, T] or [N]. Packed advantages are per sequence if
            N == S. No gradient.
        mask: unmasked tokens are True or 1, bool or 0/1, in the shape of log_probs. None: all tokens.
        cu_seqlens: [S + 1] int32 or int64, for packed input only: sequence i is tokens cu_seqlens[i] up to, but not
            including, cu_seqlens[i + 1].
        old_log_probs: log-probs of the policy in the ratio's denominator, in the shape of log_probs. None: on-policy,
            all ratios are exactly 1. No gradient.
        ref_log_probs: log-probs of the reference policy, in the shape of log_probs; required if objective.kl_coef > 0.
            If kl_coef is 0, the KL is a metric and not part of the loss. No gradient.
        rollout_log_probs: log-probs that the sampler reported, fp32 or fp64; required by
            objective.rollout_correction, and allowed only with it.
        token_weights: [B, 1], [B, T] or [N]; they multiply the policy term, but not the KL term and not the entropy.
            No gradient.
        entropy: entropy of each token's distribution, in the shape of log_probs; required if objective.entropy_coef
            != 0, and then differentiable.
        objective: ratio, surrogate, clip window, aggregation, KL term and entropy bonus.
        normalizer: divisor of the sum over tokens; a number, or a tensor with no dimension. The value of a tensor is
            checked only on a CPU, or if GSPO_CHECK=1. Usually it counts the sequences (or tokens) of a full optimizer
            step: of all ranks and micro-batches, divided by the number of ranks if gradients are averaged over ranks,
            as DDP and FSDP do. None: the number of unmasked tokens of this batch for aggregation="token-mean", and of
            non-empty sequences for all others.
        kl_normalizer: divisor of the KL term. None: `normalizer` if the KL term and the policy term have the same
            aggregation, otherwise the number of sequences or tokens of this batch.
        backend: "triton", "torch" or "auto". An explicit choice never falls back.

    Returns:
        LossOutput. `loss` [] is differentiable; the other fields are detached.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Values of
            tensors on a GPU raise only if GSPO_CHECK=1. Otherwise `metrics["invalid"]` counts the bad values, and the
            loss is NaN if there are any.
    """
    call = Call("policy_loss")
    packed = cu_seqlens is not None
    text = "[N] with cu_seqlens" if packed else "[B, T] (or [N] with cu_seqlens)"
    call.log_probs("log_probs", log_probs, shapes=[(None,) if packed else (None, None)], shape_text=text)
    unmasked, bad_mask = token_mask(call, mask, log_probs, log_probs.device)
    arguments = PolicyArguments(
        advantages,
        cu_seqlens,
        old_log_probs,
        ref_log_probs,
        rollout_log_probs,
        token_weights,
        objective,
        normalizer,
        kl_normalizer,
    )
    policy = policy_rows(call, arguments, unmasked, log_probs.dtype)
    if entropy is not None:
        shapes, device = [log_probs.shape], log_probs.device
        call.log_probs("entropy", entropy, shapes=shapes, shape_text="like log_probs", device=device)
        entropy = entropy.to(log_probs.dtype)
    elif objective.entropy_coef != 0:
        call.fail("entropy", "given, because objective.entropy_coef is not 0", None)
    result = ops.policy_loss(
        log_probs.reshape(-1),
        None if entropy is None else entropy.reshape(-1),
        unmasked.reshape(-1),
        policy.rows,
        objective,
        pick_backend(call, backend, log_probs.device),
    )
    log_probs_out = torch.where(unmasked, log_probs.detach(), 0)
    entropy_out = None if entropy is None else torch.where(unmasked, entropy.detach(), 0)
    return loss_output(result, policy, log_probs_out, entropy_out, objective, policy.invalid + bad_mask)
