"""Read the settings of the GRPO trainers of TRL and ms-swift. Both have the same loss types."""

from __future__ import annotations

import importlib.metadata
import math
import shlex
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from gspo_kernels.sampler_mismatch import RolloutCorrection
from gspo_kernels.validation import Field

from . import tables
from .keys import ABOVE_ONE, NOT_NEGATIVE, POSITIVE, Keys, Normalizer, Reading, Step, from_flags


class _Loss(NamedTuple):
    """Fields of the Objective and the Normalizer that a loss type selects."""

    surrogate: str
    aggregation: str
    of: str = "rows"
    over: str = "micro-batch"


_LOSSES = {  # by loss_type
    "grpo": _Loss("clip", "seq-mean-token-mean"),
    "bnpo": _Loss("clip", "token-mean", "tokens"),
    "dapo": _Loss("clip", "token-mean", "tokens", "rollout"),
    "dr_grpo": _Loss("clip", "seq-mean-token-sum-norm"),
    "luspo": _Loss("clip", "seq-mean-token-sum"),
    "cispo": _Loss("cispo", "token-mean", "tokens", "rollout"),
    "sapo": _Loss("sapo", "seq-mean-token-mean"),
}
_GMPO = _Loss("gmpo", "seq-mean-token-mean")
_LEVELS = {"token": "token", "sequence": "sequence", "sequence_token": "sequence-token"}
_SCALES = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none"}
_MODES = {f"{level}_{mode}": (level, mode) for level in ("token", "sequence") for mode in ("truncate", "mask")}


def from_trl(config: Any) -> Reading:
    """Read the `GRPOConfig` of TRL 0.29 to 1.16, or the `GMPOConfig` of `trl.experimental.gmpo`.

    The settings mean what they mean in the installed release of TRL.

    Raises:
        TypeError: `config` is not a dataclass instance.
        ValueError: no Objective can express a field, or this reader does not know the field. The message names it.
    """
    if not is_dataclass(config):
        Field("from_trl").fail("config", "a GRPOConfig", config, TypeError)
    keys = Keys("from_trl", config, tables.TRL, tables.TRL_OTHERS | tables.training_arguments())
    release = tuple(int(n) for n in importlib.metadata.version("trl").split(".")[:2])
    gmpo = any(c.__name__ == "GMPOConfig" for c in type(config).__mro__)
    loss = _GMPO if gmpo else keys.choice("loss_type", _LOSSES)
    fields = _policy(keys, loss, "sapo_temperature_pos", "sapo_temperature_neg")
    keys.must("top_entropy_quantile", 1.0, why="a loss of the tokens with the highest entropy only is not supported")
    if release < (1, 14) and keys.get("use_liger_kernel", False):
        keys.refuse("use_liger_kernel", "False before TRL 1.14, where it selects Liger's loss")
    beside = keys.beside("mask_truncated_completions", "router_aux_loss_coef", "reward_weights")
    beta = keys.number("beta", NOT_NEGATIVE)
    if beta:
        fields |= {"kl_coef": beta, "kl_ratio_factor": not gmpo and keys.flag("use_bias_correction_kl")}
        beside |= _moving_reference(keys)
    token_weights = () if gmpo else _weights(keys, loss, fields)
    luspo = loss is _LOSSES["luspo"]
    if luspo and release < (1, 10) and (beta or fields["ratio"] == "token" or fields.get("rollout_correction")):
        keys.refuse(
            "loss_type",
            "another one before TRL 1.10, whose luspo counts padding if there are a KL term, a sampler correction or "
            "token-level ratios",
        )
    times = keys.count("gradient_accumulation_steps")
    if loss.over == "rollout":
        times = times / keys.count("steps_per_generation") if release >= (1, 10) else 1.0
    keys.must(
        "multi_objective_aggregation",
        "sum_then_normalize",
        why="normalising each reward separately is not supported",
    )
    scale = keys.choice("scale_rewards", _SCALES)
    group = Step("group_advantages", {"group_size": keys.count("num_generations"), "scale": scale, "eps": 1e-4})
    return keys.reading(
        fields,
        Normalizer(loss.of, loss.over, times),
        luspo=luspo and fields["ratio"] == "sequence",
        temperature=keys.number("temperature", POSITIVE),
        advantages=(group,),
        token_weights=token_weights,
        beside=beside,
    )


