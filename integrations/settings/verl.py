"""Read verl's settings of the actor and of the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_kernels.objective import AGGREGATIONS
from gspo_kernels.sampler_mismatch import RolloutCorrection
from gspo_kernels.validation import Field, Unquoted

from . import tables
from .keys import ABOVE_ONE, NOT_NEGATIVE, POSITIVE, Keys, Normalizer, Reading, Step, as_number

_LOSSES: dict[str, dict[str, Any]] = {  # by loss_mode; loss_agg_mode sets an aggregation that is missing here
    "gspo": {"ratio": "sequence-token"},
    "gspo_kernels": {"ratio": "sequence-token"},  # the policy loss of integrations/verl.py
    "vanilla": {"ratio": "token"},
    "cispo": {"ratio": "token", "surrogate": "cispo"},
    "sapo": {"ratio": "token", "surrogate": "sapo", "aggregation": "seq-mean-token-mean"},
    "geo_mean": {"surrogate": "gmpo", "aggregation": "seq-mean-token-mean"},
    "gpg": {"ratio": "token", "surrogate": "reinforce"},
}
_BYPASS = {"ppo_clip": ("vanilla", "rollout"), "reinforce": ("gpg", "current")}  # loss_mode, Reading.old_log_probs
_AGGREGATIONS = {**{name: name for name in AGGREGATIONS}, "token-sum": "token-mean"}
_DIVISORS = {"token-mean": Normalizer("tokens", "step"), "token-sum": Normalizer("one", "step")}
_ROWS = Normalizer("rows", "step")
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL |= {"kl+": "k1+", "k1+": "k1+", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k3+", "k3+": "k3+"}


def from_verl(actor: Any, algorithm: Any = None) -> Reading:
    """Read the settings of verl 0.9.1.

    Args:
        actor: an `ActorConfig`, or `actor_rollout_ref.actor` as an OmegaConf or a dict.
        algorithm: the section `algorithm` of the same configuration. It sets the advantages and the rollout correction.
            With rollout_correction.bypass_mode, verl replaces the loss that `actor` selects. This reader does the same.

    Returns:
        A Reading without a temperature. verl's temperature is in `actor_rollout_ref.rollout.temperature`.

    Raises:
        TypeError: an argument is neither a mapping nor a dataclass instance.
        ValueError: no Objective can express a setting, or this reader does not know the setting. The message names it.
    """
    # verl's dataclasses are mappings that do not support `in`, so list their keys.
    if isinstance(actor, Mapping) and "actor_rollout_ref" in list(actor):
        got = Unquoted("the entire configuration")
        expected = "the section actor_rollout_ref.actor (and algorithm the section algorithm)"
        Field("from_verl").fail("actor", expected, got)
    sections = {"algorithm": algorithm}
    keys = Keys("from_verl", actor, tables.VERL, tables.VERL_OTHERS, tables.VERL_SECTIONS, sections)
    correction = "algorithm.rollout_correction"
    bypass, mode = keys.flag(f"{correction}.bypass_mode"), "policy_loss.loss_mode"
    if not bypass and keys.get(mode) == "bypass_mode":
        if algorithm is not None:
            keys.refuse(mode, f"another one unless {correction}.bypass_mode is true, which makes verl set this mode")
        bypass, correction = True, "policy_loss.rollout_correction"
    if bypass:
        name, old = keys.choice(f"{correction}.loss_type", _BYPASS)
    else:
        name, old = keys.choice(mode, {name: name for name in _LOSSES}), "trainer"
    fields = dict(_LOSSES[name])
    if name in ("gspo", "gspo_kernels", "vanilla", "cispo", "geo_mean"):
        for side in ("low", "high"):
            bound = keys.optional(f"clip_ratio_{side}", NOT_NEGATIVE)
            fields[f"clip_{side}"] = keys.number("clip_ratio", NOT_NEGATIVE) if bound is None else bound
    if name == "vanilla":
        fields["dual_clip"] = keys.number("clip_ratio_c", ABOVE_ONE)
    if name == "sapo":
        fields |= {f"sapo_temperature_{side}": keys.number(f"tau_{side}", POSITIVE) for side in ("pos", "neg")}
    normalizer, kl_normalizer = _divisors(keys, name, fields)
    # In bypass mode, the ratio of "ppo_clip" has the sampler's log-probs as old ones and needs no correction.
    if (bypass and old == "current") or not bypass:
        fields["rollout_correction"] = _correction(keys, correction, name)
    rejected = keys.beside(f"{correction}.rollout_rs")
    return keys.reading(
        fields,
        normalizer,
        kl_normalizer=kl_normalizer,
        old_log_probs=old,
        advantages=None if algorithm is None else _advantages(keys),
        beside=rejected | keys.beside(f"{correction}.rollout_rs_threshold") if rejected else {},
    )


def _divisors(keys: Keys, name: str, fields: dict[str, Any]) -> tuple[Normalizer, Normalizer | None]:
    """Add aggregation, KL term and entropy bonus to `fields`. Return the normalizers of policy term and KL term."""
    bonus = fields["entropy_coef"] = keys.number("entropy_coeff")
    kl, fixed_aggregation = keys.flag("use_kl_loss"), fields.get("aggregation")
    if kl:
        fields["kl_coef"] = keys.number("kl_loss_coef", NOT_NEGATIVE)
        fields["kl_estimator"] = keys.choice("kl_loss_type", _KL)
    normalizer = Normalizer("rows", "micro-batch") if name == "geo_mean" else _ROWS
    if fixed_aggregation is not None and not kl and not bonus:
        return normalizer, None  # for these losses, verl does not read loss_agg_mode
    aggregation = keys.choice("loss_agg_mode", _AGGREGATIONS)
    if aggregation == "seq-mean-token-sum-norm":
        if keys.get("loss_scale_factor") is None:
            keys.refuse("loss_scale_factor", "a number of tokens (without it verl uses each batch's padded length)")
        fields["length_norm"] = keys.number("loss_scale_factor", POSITIVE)
    divisor = _DIVISORS.get(keys.get("loss_agg_mode"), _ROWS)
    if fixed_aggregation is None:
        fields["aggregation"] = aggregation
        return divisor, None
    if (fixed_aggregation, normalizer) == (aggregation, divisor):
        return normalizer, None
    if bonus:
        keys.refuse("entropy_coeff", f"0 with {name}, where bonus and policy term have different aggregations")
    fields["kl_aggregation"] = aggregation
    return normalizer, divisor if fields["kl_coef"] else None


def _correction(keys: Keys, section: str, name: str) -> RolloutCorrection | None:
    """Return the sampler correction that the section's `rollout_is` sets for the loss `name`, or None if it is off."""
    level = keys.choice(f"{section}.rollout_is", {None: None, "token": "token", "sequence": "sequence"})
    threshold = f"{section}.rollout_is_threshold"
    if level is None or keys.get(threshold) is None:
        return None
    if name == "geo_mean" and level == "token":
        expected = "'sequence' or None with geo_mean, which takes the geometric mean of token weights"
        keys.refuse(f"{section}.rollout_is", expected)
    keys.must(f"{section}.rollout_is_batch_normalize", False, why="weights divided by their mean are not supported")
    bounds = [as_number(bound) for bound in str(keys.get(threshold)).split("_")]
    if len(bounds) > 2 or not all(isinstance(bound, float) and bound > 0 for bound in bounds):
        keys.refuse(threshold, "a number > 0, or a string 'low_high' of two such numbers")
    low, high = bounds if len(bounds) == 2 else (0.0, bounds[0])
    return RolloutCorrection(level, "mask" if len(bounds) == 2 else "truncate", low, high)


