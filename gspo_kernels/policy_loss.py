"""`policy_loss`: log-probs of whole sequences to the loss, its gradient in closed form, and the metrics."""

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
    """The loss of `objective` from per-token log-probs; the formulas stand in `gspo_kernels.objective`.

    Args:
        log_probs: [B, T], or [N] with cu_seqlens; fp32 or fp64, differentiable. Masked positions may hold anything, NaN
            too.
        advantages: [B], [B, 1] or [S] per sequence, or [B, T] / [N] per token. Packed with N == S: per sequence.
        mask: the tokens that count, bool or 0/1, in the shape of log_probs; None: all.
        cu_seqlens: [S + 1] int32 or int64, packed input only: sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1].
        old_log_probs: of the policy that is the ratio's denominator. None: on-policy, the ratio is exactly 1. Like
            advantages and ref_log_probs it is a constant of the loss: no gradient flows into it. A NaN in log-probs is
            not refused: it reaches the loss.
        ref_log_probs: of the reference policy; required for kl_coef > 0, else only its KL is reported.
        rollout_log_probs: the sampler's own, fp32; read only by objective.rollout_correction, which requires it.
        token_weights: [B, 1], [B, T] or [N]; detached; multiplies the policy term, not KL and not entropy.
        entropy: per token, in the shape of log_probs; required for entropy_coef != 0 and then differentiable.
        objective: what is optimised.
        normalizer: divides the sum; a number or a tensor with no dimension (read on a CPU only), e.g. the sequences
            of all ranks and micro-batches (over the ranks, where gradients are averaged over them, as DDP and FSDP do).
            None: this batch's non-empty sequences, tokens for token-mean.
        kl_normalizer: the same for the KL term. None: `normalizer` where the KL aggregates like the policy term.
        backend: "triton", "torch" or "auto".

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. On accelerators values are not
            looked at (unless GSPO_CHECK=1): `metrics["invalid"]` counts bad ones and the loss is NaN if there are any.
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