def _weights(keys: Keys, loss: _Loss, fields: dict[str, Any]) -> tuple[Step, ...]:
    """Add the entropy bonus and the sampler correction to `fields`. Return the steps of the off-policy mask.

    TRL's GMPO trainer has no entropy bonus, no sampler correction and no off-policy mask.
    """
    keys.must("use_adaptive_entropy", False, why="the entropy coefficient of an Objective is constant")
    fields["entropy_coef"] = keys.number("entropy_coef")
    if fields["entropy_coef"] and loss is not _LOSSES["bnpo"]:
        keys.refuse("entropy_coef", "0 unless loss_type is 'bnpo' (TRL's bonus is a mean over a micro-batch's tokens)")
    sampler = keys.get("use_vllm", False) and keys.flag("vllm_importance_sampling_correction")
    if sampler:
        level, mode = keys.choice("vllm_importance_sampling_mode", _MODES)
        high = keys.optional("vllm_importance_sampling_cap", NOT_NEGATIVE)  # the name until TRL 1.6
        if "vllm_importance_sampling_clip_max" in keys:
            high = keys.optional("vllm_importance_sampling_clip_max", NOT_NEGATIVE)
        low = keys.optional("vllm_importance_sampling_clip_min", NOT_NEGATIVE)
        fields["rollout_correction"] = RolloutCorrection(level, mode, low or 0.0, math.inf if high is None else high)
    threshold = keys.optional("off_policy_mask_threshold", NOT_NEGATIVE)
    if threshold is None:
        return ()
    compared = "rollout_log_probs" if sampler else "old_log_probs"
    return (Step("off_policy_mask", {"threshold": threshold, "rollout_log_probs": compared}),)


def from_ms_swift(arguments: Any) -> Reading:
    """Read the GRPO arguments of ms-swift 4.6.

    Args:
        arguments: the flags of `swift rlhf` as a string or a list, a mapping, or ms-swift's arguments object.

    Raises:
        TypeError: `arguments` has another type.
        ValueError: no Objective can express an argument, or this reader does not know the argument. The message names
            it.
    """
    if isinstance(arguments, str):
        arguments = shlex.split(arguments)
    if isinstance(arguments, Sequence):
        arguments = {"rlhf_type": "dpo", **from_flags(Field("from_ms_swift"), arguments)}  # ms-swift's default
    other_names = tables.SWIFT_OTHERS | tables.training_arguments()
    if is_dataclass(arguments):  # the class inherits all of TRL's fields, but ms-swift reads only those in SWIFT
        other_names = other_names | tables.TRL.keys() | tables.TRL_OTHERS
    keys = Keys("from_ms_swift", arguments, tables.SWIFT, other_names)
    keys.must("rlhf_type", "grpo", why="GSPO is a setting of ms-swift's GRPO trainer; the default is dpo")
    losses = {name: loss for name, loss in _LOSSES.items() if name != "luspo"}
    loss = keys.choice("loss_type", {**losses, None: losses["grpo"]})
    fields = _policy(keys, loss, "tau_pos", "tau_neg")
    keys.must("top_entropy_quantile", 1.0, why="a loss of the tokens with the highest entropy only is not supported")
    keys.must("use_liger_kernel", False, why="it selects Liger's loss")
    for name in ("teacher_model", "teacher_model_server", "advantage_reweight"):
        keys.must(name, None, why="advantages from a teacher are not supported")
    keys.must("sdar_loss_coef", 0.0, why="a loss term from a teacher is not supported")
    keys.must("chord_sft_dataset", None, [], why="a loss term from supervised answers is not supported")
    beside = keys.beside("overlong_filter", "off_policy_sequence_mask_delta", "loss_scale", "router_aux_loss_coef")
    beside |= keys.beside("reward_weights")
    estimator, advantages = _swift_advantages(keys)
    beta = 0.04 if keys.get("beta") is None else keys.number("beta", NOT_NEGATIVE)
    if beta:
        beside |= keys.beside("ref_model", "ref_adapters") | _moving_reference(keys)
        if keys.choice("kl_in_reward", {None: estimator != "grpo", True: True, False: False}):
            advantages = [Step("subtract_kl", {"kl_coef": beta, "kl_estimator": "k1"}), *advantages]
        else:
            fields["kl_coef"] = beta
    if keys.flag("use_vllm", False) and keys.get("rollout_importance_sampling_mode") is not None:
        if fields.get("kl_coef"):
            keys.refuse("rollout_importance_sampling_mode", "None with a KL term, which ms-swift multiplies by them")
        # sequence_mask is not supported: ms-swift weights each token of the kept answers separately.
        modes = {n: m for n, m in _MODES.items() if m[0] == "token"} | {"sequence_truncate": ("geometric", "truncate")}
        level, mode = keys.choice("rollout_importance_sampling_mode", modes)
        high = keys.number("rollout_importance_sampling_threshold", POSITIVE)
        fields["rollout_correction"] = RolloutCorrection(level, mode, high=high)
    times = 1.0 if loss.over == "rollout" else keys.count("gradient_accumulation_steps", 1)
    return keys.reading(
        fields,
        Normalizer(loss.of, loss.over, times),
        temperature=keys.number("temperature", POSITIVE),
        advantages=tuple(advantages),
        beside=beside,
    )


