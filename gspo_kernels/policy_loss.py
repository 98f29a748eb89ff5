"""`policy_loss`: log-probs of whole sequences to the loss, its gradient in closed form, and the metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import metrics, ops
from .backends import pick_backend
from .layout import Layout, PolicyResult, PolicyRows, packed_layout, padded_layout
from .log_probs import token_mask
from .objective import Objective
from .sampler_mismatch import rollout_weights
from .surrogates import select_times
from .validation import FLOATS, Call, Said, few


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
    bool_mask, invalid = token_mask(call, mask, log_probs, log_probs.device)
    layout, policy, bad, corrected = policy_rows(
        call, bool_mask, log_probs.dtype, advantages, cu_seqlens, old_log_probs, ref_log_probs, rollout_log_probs,
        token_weights, objective, normalizer, kl_normalizer,
    )  # fmt: skip
    if entropy is not None:
        call.log_probs(
            "entropy", entropy, shapes=[log_probs.shape], shape_text="like log_probs", device=log_probs.device
        )
        entropy = entropy.to(log_probs.dtype)
    elif objective.entropy_coef != 0:
        call.fail("entropy", "given, because objective.entropy_coef is not 0", None)
    backend = pick_backend(call, backend, log_probs.device)
    result = ops.policy_loss(
        log_probs.reshape(-1),
        None if entropy is None else entropy.reshape(-1),
        bool_mask.reshape(-1),
        policy,
        objective,
        backend,
    )
    kept = torch.where(bool_mask, log_probs.detach(), 0)
    kept_entropy = None if entropy is None else torch.where(bool_mask, entropy.detach(), 0)
    return loss_output(result, layout, kept, kept_entropy, policy, objective, invalid + bad, corrected)


def policy_rows(
    call: Call,
    mask: Tensor,  # bool, the caller's token shape
    dtype: torch.dtype,
    advantages: Tensor,
    cu_seqlens: Tensor | None,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    rollout_log_probs: Tensor | None,
    token_weights: Tensor | None,
    objective: Objective,
    normalizer: float | Tensor | None,
    kl_normalizer: float | Tensor | None,
) -> tuple[Layout, PolicyRows, Tensor, dict[str, Tensor]]:
    """Check and flatten the arguments that make the loss.

    Returns (layout, rows, how many values are invalid, metrics of the rollout correction).
    """
    shape, device = tuple(mask.shape), mask.device
    if not isinstance(objective, Objective):
        call.fail("objective", "an Objective", Said(f"a {type(objective).__name__}"), TypeError)
    invalid = torch.zeros((), dtype=torch.int64, device=device)
    if cu_seqlens is None:
        if len(shape) != 2:
            call.fail("cu_seqlens", "given for packed input (hidden [N, H], log_probs [N])", None)
        layout = padded_layout((shape[0], shape[1]), device)
        shapes, text = (
            [(shape[0],), (shape[0], 1), shape],
            lambda: f"[B] = [{shape[0]}], [B, 1] or [B, T] = {list(shape)}",
        )
    else:
        if len(shape) != 1:
            call.fail("cu_seqlens", "None for padded input (hidden [B, T, H], log_probs [B, T])", Said("a tensor"))
        invalid = invalid + call.offsets(cu_seqlens, shape[0], device)
        layout = packed_layout(shape[0], cu_seqlens)
        shapes, text = [(layout.sequences,), shape], lambda: f"[S] = [{layout.sequences}] or [N] = {list(shape)}"
    call.tensor("advantages", advantages, dtypes=FLOATS, shapes=shapes, shape_text=text, device=device)
    per_row = layout.per_row(advantages.detach()).to(dtype)
    wrong = mask.reshape(-1) & ~per_row.isfinite()
    invalid = invalid + call.flag("advantages", wrong, "finite where mask is true", lambda: few(per_row[wrong]))

    def per_token(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        call.log_probs(name, x, shapes=[shape], shape_text=lambda: f"{list(shape)}, one per token", device=device)
        return x.detach().to(dtype).reshape(-1)

    old, ref = per_token("old_log_probs", old_log_probs), per_token("ref_log_probs", ref_log_probs)
    if objective.kl_coef > 0 and ref is None:
        call.fail("ref_log_probs", "given, because objective.kl_coef > 0", None)
    if token_weights is not None:
        weight_shapes = [shape, (shape[0], 1)] if layout.padded else [shape]
        text = lambda: f"{list(shape)}{' or [B, 1]' if layout.padded else ''}"  # noqa: E731
        call.tensor("token_weights", token_weights, dtypes=FLOATS, shapes=weight_shapes, shape_text=text, device=device)
        flat = token_weights = layout.flatten(token_weights.detach()).to(dtype)
        wrong = mask.reshape(-1) & ~((flat >= 0) & flat.isfinite())
        expected = "finite and >= 0 where mask is true"
        invalid = invalid + call.flag("token_weights", wrong, expected, lambda: few(flat[wrong]))
    correction, corrected = objective.rollout_correction, {}
    if correction is not None:
        if rollout_log_probs is None or old_log_probs is None:
            missing = "old_log_probs" if rollout_log_probs is not None else "rollout_log_probs"
            expected = "given, because objective.rollout_correction weighs old_log_probs against rollout_log_probs"
            call.fail(missing, expected, None)
        weights, named = rollout_weights(call, layout, mask.reshape(-1), old_log_probs, rollout_log_probs, correction)
        corrected = {f"rollout_{name}": value for name, value in named.items()}
        weights = weights.reshape(-1).to(dtype)
        # A token that weighs nothing keeps nothing of a weight that is no number.
        token_weights = weights if token_weights is None else select_times(token_weights, weights)
    elif rollout_log_probs is not None:
        expected = "None, because objective.rollout_correction is None and nothing else reads it"
        call.fail("rollout_log_probs", expected, rollout_log_probs)
    invalid = invalid + call.normalizer("normalizer", normalizer, mask)
    invalid = invalid + call.normalizer("kl_normalizer", kl_normalizer, mask)
    return (
        layout,
        PolicyRows(layout.offsets, per_row, old, ref, token_weights,
                   _as_scalar(normalizer, dtype, device), _as_scalar(kl_normalizer, dtype, device)),
        invalid,
        corrected,
    )  # fmt: skip


def loss_output(
    result: PolicyResult,
    layout: Layout,
    log_probs: Tensor,
    entropy: Tensor | None,
    policy: PolicyRows,
    objective: Objective,
    invalid: Tensor,
    corrected: dict[str, Tensor],
) -> LossOutput:
    """Back to the caller's shapes; invalid values turn the loss, and so its gradient, into NaN."""
    loss = result.loss * torch.where(invalid > 0, torch.nan, 1.0).to(result.loss.dtype)
    log_ratio = result.log_ratio.view(layout.shape) if objective.ratio == "token" else result.log_ratio
    named = metrics.as_dict(result.metrics, invalid, kl=policy.ref_log_probs is not None, entropy=entropy is not None)
    return LossOutput(
        loss,
        log_probs.view(layout.shape),
        None if entropy is None else entropy.detach().view(layout.shape),
        log_ratio,
        named | corrected,
    )


def _as_scalar(value: float | Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.detach().to(dtype)
    return torch.full((), float(value), dtype=dtype, device=device)
