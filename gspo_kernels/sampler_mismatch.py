"""Importance weights and masks that correct for a sampler whose log-probs differ from the trainer's.

With pi the trainer's policy that the ratio starts from (`old_log_probs`) and mu the sampler, rho_t = pi(y_t) / mu(y_t):

    trainer                                   here
    TRL token_truncate, verl token, slime     level="token", mode="truncate"
    TRL token_mask, IcePop                    level="token", mode="mask"
    TRL sequence_*, verl sequence             level="sequence": the product of the rho_t
    ms-swift sequence_*, ROLL geometric       level="geometric": their geometric mean

The weights go into `token_weights` of the losses, which multiplies the policy term and neither KL nor entropy; with
`Objective(rollout_correction=RolloutCorrection(...))` the loss computes them and adds their metrics to its own. To take
the sampler's log-probs for the old ones instead (GSPO's paper, 5.4; verl's bypass mode), pass them as `old_log_probs`.
Nothing is read on the host, and nothing has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout, packed_layout, padded_layout, segment_sum
from .validation import FLOATS, LARGEST, Call, Field, bound, few

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


@dataclass(frozen=True)
class RolloutCorrection:
    """Settings of `Objective.rollout_correction`: the arguments of `importance_weights` by name.

    TRL 1.16's default is level="sequence", mode="mask", high=3.0, IcePop's mode="mask" with both bounds.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        low, high = _bounds(Field("RolloutCorrection"), self.level, self.mode, self.low, self.high)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)