def _swift_advantages(keys: Keys) -> tuple[str, list[Step]]:
    """Return the name of the advantage estimator, and the steps that compute the advantages."""
    default_scales = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
    estimator = keys.choice("advantage_estimator", {name: name for name in default_scales})
    scale = keys.choice("scale_rewards", {**_SCALES, None: default_scales[estimator]})
    options = {"group_size": keys.count("num_generations", 8), "scale": scale, "eps": 1e-4}
    if estimator == "rloo":
        options["baseline"] = "leave-one-out"
    if (estimator, scale) != ("reinforce_plus_plus", "batch"):
        return estimator, [Step("group_advantages", options)]
    # ms-swift takes the batch's standard deviation after subtracting the group means.
    normalise = Step("normalize_rewards", {"by": "batch", "shift": False, "eps": 1e-4})
    return estimator, [Step("group_advantages", {**options, "scale": "none"}), normalise]


def _policy(keys: Keys, loss: _Loss, positive: str, negative: str) -> dict[str, Any]:
    """Return the fields of the Objective that set the policy term.

    Args:
        positive, negative: the names of the two settings with SAPO's temperatures.
    """
    fields: dict[str, Any] = {"surrogate": loss.surrogate, "aggregation": loss.aggregation}
    if loss.surrogate != "gmpo":
        fields["ratio"] = keys.choice("importance_sampling_level", _LEVELS)
    if loss.aggregation == "seq-mean-token-sum-norm":
        fields["length_norm"] = keys.count("max_completion_length", 512)
    if loss.surrogate == "sapo":
        return fields | {
            "sapo_temperature_pos": keys.number(positive, POSITIVE),
            "sapo_temperature_neg": keys.number(negative, POSITIVE),
        }
    high = keys.optional("epsilon_high", NOT_NEGATIVE)
    if loss.surrogate != "cispo" or high is None:
        low = keys.number("epsilon", NOT_NEGATIVE)
        high = low if high is None else high
        fields |= {"clip_low": low, "clip_high": high}
    if loss.surrogate == "clip":
        fields["delta"] = keys.optional("delta", ABOVE_ONE)
    if loss.surrogate == "cispo":
        if high < 1:
            keys.refuse("epsilon_high", "at least 1 with cispo, where it bounds the ratio itself (MiniMax-M1: 5.0)")
        fields |= {"clip_low": 1.0, "clip_high": high - 1}
    return fields


def _moving_reference(keys: Keys) -> dict[str, Any]:
    """Return the settings of a reference model that is updated during training, for `Reading.beside`."""
    names = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    return {name: keys.get(name) for name in names} if keys.beside("sync_ref_model") else {}
