"""Read the settings of ROLL's RLVR pipeline, as of July 2026 and with the keys of earlier versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_kernels.extras import needs
from gspo_kernels.objective import AGGREGATIONS
from gspo_kernels.sampler_mismatch import RolloutCorrection
from gspo_kernels.validation import Checks, Unquoted

from .keys import NOT_NEGATIVE, POSITIVE, Keys, Reading, Step

_WORKER = "roll.pipeline.rlvr.actor_worker.ActorWorker"
_TERMS = ("postive_loss_coef", "use_topr_neg_loss_coef", "sft_loss_coef", "use_topr_loss", "is_pure_opd", "use_opd")
_NORMALIZERS = {"token-mean": "tokens", "seq-mean-token-sum-norm": "one"}  # by loss_agg_mode; otherwise "sequences"

LOSS_DEFAULTS: dict[str, Any] = {
    "importance_sampling": "token", "loss_agg_mode": None, "pg_clip": 0.2, "use_pg_clip_range": False,
    "pg_clip_low": 0.2, "pg_clip_high": 0.2, "dual_clip_loss": False, "use_kl_loss": False, "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0, "rl_loss_coef": 1.0, "postive_loss_coef": 0.0, "use_topr_neg_loss_coef": 0.0,
    "sft_loss_coef": 0.0, "use_topr_loss": False, "use_policy_loss_type": "PPO", "actor_train.worker_cls": None,
    "actor_train.apply_loss_scale": True,
    "adv_estimator": "gae", "gamma": 1.0, "norm_mean_type": None, "norm_std_type": None, "reward_norm": None,
    "reward_shift": False, "reward_scale": False, "reward_clip": None, "whiten_rewards": False,
    "whiten_advantages": False, "advantage_clip": None, "add_token_level_kl": False, "kl_penalty": "kl",
    "init_kl_coef": 0.2, "target_kl": None, "is_pure_opd": False, "use_opd": False,
    "use_reward_scaling": False, "use_reward_norm": False, "add_len_reward": False, "difficulty_loss_weight": False,
    "length_loss_weight": False, "max_len_mask": False, "difficulty_mask": False, "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0, "error_max_len_clip": False, "error_max_len_threshold": 9999999999,
    "mask_type": "loss", "defaults": None, "train_infer_correction.filters": None,
    "train_infer_correction.is_weight.enabled": False, "train_infer_correction.is_weight.weight_type": "token",
    "train_infer_correction.is_weight.upper_bound": 1.2, "train_infer_correction.is_weight.detach": True,
}  # fmt: skip  # a table
SECTIONS = ("actor_train", "train_infer_correction", "train_infer_correction.is_weight")
OTHER_NAMES = frozenset(
    """
    actor_infer actor_train.backend_timeout actor_train.data_args actor_train.device_mapping
    actor_train.generating_args actor_train.infer_batch_size actor_train.logits_in_fp32 actor_train.max_concurrency
    actor_train.max_tokens_per_microbatch_in_infer actor_train.max_tokens_per_microbatch_in_train
    actor_train.model_args actor_train.model_update_frequency actor_train.name actor_train.num_gpus_per_worker
    actor_train.offload_nccl actor_train.sequence_length_round_in_infer actor_train.sequence_length_round_in_train
    actor_train.sequence_packing_args actor_train.strategy_args actor_train.system_envs
    actor_train.topr_negative_weight actor_train.topr_positive_weight actor_train.training_args
    actor_train.use_dynamic_batching_in_infer actor_train.use_dynamic_batching_in_train
    actor_train.use_sequence_packing actor_train.world_size async_generation_ratio balance_length base_dir
    checkpoint_config critic critic_warmup dataset_filter enable_old_logprobs_recompute enable_reference eval_steps
    exp_name force_disable_old_logprobs_recompute generate_opt_level global_template hydra
    is_num_return_sequences_expand is_offload_optimizer_states_in_train_step is_offload_states
    is_use_additional_prompts kl_horizon l2 lambd length_profiler_dir local_rank logging_dir logging_steps
    max_additional_running_prompts max_ckpt_to_keep max_grad_norm max_running_requests max_steps
    minibatch_data_iter_num model_download_type model_update_buffer_size_mb num_gpus_per_node num_nodes
    num_return_sequences_in_group output_dir ppo_epochs pretrain profiler_memory profiler_output_dir profiler_timeline
    prompt_length reference report_length_and_rewards response_length resume_from_checkpoint reward reward_model
    reward_pretrain rewards rollout_batch_size rollout_dump_dir rollout_mock router_args rpc_timeout
    save_logging_board_dir save_steps seed sequence_length system_envs track_with tracker_kwargs
    user_defined_rollout_loop_cls val_batch_size val_greedy val_n_sample val_prompt_length val_sequence_length
    validation value_clip vlm_filter actor_train.pg_variant opd_kl_coef pg_variant
    """.split()
)


def from_roll(settings: Mapping[str, Any] | str | Path) -> Reading:
    """Read the settings of ROLL's RLVR pipeline.

    Args:
        settings: a mapping, or the path of a YAML file. Files under the key `defaults` are not read; their names are in
            `Reading.beside`.

    Raises:
        TypeError: `settings` has another type.
        ValueError: no Objective can express a setting, or this reader does not know the setting. The message names its
            key.
    """
    if isinstance(settings, str | Path):
        if "\n" in str(settings):
            Checks("from_roll").fail(
                "settings", "a mapping or the path of a YAML file", Unquoted("several lines of text")
            )
        with needs("from_roll, to read a YAML file,", "cli", "yaml"):
            import yaml
        settings = yaml.safe_load(Path(settings).read_text(encoding="utf-8"))
    keys = Keys("from_roll", settings, LOSS_DEFAULTS, OTHER_NAMES, SECTIONS)
    keys.must("actor_train.worker_cls", None, _WORKER, why="the losses of ActorPGWorker are not supported")
    keys.must("use_policy_loss_type", "PPO", why="ROLL's other policy gradients are not supported")
    keys.must("rl_loss_coef", 1.0, why="multiply the loss by this factor yourself")
    for name in _TERMS:
        keys.must(name, 0, why="this loss term is not supported")
    keys.must("actor_train.apply_loss_scale", True, why="without it the number of micro-batches divides the loss again")
    if "loss_agg_mode" not in keys:
        keys.refuse("loss_agg_mode", "given (its default in ROLL has changed twice)")
    aggregation = keys.choice("loss_agg_mode", {name: name for name in AGGREGATIONS})
    fields: dict[str, Any] = {
        "ratio": keys.choice("importance_sampling", {"seq": "sequence", "token": "token"}),
        "aggregation": aggregation,
        "entropy_coef": keys.number("entropy_loss_coef", NOT_NEGATIVE),
    }
    if aggregation == "seq-mean-token-sum-norm":
        fields["length_norm"] = _padded_length(keys)
    low, high = ("pg_clip_low", "pg_clip_high") if keys.flag("use_pg_clip_range") else ("pg_clip", "pg_clip")
    fields |= {"clip_low": keys.number(low, NOT_NEGATIVE), "clip_high": keys.number(high, NOT_NEGATIVE)}
    if keys.flag("dual_clip_loss"):
        fields["dual_clip"] = 1 + 2 * keys.number("pg_clip", POSITIVE)  # ROLL reads pg_clip in any case
    if keys.flag("use_kl_loss"):
        fields["kl_coef"] = keys.number("kl_loss_coef", NOT_NEGATIVE)
    if keys.flag("train_infer_correction.is_weight.enabled"):
        kinds = {"token": "token", "geometric": "geometric", "sequence": "sequence"}
        level = keys.choice("train_infer_correction.is_weight.weight_type", kinds)
        high = keys.optional("train_infer_correction.is_weight.upper_bound", NOT_NEGATIVE)
        keys.must("train_infer_correction.is_weight.detach", True, why="our weights have no gradient")
        fields["rollout_correction"] = RolloutCorrection(level, high=math.inf if high is None else high)
    masks = keys.beside("max_len_mask", "difficulty_mask", "error_max_len_clip", "train_infer_correction.filters")
    if masks:
        thresholds = ("difficulty_low_threshold", "difficulty_high_threshold", "error_max_len_threshold", "mask_type")
        masks |= {name: keys.get(name) for name in thresholds}
    shaping = ("use_reward_scaling", "use_reward_norm", "add_len_reward")
    beside = masks | keys.beside("defaults", "difficulty_loss_weight", "length_loss_weight", *shaping)
    return keys.reading(
        fields,
        _NORMALIZERS.get(aggregation, "sequences"),
        temperature=1.0,
        beside=beside,
        advantages=tuple(_roll_advantages(keys)),
    )


def _padded_length(keys: Keys) -> int:
    """Width of ROLL's mask: the padded length of prompt and answer, minus one."""
    if keys.get("sequence_length") is not None:
        return keys.count("sequence_length") - 1
    if keys.get("response_length") is None:
        keys.refuse("response_length", "given with 'seq-mean-token-sum-norm', which divides by padded lengths")
    return keys.count("prompt_length", 1024) + keys.count("response_length") - 1