def _advantages(keys: Keys) -> tuple[Step, ...]:
    """Return the steps from rewards to advantages."""
    by_prompt = {"group_ids": "of the prompts", "scale": "none"}
    table = {
        "grpo": [Step("group_advantages", {**by_prompt, "scale": "group", "eps": 1e-6})],
        "rloo": [Step("group_advantages", {**by_prompt, "baseline": "leave-one-out"})],
        "reinforce_plus_plus_baseline": [Step("group_advantages", by_prompt), Step("whiten", {})],
        "reinforce_plus_plus": [Step("token_returns", {}), Step("whiten", {})],
    }
    steps = keys.choice("algorithm.adv_estimator", table)
    estimator = keys.get("algorithm.adv_estimator")
    if estimator == "grpo" and not keys.flag("algorithm.norm_adv_by_std_in_grpo"):
        steps = [Step("group_advantages", by_prompt)]
    if estimator == "reinforce_plus_plus":
        keys.must("algorithm.gamma", 1.0, why="verl's discount skips masked tokens, but token_returns counts them")
    if keys.flag("algorithm.use_kl_in_reward"):
        keys.must("algorithm.kl_ctrl.type", "fixed", why="an adaptive coefficient is not supported")
        coefficient = keys.number("algorithm.kl_ctrl.kl_coef", NOT_NEGATIVE)
        kind = keys.choice("algorithm.kl_penalty", _KL).removesuffix("+")
        if estimator == "reinforce_plus_plus":
            steps[0] = Step("token_returns", {"kl": f"{kind}, old against reference", "kl_coef": coefficient})
        else:
            steps = [Step("subtract_kl", {"kl_coef": coefficient, "kl_estimator": kind}), *steps]
    return tuple(steps)
