"""Importance weights and masks for a mismatch between sampler and trainer, which compute different log-probs.

Let pi be the trainer's policy in the ratio's denominator (`old_log_probs`), and mu the sampler. The ratio of a token is
rho_t = pi(y_t) / mu(y_t). These settings compute the weights of other trainers:

    trainer                                   here
    TRL token_truncate, verl token, slime     level="token", mode="truncate": rho_t
    TRL token_mask, IcePop                    level="token", mode="mask": rho_t
    TRL sequence_*, verl sequence             level="sequence": the product of the rho_t
    ms-swift sequence_truncate, ROLL          level="geometric": the geometric mean of the rho_t
    verl rollout_rs seq_mean_k1               level="geometric", mode="gate": 1 within the bounds, else 0
    ms-swift sequence_mask, NeMo RL and       two corrections: a gate on the geometric mean, and the weight rho_t of
    OpenRLHF seq-mask-tis                     each token, RolloutCorrection("token", high=math.inf)

Pass the weights to a loss as `token_weights`, which multiply the policy term but not the KL term or the entropy. Or set
`Objective(rollout_correction=RolloutCorrection(...))`: the loss then computes the weights and reports their metrics. It
multiplies the weights of several corrections, passed as a tuple.

To use the sampler's log-probs instead of recomputed ones (GSPO's paper, section 5.4; verl's bypass mode), pass them as
`old_log_probs`. No weights are needed in that case. The host reads no values, and results have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout, packed_layout, padded_layout, segment_sum
from .validation import FLOATS, LARGEST, Checks, TensorChecks, up_to_five, valid_bound

__all__ = [
    "Correction",
    "RolloutCorrection",
    "importance_weights",
    "off_policy_mask",
]

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "gate")


@dataclass(frozen=True)
class RolloutCorrection:
    """Settings for `Objective.rollout_correction`. The fields are arguments of `importance_weights`.

    TRL 1.16's default is level="sequence", mode="mask", high=3.0. IcePop is mode="mask" with both bounds.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        low, high = _bounds(Checks("RolloutCorrection"), self.level, self.mode, self.low, self.high)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)