def _roll_advantages(keys: Keys) -> list[Step]:
    """Read the steps from rewards to advantages."""
    estimator = keys.choice("adv_estimator", {"reinforce": "reinforce", "grpo": "grpo"})
    keys.must("whiten_rewards", False, why="token_returns does not whiten rewards")
    steps = [_normalized(keys, "group", "group") if estimator == "grpo" else _roll_normalization(keys)]
    bound = keys.optional("reward_clip", POSITIVE)
    returns: dict[str, Any] = {"gamma": keys.number("gamma", NOT_NEGATIVE)}
    if bound is not None:
        steps.append(_clamp(bound))
        returns["reward_clip"] = bound
    if keys.flag("add_token_level_kl"):
        keys.must("target_kl", None, why="an adaptive coefficient is not supported")
        estimators = {"kl": "k1", "abs": "abs", "mse": "k2"}
        returns["kl"] = f"{keys.choice('kl_penalty', estimators)}, old against reference"
        returns["kl_coef"] = keys.number("init_kl_coef", NOT_NEGATIVE)
    steps.append(Step("token_returns", returns))
    if keys.flag("whiten_advantages"):
        steps.append(Step("whiten", {}))
    bound = keys.optional("advantage_clip", POSITIVE)
    if bound is not None:
        steps.append(_clamp(bound))
    return [step for step in steps if step is not None]


