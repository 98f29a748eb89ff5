"""Check and flatten all arguments of a loss except log-probs, entropies and mask: `PolicyArguments` to `PolicyRows`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.precision import multiply_no_nan
from ..backends.rows import PolicyRows
from ..layout import Layout, accumulator, packed_layout, padded_layout
from ..objective import SCORES, Objective
from ..sampler_mismatch import Correction, rollout_weights
from ..validation import FLOATS, TensorChecks, Unquoted, up_to_five, warn_once


class PolicyArguments(NamedTuple):
    """Arguments of a loss, as the caller passed them. `policy_loss` documents them."""

    advantages: Tensor
    cu_seqlens: Tensor | None
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    token_weights: Tensor | None
    objective: Objective
    normalizer: float | Tensor | None
    kl_normalizer: float | Tensor | None
    cp_group: Any = None  # a process group of several ranks


class PolicyInputs(NamedTuple):
    """The arguments after they are checked and flattened."""

    rows: PolicyRows
    layout: Layout
    rollout_metrics: dict[str, Tensor]  # metrics of the rollout correction, by their names in `LossOutput.metrics`


def policy_rows(check: TensorChecks, arguments: PolicyArguments, mask: Tensor, dtype: torch.dtype) -> PolicyInputs:
    """Check and flatten the arguments of a loss.

    Args:
        check: names the public function in error messages.
        arguments: as the caller passed them.
        mask: bool, in the caller's token shape; True at unmasked tokens.
        dtype: of hidden states or log-probs. Ratios and loss are fp64 for fp64, else fp32.
    """
    objective = arguments.objective
    if not isinstance(objective, Objective):
        check.fail("objective", "an Objective", Unquoted(f"a {type(objective).__name__}"), TypeError)
    layout = _layout(check, arguments.cu_seqlens, mask)
    dtype = accumulator(dtype)
    unmasked = mask.reshape(-1)
    advantages = _advantages(check, arguments.advantages, layout, unmasked, dtype)
    per_token = arguments.advantages.shape == layout.shape
    if per_token and objective.ratio == "sequence" and objective.surrogate not in SCORES:
        check.hint(
            advantages,
            lambda: _differing(advantages, unmasked, layout),
            "advantages differ inside a sequence, but with ratio='sequence' the gradient of a sequence is spread "
            "evenly over its tokens. With ratio='sequence-token', each token has the gradient of its own advantage",
            stacklevel=6,
        )
    if arguments.advantages.requires_grad and not torch.compiler.is_compiling():
        warn_once(
            f"{check.place}: advantages have a gradient, but are treated as a constant. A divergence over k ids has an "
            "expected gradient of 0 as an advantage: add it to the loss",
            stacklevel=5,
            kind="advantages with a gradient",
        )
    old = _log_probs(check, "old_log_probs", arguments.old_log_probs, layout, unmasked, dtype)
    ref = _log_probs(check, "ref_log_probs", arguments.ref_log_probs, layout, unmasked, dtype)
    if objective.kl_coef > 0 and ref is None:
        check.fail("ref_log_probs", "given, because objective.kl_coef > 0", None)
    weights = _token_weights(check, arguments.token_weights, layout, unmasked, dtype)
    cp_group = arguments.cp_group
    if cp_group is not None and objective.rollout_correction is not None:
        expected = (
            "None with a cp_group (pass weights of the unsharded sequences as token_weights, see sampler_mismatch)"
        )
        check.fail("objective.rollout_correction", expected, objective.rollout_correction)
    correction = _rollout_correction(check, arguments, layout, unmasked)
    rollout_metrics = {}
    if correction is not None:
        rollout_metrics = {f"rollout_{name}": x for name, x in correction.metrics.items() if name != "tokens"}
        rollout = correction.weights.reshape(-1).to(dtype)
        in_loss = unmasked & (advantages != 0) if weights is None else unmasked & (advantages != 0) & (weights != 0)
        _check_nan(check, arguments.rollout_log_probs, unmasked, in_loss & rollout.isnan())
        # A token weight of 0 gives 0, even if the rollout weight is NaN.
        weights = rollout if weights is None else multiply_no_nan(weights, rollout)
    normalizer = _normalizer(check, "normalizer", arguments.normalizer, mask, dtype)
    kl_normalizer = _normalizer(check, "kl_normalizer", arguments.kl_normalizer, mask, dtype)
    if arguments.kl_normalizer is not None and objective.kl_coef == 0:
        expected = "None, because objective.kl_coef is 0, so the loss has no KL term"
        check.fail("kl_normalizer", expected, arguments.kl_normalizer)
    rows = PolicyRows(
        offsets=layout.offsets,
        advantages=advantages,
        old_log_probs=old,
        ref_log_probs=ref,
        token_weights=weights,
        normalizer=normalizer,
        kl_normalizer=kl_normalizer,
        invalid=check.invalid(mask.device),  # includes the checks of hidden states or log-probs, so call it last
        group="" if cp_group is None else cp_group.group_name,
    )
    return PolicyInputs(rows, layout, rollout_metrics)


def _layout(check: TensorChecks, cu_seqlens: Tensor | None, mask: Tensor) -> Layout:
    """Check offsets, if there are any, and lay out the batch."""
    shape = tuple(mask.shape)
    if cu_seqlens is None:
        if len(shape) != 2:
            check.fail("cu_seqlens", "given for packed input (hidden [N, H], log_probs [N])", None)
        return padded_layout((shape[0], shape[1]), mask.device)
    if len(shape) != 1:
        packed = " (for packed input, pass hidden[0], target_ids[0] and so on)" if shape[0] == 1 else ""
        got = Unquoted(f"a tensor and hidden of shape [{shape[0]}, {shape[1]}, H]")
        check.fail("cu_seqlens", f"None for padded input{packed}", got)
    check.offsets(cu_seqlens, shape[0], mask.device)
    return packed_layout(shape[0], cu_seqlens)


def _advantages(
    check: TensorChecks, advantages: Tensor, layout: Layout, unmasked: Tensor, dtype: torch.dtype
) -> Tensor:
    """Check advantages, which must be finite in unmasked rows, and expand them to [N]."""
    shape, sequences = layout.shape, layout.sequences
    if layout.padded:
        shapes: list[tuple[int, ...]] = [(sequences,), (sequences, 1), shape]
        text = lambda: f"[B] = [{sequences}], [B, 1] or [B, T] = {list(shape)}"  # noqa: E731
    else:
        shapes = [(sequences,), shape]
        text = lambda: f"[S] = [{sequences}] or [N] = {list(shape)}"  # noqa: E731
    check.tensor("advantages", advantages, dtypes=FLOATS, shapes=shapes, shape_text=text, device=unmasked.device)
    per_row = layout.per_row(advantages.detach()).to(dtype)
    wrong = unmasked & (per_row - per_row != 0)  # NaN or infinite
    check.flag("advantages", wrong, "finite where mask is true", lambda: up_to_five(per_row[wrong]))
    return per_row


def _differing(advantages: Tensor, unmasked: Tensor, layout: Layout) -> Tensor:
    """True for sequences whose unmasked tokens have different advantages, [S]."""
    largest, smallest = (
        torch.segment_reduce(torch.where(unmasked, advantages, masked), kind, offsets=layout.offsets)
        for kind, masked in (("max", -torch.inf), ("min", torch.inf))
    )
    return largest > smallest


def _log_probs(
    check: TensorChecks, name: str, x: Tensor | None, layout: Layout, unmasked: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Check log-probs. Return them detached and flattened to [N]."""
    if x is None:
        return None
    shape, device = layout.shape, layout.offsets.device
    check.log_probs(name, x, shapes=[shape], shape_text=lambda: f"{list(shape)}, one per token", device=device)
    rows = x.detach().to(dtype).reshape(-1)
    check.sign(name, rows, unmasked)
    return rows