class Correction(NamedTuple):
    """Token weights, and metrics for the trainer's log.

    `metrics` holds 0-dim fp64 tensors on the device, over unmasked tokens. `gspo_kernels.metrics.combine` combines the
    metrics of micro-batches and ranks.

    - weight_mean, weight_square_mean, weight_max: mean weight, mean squared weight, and largest weight.
    - effective_sample_size: (sum w)^2 / (n sum w^2) for n tokens, between 0 and 1.
    - bound_share: share of tokens with a weight outside the bounds. With several corrections, outside the bounds of at
      least one.
    - bound_share_0, bound_share_1, ...: the share of each correction; only with several.
    - kl_sampler_trainer: mean of rho - 1 - log rho in nats per token. This estimate of KL(sampler || trainer) is never
      negative.
    - tokens: number of unmasked tokens.
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
    """Compute importance weights pi / mu, per token or per sequence, limited by two bounds.

    Args:
        old_log_probs: log-probs of the sampled tokens under the trainer's policy, [B, T], or [N] with cu_seqlens; fp32
            or fp64.
        rollout_log_probs: log-probs reported by the sampler, in the same shape.
        mask: True or 1 at unmasked tokens, bool or 0/1, in the same shape. Log-probs at masked positions may hold any
            value.
        cu_seqlens: [S + 1] int32 or int64, for packed input.
        level: "token": the weight of a token is its ratio. "sequence": all tokens of a sequence get the product of
            their ratios. "geometric": all tokens of a sequence get the geometric mean of their ratios.
        mode: "truncate" clamps weights to [low, high]; "mask" sets weights outside [low, high] to 0; "gate" sets
            weights to 1 inside and to 0 outside, for use with another correction.
        low, high: bounds, 0 <= low <= high.

    Returns:
        Correction. NaN weights propagate to the loss. vLLM reports NaN log-probs for tokens that it cannot score, and
        TRL sets their ratio to 1. To do the same, pass torch.where(rollout.isnan(), old, rollout).

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received. Bad values
            in mask or cu_seqlens on a GPU raise only if GSPO_CHECK=1. Otherwise they make all weights NaN.
    """
    check = TensorChecks("importance_weights")
    layout, unmasked = _layout(check, mask, cu_seqlens)
    log_probs = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
    difference = _difference(check, layout, unmasked, **log_probs)
    low, high = _bounds(check, level, mode, low, high)
    for name, x in log_probs.items():
        check.sign(name, x.detach().reshape(-1), unmasked)
    corrections = (RolloutCorrection(level, mode, low, high),)
    result = _weigh(layout, unmasked, difference, corrections)
    return result._replace(weights=check.nan_if_invalid(result.weights))


def rollout_weights(
    check: TensorChecks,
    layout: Layout,
    unmasked: Tensor,
    old: Tensor,
    rollout: Tensor,
    corrections: tuple[RolloutCorrection, ...],
) -> Correction:
    """Compute the product of all corrections' weights for a loss, which has already checked mask and offsets.

    `unmasked` is [N] bool.
    """
    difference = _difference(check, layout, unmasked, old_log_probs=old, rollout_log_probs=rollout)
    check.sign("rollout_log_probs", rollout.detach().reshape(-1), unmasked)
    return _weigh(layout, unmasked, difference, corrections)


def _weigh(
    layout: Layout, unmasked: Tensor, difference: Tensor, corrections: tuple[RolloutCorrection, ...]
) -> Correction:
    """Compute weights and metrics from `difference` [N], old minus rollout log-prob, 0 where masked."""
    weighed = [_weight(layout, unmasked, difference, correction) for correction in corrections]
    weight, outside = weighed[0]
    for other_weight, other_outside in weighed[1:]:
        # A weight of 0 drops the token, even if another weight is NaN or inf.
        weight = torch.where((weight == 0) | (other_weight == 0), 0, weight * other_weight)
        outside = outside | other_outside
    weight = torch.where(unmasked, weight, 0)
    tokens = unmasked.sum().double()
    per_token = tokens.clamp(min=1)
    wide = weight.double()
    mean, square_mean = wide.sum() / per_token, wide.square().sum() / per_token
    metrics = {
        "weight_mean": mean,
        "weight_square_mean": square_mean,
        "weight_max": torch.cat([wide, wide.new_zeros(1)]).amax(),
        "effective_sample_size": sample_size(mean, square_mean),
        "bound_share": (outside & unmasked).sum() / per_token,
        "kl_sampler_trainer": torch.where(unmasked, _k3(difference), 0).double().sum() / per_token,
        "tokens": tokens,
    }
    if len(corrections) > 1:
        metrics |= {f"bound_share_{i}": (x & unmasked).sum() / per_token for i, (_, x) in enumerate(weighed)}
    return Correction(weight.view(layout.shape), metrics)


def sample_size(mean: Tensor, square_mean: Tensor) -> Tensor:
    """Effective sample size as a share of the number of weights, []; 0 if all weights are 0."""
    return torch.where(square_mean == 0, 0, mean.square() / square_mean)


def _weight(
    layout: Layout, unmasked: Tensor, difference: Tensor, correction: RolloutCorrection
) -> tuple[Tensor, Tensor]:
    """Compute the weight of each row under one correction, and whether its ratio is outside the bounds, [N] each."""
    low, high, level = correction.low, correction.high, correction.level
    log_weight = (
        difference if level == "token" else _reduce_sequences(difference, unmasked, layout, mean=level == "geometric")
    )  # [N]
    raw = log_weight.exp()
    outside = (raw < low) | (raw > high)
    if correction.mode == "truncate":
        return raw.clamp(low, high), outside
    inside = torch.where(raw.isnan(), raw, 1) if correction.mode == "gate" else raw
    return torch.where(outside, 0, inside), outside


def off_policy_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    threshold: float,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Mask tokens with negative advantage in sequences that have become much less likely (DeepSeek-V3.2).

    They are masked if rollout minus current log-prob, averaged over the sequence, exceeds `threshold`. TRL's
    off_policy_mask_threshold and slime's OPSM do the same. If you pass old log-probs as rollout_log_probs, this masks
    the tokens that GSPO clips at the lower bound with clip_low = 1 - exp(-threshold).

    Args:
        log_probs: log-probs of the current policy, [B, T], or [N] with cu_seqlens; fp32 or fp64.
        rollout_log_probs: log-probs reported by the sampler, in the same shape.
        advantages: per sequence [B], [B, 1] or [S], or per token [B, T] or [N]. With per-token advantages, tokens with
            a non-negative advantage keep weight 1.
        mask, cu_seqlens: as in `importance_weights`.
        threshold: in nats per token, >= 0.

    Returns:
        Correction with weights 0 and 1. The metrics are tokens, the number of unmasked tokens (by `mask`), and
        masked_share, the share of them that get weight 0.

    Raises:
        ValueError, TypeError: as in `importance_weights`, and if an advantage is not finite where `mask` is true.
    """
    check = TensorChecks("off_policy_mask")
    layout, unmasked = _layout(check, mask, cu_seqlens)
    checked = {"log_probs": log_probs, "rollout_log_probs": rollout_log_probs}
    difference = _difference(check, layout, unmasked, **checked)
    check.number("threshold", threshold, "a number >= 0", lambda x: x >= 0)
    for name, x in checked.items():
        check.sign(name, x.detach().reshape(-1), unmasked)
    sequences = layout.sequences
    shapes = [(sequences,), (sequences, 1), layout.shape] if layout.padded else [(sequences,), layout.shape]
    text = f"[{sequences}] or one per token"
    check.tensor("advantages", advantages, dtypes=FLOATS, shapes=shapes, shape_text=text, device=mask.device)
    per_row = layout.per_row(advantages.detach())
    wrong = unmasked & ~per_row.isfinite()
    check.flag("advantages", wrong, "finite where mask is true", lambda: up_to_five(per_row[wrong]))
    far = -_reduce_sequences(difference, unmasked, layout, mean=True) > threshold  # [N] bool
    dropped = far & (per_row < 0) & unmasked
    weights = torch.where(unmasked & ~dropped, 1.0, 0.0).to(difference.dtype)
    tokens = unmasked.sum().double()
    metrics = {"masked_share": dropped.sum() / tokens.clamp(min=1), "tokens": tokens}
    return Correction(check.nan_if_invalid(weights).view(layout.shape), metrics)


