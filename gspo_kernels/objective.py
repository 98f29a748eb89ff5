"""What is optimised: `Objective`, its named presets, and the closed form of d(loss)/d(log_prob).

Notation of arXiv 2507.18071, per token t of sequence i: u the log-ratio (per sequence, or per token for ratio="token"),
s = exp(u), A the advantage, c the aggregation weight over the normalizer, o the caller's token weight. The loss is

    sum_it c_it [ o_it l(u, A_it) - entropy_coef H_it ] + kl_coef sum_it c'_it k(lp_it - ref_it) [ s ]

and `coefficient` in the fast paths is its whole derivative with respect to lp_it. With w_it = c_it o_it dl/du (+ the
derivative of the factor [ s ] when `kl_ratio_factor` is set):

    token forms      coefficient_it = w_it                              + kl_coef c'_it k'_it [ s ]
    sequence form    coefficient_it = (m_it / L_i) sum over t' of w_it' + kl_coef c'_it k'_it [ s ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from . import metrics, validation
from .layout import PolicyResult, PolicyRows, segment_sum, sequence_of_row

RATIOS = ("sequence", "sequence-token", "token")
SURROGATES = ("clip", "none")
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3")

_PRESETS: dict[str, dict[str, Any]] = {
    "gspo": {},
    "gspo-token": {"ratio": "sequence-token"},
    "grpo": {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"ratio": "token", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
    "bnpo": {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token-mean"},
    "dr_grpo": {
        "ratio": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq-mean-token-sum-norm",
    },
    "luspo": {"clip_low": 2e-3, "clip_high": 2.5e-3, "aggregation": "seq-mean-token-sum"},
}


@dataclass(frozen=True)
class Objective:
    """What is optimised. The defaults are GSPO as in its paper.

    Args:
        ratio: "sequence" (GSPO: one length-normalised ratio per sequence), "sequence-token" (GSPO-token, paper eq.
            13-14: the same value, per-token gradient, for per-token advantages) or "token" (GRPO, PPO).
        surrogate: "clip" for -min(s A, clip(s) A), "none" for -s A.
        clip_low: the ratio window is [1 - clip_low, 1 + clip_high], bounds included. 0 <= clip_low < 1.
        clip_high: see clip_low. 0 <= clip_high.
        dual_clip: bound c > 1 on the ratio where the advantage is negative (arXiv 1912.09729), None for no bound.
        delta: TRL's name for such a bound (INTELLECT-2); must exceed 1 + clip_high. With both, the smaller binds.
        aggregation: the weight of a token before the normalizer: "seq-mean-token-mean" 1 / L_i (GSPO's own),
            "token-mean" 1, "seq-mean-token-sum" 1, "seq-mean-token-sum-norm" 1 / length_norm. L_i counts unmasked
            tokens.
        length_norm: the constant of "seq-mean-token-sum-norm", usually the longest completion allowed, in tokens.
        kl_coef: weight of the KL term against `ref_log_probs`, >= 0.
        kl_estimator: "k1" d, "k2" d^2 / 2 or "k3" exp(-d) + d - 1, with d = log_prob - ref_log_prob.
        kl_aggregation: how the KL term aggregates, None for like the policy term.
        kl_ratio_factor: multiply the KL of each token by its importance ratio, gradient included (TRL's
            `use_bias_correction_kl`).
        entropy_coef: weight of the entropy bonus; the loss falls by entropy_coef times the aggregated entropy.
        rollout_correction: reserved for corrections of sampler mismatch; only None is accepted.

    Raises:
        ValueError, TypeError: a field is out of its range or of the wrong type; the message names it.
    """

    ratio: str = "sequence"
    surrogate: str = "clip"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    delta: float | None = None
    aggregation: str = "seq-mean-token-mean"
    length_norm: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_aggregation: str | None = None
    kl_ratio_factor: bool = False
    entropy_coef: float = 0.0
    rollout_correction: None = None

    def __post_init__(self) -> None:
        check = validation.Field("Objective")
        check.choice("ratio", self.ratio, RATIOS)
        check.choice("surrogate", self.surrogate, SURROGATES)
        check.choice("aggregation", self.aggregation, AGGREGATIONS)
        check.choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if self.kl_aggregation is not None:
            check.choice("kl_aggregation", self.kl_aggregation, AGGREGATIONS)
        check.boolean("kl_ratio_factor", self.kl_ratio_factor)
        numbers = {
            "clip_low": ("a number >= 0 and < 1", lambda x: 0 <= x < 1),
            "clip_high": ("a number >= 0", lambda x: x >= 0),
            "dual_clip": ("a number > 1, or None", lambda x: x > 1),
            "delta": (
                lambda: f"a number > 1 + clip_high = {1 + self.clip_high:g}, or None",
                lambda x: x > 1 + self.clip_high,
            ),
            "length_norm": ("a finite number > 0, within float32", validation.positive),
            "kl_coef": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
            "entropy_coef": ("a finite number", lambda x: abs(x) <= validation.LARGEST),
        }
        optional = ("dual_clip", "delta", "length_norm")
        for name, (expected, holds) in numbers.items():
            if name in optional and getattr(self, name) is None:
                continue
            object.__setattr__(self, name, check.number(name, getattr(self, name), expected, holds))
        if self.length_norm is None and "seq-mean-token-sum-norm" in (self.aggregation, self.kl_aggregation):
            check.fail("length_norm", "a number of tokens for seq-mean-token-sum-norm", None)
        if self.rollout_correction is not None:
            check.fail("rollout_correction", "None: corrections of sampler mismatch are not in this version; "
                       "pass importance weights as token_weights", self.rollout_correction)  # fmt: skip

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Objective:
        """A named objective, with any field changed: `Objective.preset("dapo", clip_high=0.3)`.

        Names: gspo, gspo-token, grpo, dapo, bnpo, dr_grpo (give it `length_norm`), luspo.
        """
        validation.Field("Objective.preset").choice("name", name, tuple(_PRESETS))
        known = {f.name for f in fields(cls)}
        for key in changes:
            validation.Field("Objective.preset").choice("field", key, tuple(sorted(known)))
        return cls(**{**_PRESETS[name], **changes})

    @property
    def ceiling(self) -> float:
        """The bound on the ratio where the advantage is negative: the smaller of dual_clip and delta, or inf."""
        return min((c for c in (self.dual_clip, self.delta) if c is not None), default=math.inf)


def clipped(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Where the clip binds, elementwise: (at the lower bound, at an upper bound), by the sign of the advantage.

    The decision is taken on u against log1p of the bounds, not on s: near 1 that keeps fp32's full resolution. A ratio
    on the bound is inside. NaN is never clipped, so that it reaches the loss.
    """
    if objective.surrogate == "none":
        never = torch.zeros_like(log_ratio, dtype=torch.bool)
        return never, never
    low = (advantages < 0) & (log_ratio < math.log1p(-objective.clip_low))
    high = (advantages > 0) & (log_ratio > math.log1p(objective.clip_high))
    if math.isfinite(objective.ceiling):
        high |= (advantages < 0) & (log_ratio > math.log(objective.ceiling))
    return low, high


def surrogate_and_slope(log_ratio: Tensor, advantages: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """l(u, A) and dl/du, elementwise.

    The gate selects before anything is multiplied: exp(u) of a clipped row may be inf and 0 * inf is NaN. A zero
    advantage contributes exactly 0 to both.
    """
    low, high = clipped(log_ratio, advantages, objective)
    free = ~(low | high | (advantages == 0))
    gain = torch.where(free, log_ratio, 0).exp() * advantages
    slope = torch.where(free, -gain, 0)
    # A ratio is bound at the top of the window by a positive advantage, at the ceiling or the bottom by a negative one.
    bound = torch.full_like(log_ratio, 1 + objective.clip_high)
    bound.masked_fill_(advantages < 0, objective.ceiling if math.isfinite(objective.ceiling) else 0.0)
    bound.masked_fill_(low, 1 - objective.clip_low)
    value = torch.where(low | high, -bound * advantages, slope)
    return value, slope


def kl_and_slope(d: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """k(d) and dk/dd, elementwise, d = log_prob - ref_log_prob (Schulman, "Approximating KL divergence")."""
    if estimator == "k1":
        return d, torch.ones_like(d)
    if estimator == "k2":
        return 0.5 * d * d, d
    decay = torch.expm1(-d)
    return decay + d, -decay


def closed_form(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective
) -> PolicyResult:
    """The loss and its derivative with respect to every log-prob and entropy, all [N] rows of whole sequences."""
    offsets, advantages = policy.offsets, policy.advantages
    sequence = sequence_of_row(offsets, mask.shape[0])
    lp = torch.where(mask, log_probs, 0)
    lengths = segment_sum(mask.to(lp.dtype), offsets)

    # On-policy the difference is exactly 0, and NaN where the log-prob is not finite: that must reach the loss.
    old = log_probs if policy.old_log_probs is None else policy.old_log_probs
    token_log_ratio = torch.where(mask, log_probs - old, 0)
    by_token = objective.ratio == "token"
    u = segment_sum(token_log_ratio, offsets) / lengths.clamp(min=1)
    log_ratio = token_log_ratio if by_token else u[sequence]

    value, slope = surrogate_and_slope(log_ratio, advantages, objective)
    if policy.token_weights is not None:
        value, slope = select_times(policy.token_weights, value), select_times(policy.token_weights, slope)
    share = _token_weights(mask, sequence, lengths, objective.aggregation, objective.length_norm, policy.normalizer)
    loss_rows = torch.where(mask, share * value, 0)
    through_ratio = torch.where(mask, share * slope, 0)  # c o dl/du
    direct = torch.zeros_like(lp)

    kl = kl_slope = None
    if policy.ref_log_probs is not None:
        kl, kl_slope = kl_and_slope(torch.where(mask, log_probs - policy.ref_log_probs, 0), objective.kl_estimator)
    if objective.kl_coef > 0 and kl is not None and kl_slope is not None:
        aggregation = objective.kl_aggregation or objective.aggregation
        normalizer = policy.kl_normalizer
        if normalizer is None and aggregation == objective.aggregation:
            normalizer = policy.normalizer
        kl_share = objective.kl_coef * _token_weights(
            mask, sequence, lengths, aggregation, objective.length_norm, normalizer
        )
        if objective.kl_ratio_factor:
            kl_share = torch.where(mask, kl_share * log_ratio.exp(), 0)
            through_ratio = through_ratio + select_times(kl, kl_share)
        loss_rows = loss_rows + select_times(kl, kl_share)
        direct = select_times(kl_slope, kl_share)

    if objective.ratio == "sequence":
        per_sequence = segment_sum(through_ratio, offsets) / lengths.clamp(min=1)
        through_ratio = torch.where(mask, per_sequence[sequence], 0)
    coefficient = through_ratio + direct

    entropy_coefficient = lp.new_empty(0)
    live = coefficient != 0
    if objective.entropy_coef != 0 and entropy is not None:
        entropy_coefficient = -objective.entropy_coef * share
        loss_rows = loss_rows + torch.where(mask, entropy_coefficient * entropy, 0)
        live = live | (entropy_coefficient != 0)

    low, high = clipped(log_ratio, advantages, objective)
    values = metrics.compute(
        mask=mask, offsets=offsets, low=low, high=high, live=live, kl=kl, entropy=entropy,
        log_ratio=token_log_ratio if by_token else u, log_ratio_counts=mask if by_token else lengths > 0,
        token_log_ratio=token_log_ratio,
    )  # fmt: skip
    loss = segment_sum(loss_rows, offsets).sum()
    return PolicyResult(loss, token_log_ratio.clone() if by_token else u, coefficient, entropy_coefficient, values)


def select_times(factor: Tensor, x: Tensor) -> Tensor:
    """factor * x, exactly 0 where the factor is: x may be the inf of an exploded ratio."""
    return torch.where(factor == 0, 0, factor * x)


def _token_weights(
    mask: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    aggregation: str,
    length_norm: float | None,
    normalizer: Tensor | None,
) -> Tensor:
    """c_it: the share of each token over the normalizer, [N]; 0 at masked rows."""
    ones = torch.ones_like(lengths)
    if aggregation == "seq-mean-token-mean":
        share, default = ones / lengths.clamp(min=1), (lengths > 0).sum()
    elif aggregation == "seq-mean-token-sum":
        share, default = ones, (lengths > 0).sum()
    elif aggregation == "token-mean":
        share, default = ones, lengths.sum()
    else:
        assert length_norm is not None  # Objective refuses it without
        share, default = ones / length_norm, torch.ones((), device=lengths.device)
    normalizer = default.clamp(min=1) if normalizer is None else normalizer
    return torch.where(mask, share[sequence] / normalizer.to(share.dtype), 0)