def _token_weights(
    check: TensorChecks, weights: Tensor | None, layout: Layout, unmasked: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Check weights, which must be finite and >= 0 in unmasked rows, and expand them to [N]."""
    if weights is None:
        return None
    shape = layout.shape
    shapes = [shape, (shape[0], 1)] if layout.padded else [shape]
    text = lambda: f"{list(shape)}{' or [B, 1]' if layout.padded else ''}"  # noqa: E731
    check.tensor("token_weights", weights, dtypes=FLOATS, shapes=shapes, shape_text=text, device=unmasked.device)
    rows = layout.flatten(weights.detach()).to(dtype)
    wrong = unmasked & ~((rows >= 0) & rows.isfinite())
    check.flag("token_weights", wrong, "finite and >= 0 where mask is true", lambda: up_to_five(rows[wrong]))
    return rows


def _rollout_correction(
    check: TensorChecks, arguments: PolicyArguments, layout: Layout, unmasked: Tensor
) -> Correction | None:
    """Compute the importance weights that correct for the sampler; None if the objective has no correction."""
    correction = arguments.objective.rollout_correction
    rollout = arguments.rollout_log_probs
    old = arguments.old_log_probs
    if correction is None:
        if rollout is not None:
            expected = "None, because objective.rollout_correction is None, and only this option uses it"
            check.fail("rollout_log_probs", expected, rollout)
        return None
    if rollout is None or old is None:
        missing = "old_log_probs" if rollout is not None else "rollout_log_probs"
        expected = "given, because objective.rollout_correction compares old_log_probs with rollout_log_probs"
        check.fail(missing, expected, None)
    corrections = correction if isinstance(correction, tuple) else (correction,)
    return rollout_weights(check, layout, unmasked, old, rollout, corrections)


def _check_nan(check: TensorChecks, rollout: Any, unmasked: Tensor, nan_weights: Tensor) -> None:
    """Check that tokens with a nonzero policy term get no NaN weight from the sampler. All tensors are [N]."""
    wrong = nan_weights & (unmasked & rollout.reshape(-1).isnan()).any()
    expected = (
        "without NaN where mask is true (for a weight of 1, as in TRL, pass torch.where(rollout_log_probs.isnan(), "
        "old_log_probs, rollout_log_probs))"
    )
    check.flag("rollout_log_probs", wrong, expected, lambda: [math.nan])


def _normalizer(
    check: TensorChecks, name: str, value: float | Tensor | None, mask: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Check a normalizer. Return it as a detached tensor [] of `dtype`, or None for the default."""
    if value is None:
        return None
    check.normalizer(name, value, mask)
    if isinstance(value, Tensor):
        return value.detach().to(dtype)
    return torch.full((), float(value), dtype=dtype, device=mask.device)