def _k3(difference: Tensor) -> Tensor:
    """Compute rho - 1 - log rho, elementwise, where `difference` is log rho; inf for inf."""
    return torch.where(difference.isposinf(), difference, torch.expm1(difference) - difference)


def _bounds(check: Checks, level: str, mode: str, low: float, high: float) -> tuple[float, float]:
    """Check the settings of a correction. Return (low, high) as floats."""
    check.choice("level", level, LEVELS)
    check.choice("mode", mode, MODES)
    low = check.number("low", low, "a finite number >= 0, within float32", lambda x: 0 <= x <= LARGEST)
    expected = lambda: f"a number >= low = {low:g}, within float32, or inf for no bound"  # noqa: E731
    return low, check.number("high", high, expected, lambda x: x >= low and valid_bound(x))


def _layout(check: TensorChecks, mask: Tensor, cu_seqlens: Tensor | None) -> tuple[Layout, Tensor]:
    """Check mask and offsets. Return the layout, and the mask as bool [N]."""
    shape, text = ((None, None), "[B, T]") if cu_seqlens is None else ((None,), "[N], with cu_seqlens")
    unmasked = check.mask(mask, shapes=[shape], shape_text=text)
    if cu_seqlens is None:
        layout = padded_layout((mask.shape[0], mask.shape[1]), mask.device)
    else:
        check.offsets(cu_seqlens, mask.shape[0], mask.device)
        layout = packed_layout(mask.shape[0], cu_seqlens)
    return layout, unmasked.reshape(-1)


def _difference(check: TensorChecks, layout: Layout, unmasked: Tensor, **log_probs: Tensor) -> Tensor:
    """Check two tensors of log-probs. Return the first minus the second, [N], 0 where masked."""
    for name, x in log_probs.items():
        text = f"{list(layout.shape)}, one per token"
        check.log_probs(name, x, shapes=[layout.shape], shape_text=text, device=unmasked.device)
    first, second = (x.detach().reshape(-1) for x in log_probs.values())
    return torch.where(unmasked, first - second, 0)


def _reduce_sequences(x: Tensor, unmasked: Tensor, layout: Layout, mean: bool) -> Tensor:
    """Sum `x` [N] over each sequence, or average it over the unmasked rows. Return the result for each row, [N]."""
    total = segment_sum(x, layout.offsets)  # [S]
    if mean:
        total = total / segment_sum(unmasked.to(x.dtype), layout.offsets).clamp(min=1)
    return total[layout.sequence_of_row()]
