"""`Objective`, the settings of a loss, and its presets.

The loss of every objective is a sum over the unmasked tokens t of all sequences i:

    sum_it c_it (o_it l(u, A_it) - entropy_coef H_it) + kl_coef sum_it c'_it k(lp_it - ref_it) s

    lp_it   log-prob of the token
    ref_it  log-prob of the token under the reference policy
    u       log-ratio, lp_it minus old log-prob: the mean over the sequence, or for ratio="sequence-product" its sum, or
            for ratio="token" the token's value
    s       ratio, exp(u); in the KL term this factor is present only if kl_ratio_factor=True
    A_it    advantage
    l       surrogate, a function of u and A (for SCORES and "dppo_*" also of lp_it)
    o_it    the caller's token weight
    c_it    the aggregation's weight of the token, divided by `normalizer`
    c'_it   the same weight in the KL term's aggregation, divided by `kl_normalizer`
    H_it    entropy of the token's distribution
    k       KL estimator, a function of lp_it - ref_it (for "unbiased" also of the token's ratio)

In each backend, `surrogates.py` computes l and k, and `sequence.py` the sums and the derivatives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, ParamSpec, TypeVar

from . import validation
from .sampler_mismatch import RolloutCorrection

P = ParamSpec("P")
Result = TypeVar("Result")

RATIOS = ("sequence", "sequence-token", "token", "sequence-product")
SURROGATES = ("clip", "none", "cispo", "sapo", "gmpo", "reinforce", "dppo_tv", "dppo_kl", "vespo", "topr")
SCORES = ("cispo", "reinforce", "vespo", "topr")  # -A log p times a weight, without a gradient through the weight
DIVERGENCES = ("dppo_tv", "dppo_kl")  # surrogates that clip by a divergence of the sampled token, not by its ratio
CLIPPING = ("clip", *DIVERGENCES)  # surrogates that clip whole ratios, with gradient 0 outside the window
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "unbiased")
# A clip window at least this wide is meant for token ratios. A sequence ratio is the exponential of a mean over L
# tokens, so its distance from 1 is about sqrt(L) times smaller than a token ratio's: 30 times at 1,000 tokens. GSPO
# clips at 3e-4, LUSPO at 2e-3.
TOKEN_WINDOW = 0.04
# Bounds of vespo in TRL, Liger and the authors' code: on the log-ratio of a token, and on the sum over the sequence.
VESPO_TOKEN_BOUND = 20.0
_VESPO_WINDOW = (math.log(1e-8), 20.0)
_LARGEST_LOG_WEIGHT = 80.0  # exp(80) is finite in fp32

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
    "dppo_tv": {**_PPO, "surrogate": "dppo_tv", "aggregation": "token-mean"},
    "dppo_kl": {
        "ratio": "token", "surrogate": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "token-mean",
    },
    "vespo": {"ratio": "sequence-product", "surrogate": "vespo", "aggregation": "token-mean"},
    "topr": {"ratio": "sequence-product", "surrogate": "topr", "aggregation": "seq-mean-token-sum"},
}  # fmt: skip  # a table


@dataclass(frozen=True)
class Objective:
    """Settings of a loss: ratio, surrogate, clip window, aggregation, KL term and entropy bonus.

    The defaults are GSPO's (arXiv 2507.18071). The formulas are in the docstring of `gspo_kernels.objective`.

    Args:
        ratio: "sequence" (GSPO: one length-normalized ratio per sequence), "sequence-token" (GSPO-token, eq. 13-14 of
            the paper: the same value, but one gradient per token, for per-token advantages) or "token" (GRPO, PPO).
            "sequence-product": pi(y) / pi_old(y) of the sequence y, the product of its tokens' ratios, not normalized
            by length. It has no gradient here, so it needs one of the surrogates "cispo", "reinforce", "vespo", "topr".
        surrogate: "clip": -min(s A, clip(s) A). "none": -s A. "cispo": -clip(s) A log p, without a gradient through
            the ratio (MiniMax-M1). "sapo": a sigmoid gate instead of a clip (SAPO). "gmpo": -q A, where q is the
            geometric mean of the tokens' bounded ratios (GMPO); needs ratio="sequence". "reinforce": -A log p.
            "dppo_tv", "dppo_kl": -s A, or 0 for tokens outside a trust region (DPPO); these need ratio="token".
            "vespo": -phi(s) A log p, with phi(s) = exp(lambda) s^k exp(-lambda s), a smooth weight with phi(1) = 1
            (VESPO, arXiv 2602.10693); needs ratio="sequence-product". "topr": -A log p where A >= 0, otherwise
            -min(s, 1) A log p (TOPR, arXiv 2503.14286). There is no gradient through phi(s) or min(s, 1).
        clip_low: the ratio is clipped to [1 - clip_low, 1 + clip_high]; 0 <= clip_low < 1. Some surrogates differ.
            "cispo" also accepts clip_low=1, which means no lower bound.
            "gmpo" clips the log-ratio of each token, at clip_high if the advantage is positive and at -clip_low if it
            is negative. It accepts any finite clip_low >= 0.
            "dppo_tv" and "dppo_kl" compare p, the probability of the sampled token, with its old probability q. If the
            advantage is positive, they drop tokens with p > q and a divergence above clip_high. If it is negative, they
            drop tokens with p < q and a divergence above clip_low. The divergence is |p - q| for "dppo_tv", and
            q log(q / p) + (1 - q) log((1 - q) / (1 - p)) for "dppo_kl". clip_low may be any
            value >= 0, including inf.
            "vespo" and "topr" do not read the window. "vespo" bounds the log-ratios of tokens to [-20, 20], and s to
            [1e-8, exp(20)]; sequences with s outside count as clipped. For "topr", tokens with A < 0 and s > 1 count
            as clipped at the upper bound. All of these keep a gradient.
        clip_high: see clip_low; >= 0. For cispo, TRL's epsilon_high bounds the ratio itself, so pass
            clip_high = epsilon_high - 1.
        dual_clip: upper bound > 1 on the ratio where the advantage is negative (arXiv 1912.09729); None: no bound. For
            surrogate="clip", "dppo_tv" and "dppo_kl" only. For the last two, it caps s in both value and
            gradient, whatever the sign of the advantage. Tokens above it keep a gradient (verl's `clip_ratio_c`).
        delta: TRL's option for the same bound (INTELLECT-2); must exceed 1 + clip_high. If dual_clip is also set, the
            smaller of the two applies. For surrogate="clip" only.
        aggregation: weight of a token, before division by the normalizer. "seq-mean-token-mean": 1 / L_i, where L_i is
            the number of unmasked tokens in the token's sequence (GSPO). "token-mean" and "seq-mean-token-sum": 1.
            "seq-mean-token-sum-norm": 1 / length_norm. By default, the normalizer is the number of unmasked tokens for
            "token-mean", and the number of non-empty sequences for all others.
        length_norm: the constant of "seq-mean-token-sum-norm", usually the longest completion allowed, in tokens.
        kl_coef: weight of the KL term against `ref_log_probs`, >= 0.
        kl_estimator: with d = log_prob - ref_log_prob, "k1": d. "k2": d^2 / 2. "k3": exp(-d) + d - 1. "abs": |d|.
            "k1+", "k3+": the values of k1 and k3 with the gradient of k2 (verl). "unbiased": k3 times the token's
            ratio, with the gradient of both factors (DeepSeek-V3.2).
        kl_aggregation: aggregation of the KL term; None: the same as `aggregation`.
        kl_ratio_factor: multiply each token's KL by the objective's ratio s, and differentiate both factors (TRL's
            `use_bias_correction_kl`). For ratio="sequence", s is the ratio of the sequence.
        entropy_coef: the aggregated entropy times this coefficient is subtracted from the loss.
        sapo_temperature_pos: tau in sapo's gate, sigmoid(tau (s - 1)), where the advantage is positive; >= 1e-30.
        sapo_temperature_neg: tau where the advantage is zero or negative; >= 1e-30.
        vespo_k_pos, vespo_lambda_pos: k and lambda of vespo's phi where the advantage is positive or zero. k >= 0,
            lambda >= 1e-4, and the largest value of phi, at s = k / lambda, is at most exp(80). Names as in TRL.
        vespo_k_neg, vespo_lambda_neg: k and lambda where the advantage is negative.
        rollout_correction: a `gspo_kernels.sampler_mismatch.RolloutCorrection`, or a tuple of them. The loss then
            requires old_log_probs and rollout_log_probs, computes importance weights from them, and multiplies the
            policy term by these weights, as it does with token_weights. With a tuple, the weight of a token is the
            product of its weights, so corrections at different levels can be combined. Not with "vespo": there, pass
            the sampler's log-probs as old_log_probs.

    Raises:
        ValueError, TypeError: The message names the field, the expected value and the value received.

    Warns:
        UserWarning: once, for sequence ratios with an aggregation that weights sequences by their length. This loss is
            LUSPO up to a constant factor.
        UserWarning: once, for sequence ratios with a clip_low or clip_high of 0.04 or more, a hundred times GSPO's. A
            ratio normalized by length hardly ever leaves such a window, so almost nothing is clipped.
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
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    rollout_correction: RolloutCorrection | tuple[RolloutCorrection, ...] | None = None
    # All fields except rollout_correction as one string, the form in which operators take an objective. Each instance
    # has its own. ClassVar says that it is not a field.
    text: ClassVar[str]

    def __post_init__(self) -> None:
        self._check()
        self._warn(stacklevel=5)  # the warning names the line that constructs the Objective
        self._write_text()

    def _check(self) -> None:
        check = validation.Checks("Objective")
        check.choice("ratio", self.ratio, RATIOS)
        check.choice("surrogate", self.surrogate, SURROGATES)
        check.choice("aggregation", self.aggregation, AGGREGATIONS)
        check.choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if self.kl_aggregation is not None:
            check.choice("kl_aggregation", self.kl_aggregation, AGGREGATIONS)
        check.boolean("kl_ratio_factor", self.kl_ratio_factor)
        bound = ("a number >= 0, within float32, or inf", lambda x: x >= 0 and validation.valid_bound(x))
        clip_low = {
            "cispo": ("a number >= 0 and <= 1 (1: no lower bound)", lambda x: 0 <= x <= 1),
            "gmpo": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
            **dict.fromkeys(DIVERGENCES, bound),
        }.get(self.surrogate, ("a number >= 0 and < 1", lambda x: 0 <= x < 1))
        numbers = {
            "clip_low": clip_low,
            "clip_high": bound,
            "dual_clip": ("a number > 1, within float32, or None", lambda x: x > 1 and validation.valid_bound(x)),
            "delta": (lambda: f"a number > 1 + clip_high = {1 + self.clip_high:g}, within float32, or None",
                      lambda x: x > 1 + self.clip_high and validation.valid_bound(x)),
            "length_norm": ("a finite number > 0, within float32", validation.positive),
            "kl_coef": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
            "entropy_coef": ("a finite number", lambda x: abs(x) <= validation.LARGEST),
            "sapo_temperature_pos": ("a number >= 1e-30, within float32", _valid_sapo_temperature),
            "sapo_temperature_neg": ("a number >= 1e-30, within float32", _valid_sapo_temperature),
            "vespo_k_pos": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
            "vespo_k_neg": ("a finite number >= 0", lambda x: 0 <= x <= validation.LARGEST),
            "vespo_lambda_pos": ("a finite number >= 1e-4", lambda x: 1e-4 <= x <= validation.LARGEST),
            "vespo_lambda_neg": ("a finite number >= 1e-4", lambda x: 1e-4 <= x <= validation.LARGEST),
        }  # fmt: skip  # a table
        optional = ("dual_clip", "delta", "length_norm")
        for name, (expected, is_valid) in numbers.items():
            if name in optional and getattr(self, name) is None:
                continue
            object.__setattr__(self, name, check.number(name, getattr(self, name), expected, is_valid))
        if self.length_norm is None and "seq-mean-token-sum-norm" in (self.aggregation, self.kl_aggregation):
            check.fail("length_norm", "a number of tokens for seq-mean-token-sum-norm", None)
        for name, readers in {"dual_clip": ("clip", *DIVERGENCES), "delta": ("clip",)}.items():
            if getattr(self, name) is not None and self.surrogate not in readers:
                check.fail(
                    name, f"None with surrogate={self.surrogate!r}, which has no such bound", getattr(self, name)
                )
        if self.surrogate == "gmpo" and self.ratio != "sequence":
            check.fail("ratio", "'sequence' with surrogate='gmpo', a geometric mean over the sequence", self.ratio)
        if self.surrogate in DIVERGENCES and self.ratio != "token":
            check.fail("ratio", f"'token' with surrogate={self.surrogate!r}, which compares tokens", self.ratio)
        if self.ratio == "sequence-product" and self.surrogate not in SCORES:
            expected = f"with ratio='sequence-product', one of {', '.join(map(repr, SCORES))}"
            check.fail("surrogate", f"{expected}, which have no gradient through the ratio", self.surrogate)
        if self.surrogate == "vespo":
            self._check_vespo(check)
        if self.kl_ratio_factor and self.ratio == "sequence-product":
            expected = "False with ratio='sequence-product' (kl_estimator='unbiased' multiplies by the token's ratio)"
            check.fail("kl_ratio_factor", expected, True)
        if self.kl_ratio_factor and self.kl_estimator == "unbiased":
            check.fail("kl_ratio_factor", "False with kl_estimator='unbiased', which already has a ratio factor", True)
        correction = self.rollout_correction
        corrections = correction if isinstance(correction, tuple) and correction else (correction,)
        if correction is not None and not all(isinstance(x, RolloutCorrection) for x in corrections):
            expected = "a RolloutCorrection, a tuple of at least one RolloutCorrection, or None"
            check.fail("rollout_correction", expected, correction, TypeError)

    def _check_vespo(self, check: validation.Checks) -> None:
        if self.ratio != "sequence-product":
            check.fail("ratio", "'sequence-product' with surrogate='vespo'", self.ratio)
        for side in ("pos", "neg"):
            k, rate = getattr(self, f"vespo_k_{side}"), getattr(self, f"vespo_lambda_{side}")
            log_peak = rate + k * (math.log(k / rate) - 1) if k > 0 else rate
            if log_peak > _LARGEST_LOG_WEIGHT:
                expected = f"a value for which phi is at most exp({_LARGEST_LOG_WEIGHT:g}), with lambda = {rate:g}"
                check.fail(f"vespo_k_{side}", expected, k)
        if self.rollout_correction is not None:
            expected = "None with surrogate='vespo' (pass the sampler's log-probs as old_log_probs)"
            check.fail("rollout_correction", expected, self.rollout_correction)

    def _warn(self, stacklevel: int, luspo: bool = False) -> None:
        if self.ratio == "token" or self.surrogate not in ("clip", "none"):
            return
        # A copy of the preset, made by `dataclasses.replace`, still has the preset's window and aggregation.
        luspo |= {name: getattr(self, name) for name in _PRESETS["luspo"]} == _PRESETS["luspo"]
        if self.aggregation != "seq-mean-token-mean" and not luspo:
            validation.warn_once(
                f"aggregation={self.aggregation!r} weights sequences by their length. With one ratio per sequence, "
                "that loss is LUSPO's. For GSPO use 'seq-mean-token-mean', for LUSPO Objective.preset('luspo')",
                stacklevel,
            )
        if self.surrogate == "clip" and max(self.clip_low, self.clip_high) >= TOKEN_WINDOW:
            validation.warn_once(
                f"clip_low={self.clip_low:g}, clip_high={self.clip_high:g} is a window for token ratios. A ratio "
                "normalized by length hardly ever leaves it (GSPO's paper: 3e-4 and 4e-4)",
                stacklevel,
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Objective:
        """Return a named objective, optionally with changed fields: `Objective.preset("dapo", clip_high=0.3)`.

        Names: gspo, gspo-token, grpo, dapo, bnpo, dr_grpo (which needs `length_norm`), luspo, cispo, sapo, gmpo,
        reinforce, dppo_tv, dppo_kl, vespo, topr. docs/parity.md lists the objectives of each trainer.
        """
        validation.Checks("Objective.preset").choice("name", name, tuple(_PRESETS))
        known = {f.name for f in fields(cls)}
        for key in changes:
            validation.Checks("Objective.preset").choice("field", key, tuple(sorted(known)))
        values = {**_PRESETS[name], **changes}
        objective = cls._made_of(values)
        objective._check()
        objective._warn(stacklevel=4, luspo=name == "luspo")
        objective._write_text()
        return objective

    def without(self, *terms: str) -> Objective:
        """Return a copy of the objective without some of its terms. Unlike `dataclasses.replace`, it never warns.

        Args:
            terms: coefficients to set to 0, "kl_coef" or "entropy_coef".
        """
        for term in terms:
            validation.Checks("Objective.without").choice("term", term, ("kl_coef", "entropy_coef"))
        objective = self._made_of({f.name: getattr(self, f.name) for f in fields(self)} | dict.fromkeys(terms, 0.0))
        objective._write_text()
        return objective

    @classmethod
    def _made_of(cls, values: dict[str, Any]) -> Objective:
        """Set the fields, without checks, warnings and `text`."""
        objective = object.__new__(cls)
        for f in fields(objective):  # torch.compile cannot trace the fields of a class
            object.__setattr__(objective, f.name, values.get(f.name, f.default))
        return objective

    def _write_text(self) -> None:
        # torch.compile can trace neither json.dumps nor a cached property.
        object.__setattr__(self, "text", ";".join([repr(getattr(self, f.name)) for f in fields(self)[:-1]]))

    @classmethod
    def from_text(cls, text: str) -> Objective:
        """Rebuild an objective from its `text`, without a rollout correction and without checks."""
        return _from_text(text)

    @functools.cached_property
    def ceiling(self) -> float:
        """Upper bound on the ratio: the smaller of dual_clip and delta, or inf without both."""
        return min((c for c in (self.dual_clip, self.delta) if c is not None), default=math.inf)

    @functools.cached_property
    def log_window(self) -> tuple[float, float]:
        """Bounds (low, high) on log-ratios. For gmpo they apply to tokens, otherwise to what `ratio` selects."""
        if self.surrogate == "vespo":
            return _VESPO_WINDOW
        if self.surrogate == "gmpo":
            return -self.clip_low, self.clip_high
        return math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf, math.log1p(self.clip_high)


_CONSTANTS = {"None": None, "True": True, "False": False}


@functools.lru_cache(maxsize=256)
def _from_text(text: str) -> Objective:
    objective = object.__new__(Objective)
    values = [_CONSTANTS[x] if x in _CONSTANTS else x[1:-1] if x[0] == "'" else float(x) for x in text.split(";")]
    for f, value in zip(fields(Objective), [*values, None], strict=True):
        object.__setattr__(objective, f.name, value)
    object.__setattr__(objective, "text", text)
    return objective


def _valid_sapo_temperature(x: float) -> bool:
    # The backends cut log-ratios off at 80 for sapo. With a temperature below 1e-30, the sigmoid would not be flat
    # there, and the cut-off would change the loss.
    return 1e-30 <= x <= validation.LARGEST


_FIELDS = frozenset(f.name for f in fields(Objective))


def names_misplaced_fields(loss: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate a loss: a field of `Objective` as keyword argument raises an error that says where it belongs."""

    @functools.wraps(loss)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Result:
        for name, value in kwargs.items():
            if name in _FIELDS:
                place = f"a field of the objective, objective=Objective({name}=...)"
                validation.Checks(loss.__name__).fail(name, place, value, TypeError)
        return loss(*args, **kwargs)

    return checked
