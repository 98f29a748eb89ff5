"""`policy_loss`: the loss, its gradient in closed form, and the metrics, from per-token log-probs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends.dispatch import pick_backend
from .inputs.compared import policy_values
from .inputs.policy import PolicyArguments, policy_rows
from .metrics import NAMES
from .objective import Objective, names_misplaced_fields
from .ops.loss import mean_over_ranks, policy_loss_op
from .outputs import LossOutput, loss_output
from .ranks.agreement import process_group, same_on_all_ranks
from .validation import TensorChecks


@names_misplaced_fields
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
    kl_log_probs: Tensor | None = None,
    objective: Objective = Objective(),  # noqa: B008 - frozen
    normalizer: float | Tensor | None = None,
    kl_normalizer: float | Tensor | None = None,
    cp_group: Any = None,
    backend: str = "auto",
) -> LossOutput:
    """Compute the loss of an objective from per-token log-probs. Formulas: `gspo_kernels.objective`.

    Args:
        log_probs: log-probs of the current policy, [B, T], or [N] with cu_seqlens; fp32 or fp64, differentiable. Masked
            positions may hold any value, including NaN. NaN at an unmasked token raises no error but makes the loss
            NaN, unless the token's advantage or weight is 0. The same holds for old_log_probs. Unmasked log-probs may
            exceed 0 by at most 0.25, which allows for logits that were rounded to bf16.
        advantages: per sequence [B], [B, 1] or [S], or per token [B, T] or [N]. For a packed batch with N == S, [N] is
            read as per sequence. Treated as a constant.
        mask: True or 1 at unmasked tokens, bool or 0/1, in the shape of log_probs. None: all tokens are unmasked.
        cu_seqlens: [S + 1] int32 or int64, for packed input only. Sequence i is tokens cu_seqlens[i] to
            cu_seqlens[i + 1] - 1.
        old_log_probs: log-probs of the policy in the ratio's denominator, in the shape of log_probs. None: on-policy,
            all ratios are exactly 1. Treated as a constant.
        ref_log_probs: log-probs of the reference policy, in the shape of log_probs. They are required if
            objective.kl_coef > 0; NaN at an unmasked token then makes the loss NaN. If kl_coef is 0, the KL is only a
            metric. Treated as a constant.
        rollout_log_probs: log-probs reported by the sampler, fp32 or fp64. Required with
            objective.rollout_correction, not allowed without it. NaN is invalid if it makes the weight of a token NaN
            whose advantage and token weight are not 0. For a weight of 1, as in TRL, pass
            torch.where(rollout_log_probs.isnan(), old_log_probs, rollout_log_probs).
        token_weights: weights of the policy term, [B, 1], [B, T] or [N]. They do not affect the KL term or the entropy
            bonus. In metrics and in the ratio of a sequence, a token with weight 0 counts like any other. Treated as a
            constant.
        entropy: entropy of each token's distribution, in the shape of log_probs; it may be below 0 by at most 0.25. If
            objective.entropy_coef != 0, it is required and differentiable.
        kl_log_probs: other log-probs of the current policy for the KL term and its metric, in the shape of log_probs,
            differentiable. For log_probs over the ids that a sampler kept, these may be over the full vocabulary, like
            ref_log_probs. They require ref_log_probs, and are not allowed with objective.kl_ratio_factor. The metric
            kept_mass is then the mean of exp(kl_log_probs - log_probs), the kept ids' share of the probability.
        objective: ratio, surrogate, clip window, aggregation, KL term and entropy bonus.
        normalizer: divisor of the sum over tokens, a number or a 0-dim tensor. Usually this is the number of non-empty
            sequences (for aggregation="token-mean", of unmasked tokens) in a full optimizer step, counted over all
            ranks and micro-batches. If gradients are averaged over ranks, as in DDP and FSDP, divide this number by the
            number of ranks. None: that number, counted in this batch (over all ranks of a cp_group).
        kl_normalizer: divisor of the KL term; allowed only if objective.kl_coef > 0. None: `normalizer` if the KL term
            and the policy term have the same aggregation, otherwise the number of tokens or sequences in this batch.
        cp_group: process group or one-dimensional DeviceMesh whose ranks share the tokens of each sequence (context
            parallelism). Every rank passes its tokens of the same sequences in the same order. A sequence may be empty
            on a rank, and all sizes except S may differ. Tokens may be divided in any way (contiguous, zigzag). Loss,
            metrics, log-ratios, clip decisions and default normalizers cover all tokens and are equal on all ranks.
            Each rank gets the gradients of its own log-probs, so gradients of parameters must be summed over the group.
            If your trainer averages them, multiply the loss by the number of ranks.
        backend: see `gspo_fused_loss`.

    Returns:
        LossOutput. `loss` [] is differentiable; the other fields are detached.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Bad values
            inside GPU tensors raise only if GSPO_CHECK=1. Otherwise `metrics["invalid"]` counts them, and any of them
            makes the loss NaN.
    """
    check = TensorChecks("policy_loss")
    cp_group = process_group(check, "cp_group", cp_group)
    arguments = PolicyArguments(
        advantages=advantages,
        cu_seqlens=cu_seqlens,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        rollout_log_probs=rollout_log_probs,
        token_weights=token_weights,
        objective=objective,
        normalizer=normalizer,
        kl_normalizer=kl_normalizer,
        cp_group=cp_group,
    )

    with same_on_all_ranks(check, {"cp_group": cp_group}, log_probs) as compared:
        packed = cu_seqlens is not None
        text = "[N] with cu_seqlens" if packed else "[B, T] (or [N] with cu_seqlens)"
        is_dense = isinstance(log_probs, Tensor) and not log_probs.is_nested
        if packed and is_dense and log_probs.shape[:-1] == (1,):
            text += " (pass log_probs[0])"
        check.log_probs("log_probs", log_probs, shapes=[(None,) if packed else (None, None)], shape_text=text)
        shape, device = log_probs.shape, log_probs.device
        unmasked = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
        unmasked = check.mask(unmasked, shapes=[shape], shape_text=lambda: str(list(shape)), device=device)
        check.sign("log_probs", log_probs.detach(), unmasked)
        if entropy is not None:
            check.log_probs("entropy", entropy, shapes=[shape], shape_text="like log_probs", device=device)
            entropy = entropy.to(log_probs.dtype)
            check.sign("entropy", entropy.detach(), unmasked, positive=True)
        if kl_log_probs is not None:
            check.log_probs("kl_log_probs", kl_log_probs, shapes=[shape], shape_text="like log_probs", device=device)
            kl_log_probs = kl_log_probs.to(log_probs.dtype)
            check.sign("kl_log_probs", kl_log_probs.detach(), unmasked)
        policy = policy_rows(check, arguments, unmasked, log_probs.dtype)  # counts the values that are invalid so far
        if kl_log_probs is not None and (ref_log_probs is None or _ratio_in_kl(objective)):
            needed = "None without ref_log_probs, and if the KL term has a ratio (kl_ratio_factor, or 'unbiased')"
            check.fail("kl_log_probs", needed, kl_log_probs)
        if entropy is None and objective.entropy_coef != 0:
            check.fail("entropy", "given, because objective.entropy_coef is not 0", None)
        backend = pick_backend(check, backend, log_probs.device, log_probs.dtype, "loss")
        if compared is not None:
            compared.update(policy_values(arguments, policy, unmasked))
            needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (log_probs, entropy)]
            compared.update(log_probs=log_probs, entropy=entropy, mask=unmasked, backend=backend)
            compared["whether log_probs and entropy need a gradient"] = needs
            compared["kl_log_probs"] = kl_log_probs

    mask_rows = unmasked.reshape(-1)
    of_policy = objective if kl_log_probs is None else objective.without("kl_coef")
    entropy_rows = None if entropy is None else entropy.reshape(-1)
    result = policy_loss_op(log_probs.reshape(-1), entropy_rows, mask_rows, policy.rows, of_policy, backend)

    log_probs_out = torch.where(unmasked, log_probs.detach(), 0)
    entropy_out = None if entropy is None else torch.where(unmasked, entropy.detach(), 0)
    out = loss_output(result, policy, log_probs_out, entropy_out, objective)
    if kl_log_probs is None:
        return out
    # With advantages of 0 the policy term is 0, so this is the KL term alone.
    only_kl = policy.rows._replace(
        advantages=torch.zeros_like(policy.rows.advantages), old_log_probs=None, token_weights=None
    )
    without_bonus = objective.without("entropy_coef")
    kl = policy_loss_op(kl_log_probs.reshape(-1), None, mask_rows, only_kl, without_bonus, backend)
    mass = mean_over_ranks((kl_log_probs.detach() - log_probs_out).exp(), unmasked, policy.rows.group)
    metrics = {"kl": kl.metrics[NAMES.index("kl")], "kept_mass": mass}
    return out._replace(loss=out.loss + kl.loss, metrics=out.metrics | metrics)


def _ratio_in_kl(objective: Objective) -> bool:
    return objective.kl_ratio_factor or objective.kl_estimator == "unbiased"