def _roll_normalization(keys: Keys) -> Step | None:
    """Read the step of reward_norm, or of norm_mean_type and norm_std_type. None if all are off."""
    kinds = {name: name for name in ("batch", "group", "running", None)}
    by, mean, deviation = (keys.choice(name, kinds) for name in ("reward_norm", "norm_mean_type", "norm_std_type"))
    if by is None:
        return _normalized(keys, mean, deviation)
    if mean is not None or deviation is not None:
        keys.refuse("reward_norm", "None together with norm_mean_type and norm_std_type, which replace it")
    shift = keys.flag("reward_shift")
    scale = by == "running" and keys.flag("reward_scale")  # ROLL reads reward_scale only for "running"
    if shift and scale:
        keys.refuse("reward_shift", "False together with reward_scale")
    return _normalized(keys, None if scale else by, None if shift else by)


def _normalized(keys: Keys, mean: Any, deviation: Any) -> Step | None:
    """Make the step that subtracts a mean and divides by a standard deviation. None if both are off.

    Args:
        mean, deviation: "group", "batch", "running" or None.
    """
    by = mean or deviation
    if by is None:
        return None
    options: dict[str, Any] = {"eps": 1e-6}
    if by == "group":
        options["group_size"] = keys.count("num_return_sequences_in_group", 1)
    if (mean, deviation) == ("group", "batch"):
        return Step("group_advantages", options | {"scale": "batch"})
    if mean and deviation and mean != deviation:
        keys.refuse("norm_std_type", f"{mean!r} as norm_mean_type, or None, or 'batch' if norm_mean_type is 'group'")
    return Step("normalize_rewards", options | {"by": by, "shift": mean is not None, "scale": deviation is not None})


def _clamp(bound: float) -> Step:
    return Step("clamp", {"min": -bound, "max": bound})
