"""`gspo_fused_loss`: from hidden states to the loss and its gradients in one operator, without holding the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops
from .backends.rows import HeadRows
from .inputs.head import HeadArguments, head_rows
from .inputs.policy import PolicyArguments, policy_rows
from .layout import accumulator
from .metrics import work_metrics
from .objective import Objective
from .outputs import LossOutput, loss_output
from .validation import Call


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
    objective: Objective = Objective(),  # noqa: B008 - frozen
    normalizer: float | Tensor | None = None,
    kl_normalizer: float | Tensor | None = None,
    entropy: bool = False,
    gradient_budget: float = 0.0,
    backend: str = "auto",
) -> LossOutput:
    """The GSPO loss (or any `Objective`) of sampled answers, from the hidden states that predict their tokens.

    `linear_log_probs` and `policy_loss` in one operator: the forward computes log-probs tile by tile, sums them per
    sequence and settles every token's coefficient d(loss)/d(log_prob); the backward recomputes the logits of the rows
    whose coefficient is not zero and scales them by the upstream gradient. Masked tokens, zero-advantage and clipped
    sequences cost no backward.

    Gradients flow to hidden states, head, bias and LoRA adapter, in their own dtypes; a head that does not require a
    gradient gets none computed. A second derivative raises.

    Args:
        hidden: [B, T, H] padded, or [N, H] packed with cu_seqlens; fp32, bf16, fp16 or fp64. hidden[t] predicts
            target_ids[t]: of a causal model pass last_hidden_state[:, :-1] and input_ids[:, 1:]. Under autocast hidden
            and head are cast as F.linear would.
        lm_head: weight [V, H] of the same dtype, an `nn.Linear`, or PEFT's LoRA, modules_to_save or
            trainable_token_indices around one; the last costs a copy of the weight.
        target_ids: [B, T] or [N] int64: the sampled tokens. Where masked anything may stand.
        advantages: [B], [B, 1] or [S] per sequence, or [B, T] / [N] per token. Packed with N == S: per sequence. Per
            token, ratio="sequence" spreads the sequence's gradient evenly over its tokens; "sequence-token" keeps each
            token's own.
        mask: [B, T] or [N], bool or 0/1: the tokens that count. None: target_ids != -100.
        cu_seqlens: [S + 1] int32 or int64: sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]. Packed input only.
        old_log_probs: shape of target_ids, fp32: of the policy before this round of updates. None: on-policy, ratio
            exactly 1. A constant of the loss, like advantages and ref_log_probs.
        ref_log_probs: shape of target_ids, fp32; required for objective.kl_coef > 0.
        rollout_log_probs: the sampler's own, fp32; read only by objective.rollout_correction, which requires it.
        token_weights: [B, 1], [B, T] or [N]; detached; multiplies the policy term, not KL and not entropy.
        bias, logit_scale, logit_softcap, temperature, vocab_size: the rest of the head, as in `linear_log_probs`.
        objective: what is optimised.
        normalizer, kl_normalizer: what the sums are divided by, as in `policy_loss`; give the count of the whole
            optimizer step and the gradients of micro-batches add up to those of one batch.
        entropy: return entropies (always computed where objective.entropy_coef != 0).
        gradient_budget: share of the L1 mass of d_logits that the backward of this call may leave out, in [0, 1). 0 is
            exact. Otherwise rows are ordered by their mass, and the lightest cells, a block of rows times a tile of the
            vocabulary (on a CPU 128 x 168, with Triton mostly 128 x 256), go while their sum, known from the forward,
            stays within the budget. That is done only if it saves time: at least about a fifth of the cells must go,
            else none does. Where it goes is a bias and not noise: the rows the policy is surest of, the tokens it finds
            least likely. The relative error of a gradient may be larger than the budget (README). Not with
            objective.entropy_coef, whose gradient that mass does not bound. The Triton backend drops nothing for heads
            with a bias or an adapter, and while a CUDA graph is captured.
        backend: "triton", "torch" or "auto"; an explicit choice never falls back.

    Returns:
        LossOutput: `loss` [] is differentiable; `log_probs`, `entropy`, `log_ratio` and `metrics` are detached.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. On accelerators values are not
            looked at (unless GSPO_CHECK=1): `metrics["invalid"]` counts bad ones and the loss is NaN if there are any.
    """
    call = Call("gspo_fused_loss")
    call.number("gradient_budget", gradient_budget, "a number from 0 (exact) to below 1", lambda x: 0 <= x < 1)
    call.boolean("entropy", entropy)
    bonus = isinstance(objective, Objective) and objective.entropy_coef != 0
    if bonus and gradient_budget > 0:
        call.fail("gradient_budget", "0 with an entropy bonus (objective.entropy_coef)", gradient_budget)
    head = head_rows(
        call,
        HeadArguments(
            hidden,
            lm_head,
            target_ids,
            mask,
            bias,
            logit_scale,
            logit_softcap,
            temperature,
            vocab_size,
            entropy or bonus,
            backend,
        ),
    )
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
    unmasked = head.rows.mask.view(target_ids.shape)
    policy = policy_rows(call, arguments, unmasked, accumulator(head.rows.hidden.dtype))
    result = ops.fused_loss(head.rows, policy.rows, objective, float(gradient_budget), head.backend)
    entropies = result.head.entropy if head.rows.entropy else None
    invalid = head.invalid + policy.invalid
    out = loss_output(result.policy, policy, result.head.log_probs, entropies, objective, invalid)
    work = work_metrics(result.work.detach(), _products(head.rows))
    return out._replace(metrics=out.metrics | work)


def _products(head: HeadRows) -> int:
    """How many matrix products the backward makes of every live tile: logits again, d_hidden, d_weight."""
    gradients = head.hidden.requires_grad + head.weight.requires_grad if torch.is_grad_enabled() else 0
    others = (head.bias, head.adapter_hidden, head.adapter_weight)
    again = gradients > 0 or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in others))
    return gradients + again
