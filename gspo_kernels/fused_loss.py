"""`gspo_fused_loss`: one operator from hidden states to the loss and its gradients, without materializing logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .backends.rows import KeptRows
from .inputs.compared import head_values, pair_values, policy_values
from .inputs.head import HeadArguments, HeadInputs, head_rows
from .inputs.lm_head import device_map, moved, opened, weight_of
from .inputs.pairs import kept_rows
from .inputs.policy import PolicyArguments, PolicyInputs, policy_rows
from .kept_sets import KeptSets
from .objective import Objective, names_misplaced_fields
from .ops.loss import fused_loss_op, mean_over_ranks, policy_loss_op
from .ops.pairs import kept_log_probs
from .outputs import LossOutput, loss_output, work_metrics
from .ranks.agreement import process_group, same_on_all_ranks, vocabulary_group
from .validation import TensorChecks


@names_misplaced_fields
def gspo_fused_loss(
    hidden: Tensor,
    lm_head: Tensor | nn.Module,
    target_ids: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    token_weights: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    head_precision: str | None = None,
    objective: Objective = Objective(),  # noqa: B008 - frozen
    normalizer: float | Tensor | None = None,
    kl_normalizer: float | Tensor | None = None,
    entropy: bool = False,
    kept_sets: KeptSets | None = None,
    gradient_budget: float = 0.0,
    cache_mib: float | None = None,
    tp_group: Any = None,
    reduce_hidden: str = "all",
    cp_group: Any = None,
    backend: str = "auto",
) -> LossOutput:
    """Compute the GSPO loss, or the loss of any other `Objective`, from hidden states and sampled tokens.

    The result equals `policy_loss(linear_log_probs(...).log_probs, ...)`, computed by a single operator. The forward
    computes log-probs tile by tile, then the loss and each token's coefficient, d(loss)/d(log_prob). The backward
    recomputes logits only for rows with a gradient, so masked tokens cost no backward. If the objective has neither a
    KL term nor an entropy bonus, sequences with advantage 0 and clipped tokens cost no backward either. The
    exception is cispo, whose clipped tokens keep a gradient.

    Hidden states, head, bias and LoRA adapter receive gradients, each in its own dtype. Gradients that autograd does
    not need are not computed. Double backward raises an error.

    Args:
        hidden: hidden states, [B, T, H] padded, or [N, H] packed with cu_seqlens; fp32, bf16, fp16 or fp64. hidden[t]
            predicts target_ids[t]. For a causal model, pass last_hidden_state[:, :-1] and input_ids[:, 1:]. Under
            autocast, hidden and lm_head are cast as F.linear would cast them, unless head_precision is given.
        lm_head: weight [V, H] in the dtype of hidden (or fp32, with head_precision), an `nn.Linear`, or an `nn.Linear`
            wrapped by PEFT (LoRA, modules_to_save or trainable_token_indices). With trainable_token_indices, the weight
            is copied. If accelerate has placed the module (`device_map`), all tensors are moved to its device, and the
            result is moved to the device of hidden.
        target_ids: sampled tokens, [B, T] or [N] int64. Masked positions may hold any value.
        advantages: per sequence [B], [B, 1] or [S], or per token [B, T] or [N]. For a packed batch with N == S, [N] is
            read as per sequence. With per-token advantages, ratio="sequence" spreads a sequence's gradient evenly over
            its tokens, and ratio="sequence-token" gives each token the gradient of its own advantage. Treated as a
            constant.
        mask: True or 1 at unmasked tokens, [B, T] or [N], bool or 0/1. None: target_ids != -100.
        cu_seqlens: [S + 1] int32 or int64, for packed input only. Sequence i is rows cu_seqlens[i] to
            cu_seqlens[i + 1] - 1.
        old_log_probs: log-probs of the policy before this round of updates, in the shape of target_ids, fp32 or fp64.
            None: on-policy, all ratios are exactly 1. Treated as a constant.
        ref_log_probs: log-probs of the reference policy, in the shape of target_ids, fp32 or fp64; required if
            objective.kl_coef > 0. Treated as a constant.
        rollout_log_probs: log-probs reported by the sampler, fp32 or fp64. Required with
            objective.rollout_correction, not allowed without it. NaN is invalid if it makes the weight of a token NaN
            whose advantage and token weight are not 0. For a weight of 1, as in TRL, pass
            torch.where(rollout_log_probs.isnan(), old_log_probs, rollout_log_probs).
        token_weights: weights of the policy term, [B, 1], [B, T] or [N]. They do not affect the KL term or the entropy
            bonus. Tokens with weight 0 still count in the metrics and in the ratio of their sequence. Treated as a
            constant.
        bias, logit_scale, logit_softcap, temperature, vocab_size, head_precision: more options of the head, see
            `linear_log_probs`.
        objective: ratio, surrogate, clip window, aggregation, KL term and entropy bonus.
        normalizer, kl_normalizer: divisors of the sums, see `policy_loss`. For gradient accumulation, pass the number
            of sequences (or tokens) in the full optimizer step. The gradients of its micro-batches then add up to the
            gradient of one large batch.
        entropy: also return entropies. They are always returned if objective.entropy_coef != 0.
        kept_sets: the ids that the sampler kept for each token, see `linear_log_probs`. Ratios, KL term and entropies
            are then over these ids, so old_log_probs and ref_log_probs must be, too. The metrics of the backward's
            work are left out.
        gradient_budget: share of the L1 mass (sum of absolute values) of the logits' gradient that the backward may
            leave out, in [0, 1); 0 is exact (docs/concepts/backward.md). It cannot be combined with
            objective.entropy_coef, because the mass does not bound the gradient of the entropy.
        cache_mib: memory limit, in MiB, for exponentials of logits that the forward keeps so that the backward does not
            recompute these logits (docs/concepts/backward.md). Log-probs do not depend on it. None: the
            environment variable GSPO_CACHE_MIB or, if it is not set, the device's default.
        tp_group, reduce_hidden: for a vocabulary sharded over ranks, see `linear_log_probs`.
        cp_group: for sequences sharded over ranks, see `policy_loss`.
        backend: "auto", "triton" or "torch". "auto" takes Triton where its kernels run on a GPU and pass a self-check
            (docs/limits.md), otherwise torch. The environment variable GSPO_BACKEND replaces "auto". "triton" raises an
            error if its kernels cannot run or fail the check.

    Returns:
        LossOutput. `loss` [] is differentiable; `log_probs`, `entropy`, `log_ratio` and `metrics` are detached.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Bad values
            inside GPU tensors raise only if GSPO_CHECK=1. Otherwise `metrics["invalid"]` counts them, and any of them
            makes the loss NaN.
    """
    check = TensorChecks("gspo_fused_loss")
    opened_head = opened(lm_head)
    tp_group = vocabulary_group(check, weight_of(opened_head), tp_group)
    cp_group = process_group(check, "cp_group", cp_group)
    has_bonus = isinstance(objective, Objective) and objective.entropy_coef != 0
    head_arguments = HeadArguments(
        hidden=hidden,
        lm_head=opened_head,
        target_ids=target_ids,
        mask=mask,
        bias=bias,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        temperature=temperature,
        vocab_size=vocab_size,
        head_precision=head_precision,
        entropy=entropy,
        gradient_budget=gradient_budget,
        cache_mib=cache_mib,
        backend=backend,
        tp_group=tp_group,
        reduce_hidden=reduce_hidden,
    )
    policy_arguments = PolicyArguments(
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
    head_device = device_map(opened_head)
    if head_device is not None:
        head_arguments, policy_arguments = moved(head_arguments, head_device), moved(policy_arguments, head_device)
        kept_sets = kept_sets.to(head_device) if isinstance(kept_sets, KeptSets) else kept_sets

    with same_on_all_ranks(check, {"tp_group": tp_group, "cp_group": cp_group}, hidden) as compared:
        check.boolean("entropy", entropy)
        head_arguments = head_arguments._replace(entropy=entropy or has_bonus)
        head = head_rows(check, head_arguments)
        if has_bonus and gradient_budget > 0:
            check.fail("gradient_budget", "0 with an entropy bonus (objective.entropy_coef)", gradient_budget)
        kept = None if kept_sets is None else kept_rows(check, kept_sets, head_arguments.target_ids, head.rows)
        unmasked = head.rows.mask.view(target_ids.shape)
        policy = policy_rows(check, policy_arguments, unmasked, head.rows.hidden.dtype)
        old = policy.rows.old_log_probs
        if kept is not None and old is not None:
            check.hint(
                old,
                lambda: kept.is_single & (old < -1e-3),
                "old_log_probs are below 0 at tokens whose kept set has one id, where log-probs over the set are 0. "
                "They seem to be over the vocabulary, which makes ratios too large. Pass the same kept_sets for them",
                stacklevel=5,
            )
        if compared is not None:
            compared.update(head_values(head_arguments, head))
            compared.update(pair_values(kept, None, head.rows))
            compared.update(policy_values(policy_arguments, policy, unmasked))

    out = _over_vocabulary(head, policy, objective) if kept is None else _over_kept_sets(head, kept, policy, objective)
    return out if head_device is None else moved(out, hidden.device)


def _over_vocabulary(head: HeadInputs, policy: PolicyInputs, objective: Objective) -> LossOutput:
    """Compute the loss in one operator."""
    # PyTorch calls the body of `fused_loss_op` with tensors and numbers: see ops/tuples.py.
    result = fused_loss_op(head.rows, policy.rows, objective, head.gradient_budget, head.cache_bytes, head.backend)
    entropies = result.head.entropy if head.rows.entropy else None
    out = loss_output(result.policy, policy, result.head.log_probs, entropies, objective)
    work = work_metrics(
        result.work.detach(),
        out.metrics["zero_coefficient_share"],
        d_hidden=head.needs.hidden,
        d_weight=head.needs.weight,
        has_backward=any(head.needs),
    )
    return out._replace(metrics=out.metrics | work)


def _over_kept_sets(head: HeadInputs, kept: KeptRows, policy: PolicyInputs, objective: Objective) -> LossOutput:
    """Compute log-probs over kept sets, and then the loss. Only rows with an empty set go through the vocabulary."""
    options = head.gradient_budget, head.cache_bytes, head.backend
    log_probs, entropies = kept_log_probs(head.rows, kept, *options)
    with_entropy = entropies if head.rows.entropy else None
    result = policy_loss_op(log_probs, with_entropy, head.rows.mask, policy.rows, objective, head.backend)
    out = loss_output(result, policy, log_probs.detach(), with_entropy, objective)
    singletons = mean_over_ranks(kept.is_single, head.rows.mask, policy.rows.group)
    return out._replace(metrics=out.metrics | {"kept_singletons": singletons})
