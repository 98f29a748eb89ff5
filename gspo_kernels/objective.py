"""What is optimised: `Objective` and its named presets.

The loss of every objective, per token t of sequence i: u the log-ratio (per sequence, or per token for ratio="token"),
s = exp(u), A the advantage, c the aggregation weight over the normalizer, o the caller's token weight:

    sum_it c_it [ o_it l(u, A_it) - entropy_coef H_it ] + kl_coef sum_it c'_it k(lp_it - ref_it) [ s ]

l is in each backend's `surrogates.py`; the sum over sequences and its derivative are in its `sequence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from . import validation
from .sampler_mismatch import RolloutCorrection

RATIOS = ("sequence", "sequence-token", "token")
SURROGATES = ("clip", "none", "cispo", "sapo", "gmpo", "reinforce")
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "unbiased")
# Clip windows from here on are for token ratios. A sequence ratio is the exponential of a mean over L tokens, so it
# deviates from 1 about sqrt(L) times less than a token's: 30 times at 1,000 tokens. GSPO has 3e-4, LUSPO 2e-3.
TOKEN_WINDOW = 0.04

_PPO = {"ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
_PRESETS: dict[str, dict[str, Any]] = {
    "gspo": {},
    "gspo-token": {"ratio": "sequence-token"},
    "grpo": _PPO,
    "dapo": {**_PPO, "clip_high": 0.28, "aggregation": "token-mean"},
    "bnpo": {**_PPO, "aggregation": "token-mean"},
    "dr_grpo": {**_PPO, "aggregation": "seq-mean-token-sum-norm"},
    "luspo": {"clip_low": 2e-3, "clip_high": 2.5e-3, "aggregation": "seq-mean-token-sum"},
    "cispo": {
        "ratio": "token", "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean",
    },
    "sapo": {"ratio": "token", "surrogate": "sapo"},
    "gmpo": {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4},
    "reinforce": {"ratio": "token", "surrogate": "reinforce", "aggregation": "seq-mean-token-sum"},
}  # fmt: skip  # a table


@dataclass(frozen=True)
class Objective:
    """What is optimised. The defaults are GSPO as in its paper.

    Args:
        ratio: "sequence" (GSPO: one length-normalised ratio per sequence), "sequence-token" (GSPO-token, paper eq.
            13-14: the same value, per-token gradient, for per-token advantages) or "token" (GRPO, PPO).
        surrogate: "clip" for -min(s A, clip(s) A); "none" for -s A; "cispo" for -clip(s) A log p with the ratio a
            constant (MiniMax-M1); "sapo" for a sigmoid gate instead of a clip (SAPO); "gmpo" for -q A, q the geometric
            mean of the tokens' bounded ratios (GMPO; needs ratio="sequence"); "reinforce" for -A log p.
        clip_low: the ratio window is [1 - clip_low, 1 + clip_high], bounds included. 0 <= clip_low < 1; 1 is no lower
            bound, for cispo. For gmpo a token's log-ratio is bound to [-clip_low, clip_high], from one side by the sign
            of the advantage.
        clip_high: see clip_low. 0 <= clip_high. TRL's epsilon_high of cispo is the bound itself: 1 + clip_high.
        dual_clip: bound c > 1 on the ratio where the advantage is negative (arXiv 1912.09729), None for no bound.
        delta: TRL's name for such a bound (INTELLECT-2); must exceed 1 + clip_high. With both, the smaller binds. Only
            surrogate="clip" has such bounds.
        aggregation: the weight of a token before the normalizer: "seq-mean-token-mean" 1 / L_i (GSPO's own),
            "token-mean" 1, "seq-mean-token-sum" 1, "seq-mean-token-sum-norm" 1 / length_norm. L_i counts unmasked
            tokens.
        length_norm: the constant of "seq-mean-token-sum-norm", usually the longest completion allowed, in tokens.
        kl_coef: weight of the KL term against `ref_log_probs`, >= 0.
        kl_estimator: "k1" d, "k2" d^2 / 2, "k3" exp(-d) + d - 1 or "abs" |d|, with d = log_prob - ref_log_prob; "k1+",
            "k3+": the same value with the gradient of k2 (verl); "unbiased": k3 times the token's own importance ratio,
            gradient included (DeepSeek-V3.2).
        kl_aggregation: how the KL term aggregates, None for like the policy term.
        kl_ratio_factor: multiply the KL of each token by the importance ratio of the objective, gradient included: at
            sequence level by s_i (TRL's `use_bias_correction_kl`).
        entropy_coef: weight of the entropy bonus; the loss falls by entropy_coef times the aggregated entropy.
        sapo_temperature_pos: slope of sapo's sigmoid where the advantage is positive, > 0.
        sapo_temperature_neg: the same where it is not.
        rollout_correction: a `gspo_kernels.sampler_mismatch.RolloutCorrection`: importance weights of old_log_probs
            against rollout_log_probs, which then must both be given; they multiply the policy term like token_weights.

    Raises:
        ValueError, TypeError: a field is out of its range or of the wrong type; the message names it.

    Warns, once each:
        UserWarning: a sequence ratio with an aggregation that weights sequences by their length, which is LUSPO and not
            GSPO; and a window a hundred times GSPO's on a length-normalised ratio, which hardly ever binds.
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
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    rollout_correction: RolloutCorrection | None = None

    def __post_init__(self) -> None:
        self._check()
        self._warn(stacklevel=5)  # the caller's line, above the __init__ that dataclass wrote

    def _check(self) -> None:
        check = validation.Field("Objective")
        check.choice("ratio", self.ratio, RATIOS)
        check.choice("surrogate", self.surrogate, SURROGATES)
        check.choice("aggregation", self.aggregation, AGGREGATIONS)
        check.choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if self.kl_aggregation is not None:
            check.choice("kl_aggregation", self.kl_aggregation, AGGREGATIONS)
        check.boolean("kl_ratio_factor", self.kl_ratio_factor)
        lowest = {
            "cispo": ("a number >= 0 and <= 1 (1: no lower bound)", lambda x: 0 <= x <= 1),
            "gmpo": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
        }.get(self.surrogate, ("a number >= 0 and < 1", lambda x: 0 <= x < 1))
        numbers = {
            "clip_low": lowest,
            "clip_high": ("a number >= 0, within float32, or inf", lambda x: x >= 0 and validation.bound(x)),
            "dual_clip": ("a number > 1, within float32, or None", lambda x: x > 1 and validation.bound(x)),
            "delta": (lambda: f"a number > 1 + clip_high = {1 + self.clip_high:g}, within float32, or None",
                      lambda x: x > 1 + self.clip_high and validation.bound(x)),
            "length_norm": ("a finite number > 0, within float32", validation.positive),
            "kl_coef": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
            "entropy_coef": ("a finite number", lambda x: abs(x) <= validation.LARGEST),
            "sapo_temperature_pos": ("a number > 0, from 1e-30 on, within float32", _temperature),
            "sapo_temperature_neg": ("a number > 0, from 1e-30 on, within float32", _temperature),
        }  # fmt: skip  # a table
        optional = ("dual_clip", "delta", "length_norm")
        for name, (expected, holds) in numbers.items():
            if name in optional and getattr(self, name) is None:
                continue
            object.__setattr__(self, name, check.number(name, getattr(self, name), expected, holds))
        if self.length_norm is None and "seq-mean-token-sum-norm" in (self.aggregation, self.kl_aggregation):
            check.fail("length_norm", "a number of tokens for seq-mean-token-sum-norm", None)
        for name in ("dual_clip", "delta"):
            if getattr(self, name) is not None and self.surrogate != "clip":
                check.fail(
                    name, f"None with surrogate={self.surrogate!r}, which has no such bound", getattr(self, name)
                )
        if self.surrogate == "gmpo" and self.ratio != "sequence":
            check.fail("ratio", "'sequence' with surrogate='gmpo', a geometric mean over the sequence", self.ratio)
        if self.kl_ratio_factor and self.kl_estimator == "unbiased":
            check.fail("kl_ratio_factor", "False with kl_estimator='unbiased', which has a ratio of its own", True)
        if not isinstance(self.rollout_correction, RolloutCorrection | None):
            check.fail("rollout_correction", "a RolloutCorrection or None", self.rollout_correction, TypeError)

    def _warn(self, stacklevel: int, luspo: bool = False) -> None:
        if self.ratio == "token" or self.surrogate not in ("clip", "none"):
            return
        if self.aggregation != "seq-mean-token-mean" and not luspo:
            validation.warn_once(
                f"aggregation={self.aggregation!r} weights sequences by their length: with one ratio per sequence that "
                "is LUSPO; GSPO has 'seq-mean-token-mean' (Objective.preset('luspo') if you mean it)",
                stacklevel,
            )
        if self.surrogate == "clip" and max(self.clip_low, self.clip_high) >= TOKEN_WINDOW:
            validation.warn_once(
                f"clip_low={self.clip_low:g}, clip_high={self.clip_high:g} is a window for ratios of tokens: one "
                "normalised by length hardly ever leaves it (GSPO's paper: 3e-4 and 4e-4)",
                stacklevel,
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Objective:
        """A named objective, with any field changed: `Objective.preset("dapo", clip_high=0.3)`.

        Names: gspo, gspo-token, grpo, dapo, bnpo, dr_grpo (give it `length_norm`), luspo, cispo, sapo, gmpo, reinforce.
        What system computes which: docs/parity.md.
        """
        validation.Field("Objective.preset").choice("name", name, tuple(_PRESETS))
        known = {f.name for f in fields(cls)}
        for key in changes:
            validation.Field("Objective.preset").choice("field", key, tuple(sorted(known)))
        values = {**_PRESETS[name], **changes}
        objective = cls.restored(values.get(f.name, f.default) for f in fields(cls))
        objective._check()
        objective._warn(stacklevel=4, luspo=name == "luspo")
        return objective

    @classmethod
    def restored(cls, values: Iterable[Any]) -> Objective:
        """Make an objective of its first fields' values in order, which were checked before."""
        objective = object.__new__(cls)
        remaining = iter(values)
        for f in fields(cls):
            object.__setattr__(objective, f.name, next(remaining, f.default))
        return objective

    def values(self) -> list[Any]:
        """Return, in order, the fields that a kernel reads: all but the last. `restored` is the inverse."""
        # Not dataclasses.astuple: of its copies torch.compile looks at the identity, not at the value.
        return [getattr(self, f.name) for f in fields(self)[:-1]]

    @property
    def ceiling(self) -> float:
        """The bound on the ratio where the advantage is negative: the smaller of dual_clip and delta, or inf."""
        return min((c for c in (self.dual_clip, self.delta) if c is not None), default=math.inf)

    @property
    def log_window(self) -> tuple[float, float]:
        """The window of log-ratios: of tokens for gmpo, else of what `ratio` says."""
        if self.surrogate == "gmpo":
            return -self.clip_low, self.clip_high
        return math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf, math.log1p(self.clip_high)


def _temperature(x: float) -> bool:
    return 1e-30 <= x <= validation.LARGEST  # below, sapo's sigmoid would have a slope at ratios that are not finite
