"""Check and flatten what turns log-probs into a loss: `PolicyRows`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.precision import select_times
from ..backends.rows import PolicyRows
from ..layout import Layout, packed_layout, padded_layout
from ..objective import Objective
from ..sampler_mismatch import rollout_weights
from ..validation import FLOATS, Call, Said, few


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


def _as_scalar(value: float | Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return None if value is None else value.detach().to(dtype)
    return torch.full((), float(value), dtype=dtype, device=device)