class Correction(NamedTuple):
    """Weights, and metrics for the trainer's log (0-dim tensors on the device).

    metrics: weight_mean, weight_max; effective_sample_size, (sum w)^2 / (n sum w^2) over tokens, a share; bound_share,
        of tokens whose weight a bound changed; kl_sampler_trainer, nats per token: the mean of rho - 1 - log rho over
        the sampler's tokens, an estimate of KL(sampler || trainer) that is never negative.
    """

    weights: Tensor  # [B, T] or [N], 0 where masked
    metrics: dict[str, Tensor]


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    level: str = "token",
    mode: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Compute pi / mu per token, its product over a sequence or its geometric mean, between two bounds.

    Args:
        old_log_probs: [B, T], or [N] with cu_seqlens; fp32 or fp64: of the sampled tokens by the trainer's policy.
        rollout_log_probs: the same shape: by the sampler.
        mask: the same shape, bool or 0/1: the unmasked tokens. Others may hold anything.
        cu_seqlens: [S + 1] int32 or int64 for packed input.
        level: "token", "sequence" or "geometric".
        mode: "truncate": weights are clamped to [low, high]; "mask": those outside become 0.
        low, high: the bounds, included. 0 <= low <= high.

    Returns:
        Correction. NaN weights propagate to the loss. (vLLM has NaN for tokens that it
        cannot score; TRL takes their ratio for 1: torch.where(rollout.isnan(), old, rollout).)

    Raises:
        ValueError, TypeError: naming the argument. On accelerators values of mask and cu_seqlens are not looked at
            (unless GSPO_CHECK=1): bad ones make all weights NaN.
    """
    call = Call("importance_weights")
    layout, unmasked, invalid = _layout(call, mask, cu_seqlens)
    difference = _difference(call, layout, unmasked, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    low, high = _bounds(call, level, mode, low, high)
    return _weigh(layout, unmasked, difference, RolloutCorrection(level, mode, low, high), invalid)


def rollout_weights(
    call: Call, layout: Layout, unmasked: Tensor, old: Tensor, rollout: Tensor, correction: RolloutCorrection
) -> Correction:
    """Run `importance_weights` for a loss that has checked and laid out its batch; `unmasked` [N] is its mask."""
    difference = _difference(call, layout, unmasked, old_log_probs=old, rollout_log_probs=rollout)
    return _weigh(layout, unmasked, difference, correction, unmasked.new_zeros((), dtype=torch.int64))


def _weigh(
    layout: Layout, unmasked: Tensor, difference: Tensor, correction: RolloutCorrection, invalid: Tensor
) -> Correction:
    """Weights and metrics from `difference` [N], old less rollout log-prob, 0 where masked."""
    low, high, level = correction.low, correction.high, correction.level
    log_weight = (
        difference if level == "token" else _of_sequence(difference, unmasked, layout, mean=level == "geometric")
    )
    raw = log_weight.exp()
    outside = (raw < low) | (raw > high)
    weight = raw.clamp(low, high) if correction.mode == "truncate" else torch.where(outside, 0, raw)
    weight = torch.where(unmasked, weight, 0)
    tokens = unmasked.sum().clamp(min=1).to(weight.dtype)
    total, squares = weight.sum(), weight.square().sum()
    metrics = {
        "weight_mean": total / tokens,
        "weight_max": torch.cat([weight, weight.new_zeros(1)]).amax(),
        "effective_sample_size": torch.where(squares == 0, 0, total.square() / (tokens * squares)),
        "bound_share": (outside & unmasked).sum() / tokens,
        "kl_sampler_trainer": torch.where(unmasked, _k3(difference), 0).sum() / tokens,
    }
    return _correction(layout, weight, metrics, invalid)


def off_policy_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    threshold: float,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Mask sequences of negative advantage that the policy has moved far from (DeepSeek-V3.2): 0 there, 1 elsewhere.

    A sequence goes where the mean over its tokens of rollout - current log-prob exceeds `threshold`: TRL's
    off_policy_mask_threshold, slime's OPSM. Against the old log-probs that is GSPO's own lower clip at
    1 - exp(-threshold).

    Args:
        log_probs: [B, T] or [N], fp32 or fp64: of the current policy.
        rollout_log_probs: the same shape.
        advantages: [B], [B, 1], [S] per sequence or per token, of which any negative one counts for the sequence's
            tokens of negative advantage.
        mask, cu_seqlens: as in `importance_weights`.
        threshold: nats per token, >= 0.

    Returns:
        Correction; its one metric is masked_share, of tokens.

    Raises:
        ValueError, TypeError: as `importance_weights`, and for advantages that are not finite where mask is true.
    """
    call = Call("off_policy_mask")
    layout, unmasked, invalid = _layout(call, mask, cu_seqlens)
    difference = _difference(call, layout, unmasked, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    call.number("threshold", threshold, "a number >= 0", lambda x: x >= 0)
    sequences = layout.sequences
    shapes = [(sequences,), (sequences, 1), layout.shape] if layout.padded else [(sequences,), layout.shape]
    text = f"[{sequences}] or one per token"
    call.tensor("advantages", advantages, dtypes=FLOATS, shapes=shapes, shape_text=text, device=mask.device)
    per_row = layout.per_row(advantages.detach())
    wrong = unmasked & ~per_row.isfinite()
    invalid = invalid + call.flag("advantages", wrong, "finite where mask is true", lambda: few(per_row[wrong]))
    away = -_of_sequence(difference, unmasked, layout, mean=True) > threshold
    dropped = away & (per_row < 0) & unmasked
    weights = torch.where(unmasked & ~dropped, 1.0, 0.0).to(difference.dtype)
    share = dropped.sum() / unmasked.sum().clamp(min=1)
    return _correction(layout, weights, {"masked_share": share.to(difference.dtype)}, invalid)


def _k3(difference: Tensor) -> Tensor:
    return torch.where(difference.isposinf(), difference, torch.expm1(difference) - difference)


def _bounds(check: Field, level: str, mode: str, low: float, high: float) -> tuple[float, float]:
    check.choice("level", level, LEVELS)
    check.choice("mode", mode, MODES)
    low = check.number("low", low, "a finite number >= 0, within float32", lambda x: 0 <= x <= LARGEST)
    above = lambda: f"a number >= low = {low:g}, within float32, or inf for no bound"  # noqa: E731
    return low, check.number("high", high, above, lambda x: x >= low and bound(x))


def _layout(call: Call, mask: Tensor, cu_seqlens: Tensor | None) -> tuple[Layout, Tensor, Tensor]:
    """Return the layout, the mask as bool [N], and how many values of mask and offsets are invalid."""
    shape, text = ((None, None), "[B, T]") if cu_seqlens is None else ((None,), "[N], with cu_seqlens")
    unmasked, invalid = call.mask(mask, shapes=[shape], shape_text=text)
    if cu_seqlens is None:
        layout = padded_layout((mask.shape[0], mask.shape[1]), mask.device)
    else:
        invalid = invalid + call.offsets(cu_seqlens, mask.shape[0], mask.device)
        layout = packed_layout(mask.shape[0], cu_seqlens)
    return layout, unmasked.reshape(-1), invalid


def _correction(layout: Layout, weights: Tensor, metrics: dict[str, Tensor], invalid: Tensor) -> Correction:
    """Return weights [N] in the caller's shape; all of them NaN where invalid values could only be counted."""
    return Correction(torch.where(invalid > 0, torch.nan, weights).view(layout.shape), metrics)


def _difference(call: Call, layout: Layout, unmasked: Tensor, **log_probs: Tensor) -> Tensor:
    """First less second, [N], 0 where masked."""
    for name, x in log_probs.items():
        text = f"{list(layout.shape)}, one per token"
        call.log_probs(name, x, shapes=[layout.shape], shape_text=text, device=unmasked.device)
    first, second = (x.detach().reshape(-1) for x in log_probs.values())
    return torch.where(unmasked, first - second, 0)


def _of_sequence(x: Tensor, unmasked: Tensor, layout: Layout, mean: bool) -> Tensor:
    """Each row's sequence's sum, or mean over the unmasked tokens, [N]."""
    total = segment_sum(x, layout.offsets)
    if mean:
        total = total / segment_sum(unmasked.to(x.dtype), layout.offsets).clamp(min=1)
    return total[layout.sequence_of_row()]
