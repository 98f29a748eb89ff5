"""Read a TrainConfig from presets, a YAML file and key=value texts. ROLL's settings are recognized in the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from gspo_kernels import Objective

from ..settings import from_roll
from ..settings.yaml_file import read_yaml
from ..tasks import nearest
from .advantages import check_steps
from .config import TYPES, InputError, TrainConfig, convert
from .resuming import RECORD, read_run

_LORA = {"lora_rank": 8, "lora_alpha": 32, "group_size": 4}
PRESETS: dict[str, dict[str, Any]] = {
    "demo": {},
    "paper": {"clip_low": 3e-4, "clip_high": 4e-4, "updates_per_rollout": 4},  # arXiv 2507.18071, section 5.1
    # StateSet's recommendations by size of the model
    "under-1b": _LORA | {"clip_low": 3e-4, "clip_high": 4e-4, "learning_rate": 1e-5},
    "1b-10b": _LORA
    | {"clip_low": 2e-4, "clip_high": 3e-4, "learning_rate": 5e-6, "lora_rank": 16, "gradient_checkpointing": True},
    "moe": {"clip_low": 2e-4, "clip_high": 3e-4, "learning_rate": 3e-6, "group_size": 6, "prompts_per_step": 16}
    | {"lora_rank": 32, "gradient_checkpointing": True},
}
OBJECTIVE = {f.name: str(f.type) for f in fields(Objective)}
# A file with any of these keys has ROLL's settings. ROLL's name -> ours, where the values mean the same.
ROLL_MARKS = {"rollout_batch_size", "num_return_sequences_in_group", "adv_estimator", "importance_sampling"}
ROLL_NAMES = {
    "rollout_batch_size": "prompts_per_step",
    "num_return_sequences_in_group": "group_size",
    "prompt_length": "max_prompt_tokens",
    "response_length": "max_new_tokens",
    "ppo_epochs": "epochs",
    "max_steps": "steps",
    "max_grad_norm": "max_grad_norm",
    "eval_steps": "eval_every",
    "save_steps": "checkpoint_every",
    "pretrain": "model",
    "exp_name": "name",
    "output_dir": "output",
}
# TRL's name -> ours, for the message about an unknown option. TRL counts optimizer updates where we count rollouts.
_UPDATES = "epochs * updates_per_rollout"
TRL_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "beta": "kl_coef",
    "bf16": "precision=bf16 or precision=autocast",
    "fp16": "precision=fp16 or precision=fp16-autocast",
    "dataset_name": "data",
    "eval_dataset": "eval_data",
    "epsilon": "clip_low and clip_high",
    "epsilon_high": "clip_high",
    "dtype": "precision",
    "eval_steps": f"eval_every * {_UPDATES}",
    "fsdp": "parallel=fsdp2",
    "generation_batch_size": "prompts_per_step * group_size",
    "gradient_accumulation_steps": "micro_batch_size and updates_per_rollout",
    "importance_sampling_level": "ratio",
    "log_completions": "samples",
    "lora_r": "lora_rank",
    "loss_type": "objective or aggregation",
    "lr_scheduler_type": "schedule",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "max_steps": f"steps * {_UPDATES}",
    "model_name_or_path": "model",
    "num_generations": "group_size",
    "num_iterations": "epochs",
    "num_train_epochs": "steps",  # `epochs` are passes over a rollout
    "output_dir": "output",
    "overwrite_output_dir": "overwrite",
    "per_device_train_batch_size": "micro_batch_size",
    "resume_from_checkpoint": "--resume FOLDER",
    "reward_funcs": "reward",
    "reward_weights": "reward=0.5*file.py:function",
    "run_name": "name",
    "save_steps": f"checkpoint_every * {_UPDATES}",
    "scale_rewards": "advantages=[{group_advantages: {scale: none}}]",
    "seed": "seeds",
    "steps_per_generation": "updates_per_rollout",
    "use_bias_correction_kl": "kl_ratio_factor",
    "use_cpu": "device=cpu",
    "use_peft": "lora_rank",
    "vllm_importance_sampling_cap": "rollout_correction",
    "vllm_importance_sampling_clip_max": "rollout_correction",
    "vllm_importance_sampling_clip_min": "rollout_correction",
    "vllm_importance_sampling_correction": "rollout_correction",
    "vllm_importance_sampling_mode": "rollout_correction",
    "warmup_ratio": "warmup_updates",
    "warmup_steps": "warmup_updates",
}
# Defaults that differ for a pretrained model.
CHECKPOINT_DEFAULTS: dict[str, Any] = {
    "seeds": (0,),
    "prompts_per_step": 16,
    "learning_rate": 1e-6,
    "max_new_tokens": 512,
}
# LoRA's best learning rate is about ten times that of full fine-tuning, in RL too. Source: "LoRA Without Regret"
# (Schulman et al. 2025, thinkingmachines.ai/blog/lora).
LORA_DEFAULTS: dict[str, Any] = {"learning_rate": 1e-5}
ROLL_TRAINING = {"learning_rate": "learning_rate", "weight_decay": "weight_decay", "warmup_steps": "warmup_updates"}
ROLL_SAMPLING = {"top_k": 50, "top_p": 0.7}  # of actor_infer.generating_args, with ROLL's defaults


def train_config(**options: Any) -> TrainConfig:
    """Make a TrainConfig from options and fields of `Objective`. Values may also be texts, as on the command line.

    Missing options take the defaults of a checkpoint if `model` or `data` is set, otherwise the demo's. An
    option of None counts as missing. The demo overwrites the files of its earlier run. It uses one CPU thread: its
    model is too small to gain from several threads, and on a busy machine threads wait for each other.

    Raises:
        InputError: an option does not exist (the message names the nearest), its value cannot be used, or options
            contradict each other.
    """
    preset = options.pop("preset", None) or "demo"
    if preset not in PRESETS:
        raise InputError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}{nearest(preset, PRESETS)}")
    chosen = converted(PRESETS[preset] | options)
    if "model" in chosen or "data" in chosen:
        defaults = {"name": Path(chosen.get("model", "model")).name, **CHECKPOINT_DEFAULTS}
        defaults |= LORA_DEFAULTS if chosen.get("lora_rank") else {}
    else:
        defaults = {"threads": 1, "overwrite": "name" not in chosen and not chosen.get("resume", False)}
    config = TrainConfig(**defaults | chosen)
    try:
        check_steps(config)
    except (TypeError, ValueError) as error:
        raise InputError(f"advantages: {error}") from error
    return config


def read_config(
    file: str | Path | None = None, texts: Sequence[str] = (), resume: str | Path | None = None
) -> TrainConfig:
    """Make a TrainConfig. Later sources win: preset, the file or the resumed run's options, key=value texts.

    Raises:
        InputError: an option does not exist (the message names the nearest option, or for a TRL name our equivalent),
            or its value cannot be used.
    """
    options: dict[str, Any] = {} if file is None else options_of_file(Path(file))
    place: dict[str, Any] = {}
    if resume is not None:
        if file is not None:
            raise InputError("--resume: expected no --config, because the run's own options are continued")
        folder = Path(resume).resolve()
        place = {"name": folder.name, "output": folder.parent, "resume": True, "overwrite": False}
        options = read_run(Path(resume))[0] | place
    for key, value in key_values(texts).items():
        if key in place:
            raise InputError(f"{key}: expected no such option with --resume, which continues {resume}, got {value!r}")
        options[key] = value
    return train_config(**options)


def key_values(texts: Sequence[str]) -> dict[str, str]:
    """Read texts of the form key=value. Raise an InputError for another form."""
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or text.startswith("-"):
            hint = f" (is it {key.lstrip('-')}=VALUE?)" if nearest(key.lstrip("-"), [*TYPES, *OBJECTIVE]) else ""
            raise InputError(f"{text}: expected key=value, such as steps=100{hint}")
        options[key] = value
    return options


def options_of_file(path: Path) -> dict[str, Any]:
    """Read options from a YAML or JSON file, without keys that begin with "x-", which may hold anchors."""
    try:
        options = json.loads(path.read_text()) if path.suffix == ".json" else read_yaml(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(options, Mapping):
        raise InputError(f"--config {path}: expected keys and values, got {type(options).__name__}")
    options = {name: value for name, value in options.items() if not str(name).startswith("x-")}
    if from_python := options.pop(RECORD, {}).get("from_python"):
        raise InputError(
            f"--config {path}: expected all options of a run, but its {' and '.join(from_python)} came from Python. To "
            f'use the others with a {from_python[0]} of your own, remove the key "{RECORD}"'
        )
    return roll_options(options) if ROLL_MARKS & options.keys() else options


def roll_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate ROLL's settings. Raise an InputError if this trainer cannot do what they say.

    Settings of ROLL's cluster, workers and files have no meaning here and are left out, but for those that truncate
    sampling. ROLL computes log-probs over the vocabulary then; this trainer uses the kept sets.
    """
    try:
        reading = from_roll(settings)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    beside = {name: value for name, value in reading.beside.items() if name != "defaults"}
    if beside:
        raise InputError(f"from_roll: expected none of the settings that this trainer does not support, got {beside}")
    options = {ours: settings[name] for name, ours in ROLL_NAMES.items() if settings.get(name) is not None}
    training = roll_section(settings, "actor_train", "training_args")
    options |= {ours: training[name] for name, ours in ROLL_TRAINING.items() if training.get(name) is not None}
    sampling = roll_section(settings, "actor_infer", "generating_args")
    if sampling:
        options |= {name: sampling.get(name, default) for name, default in ROLL_SAMPLING.items()}
        if options["top_k"] == -1:  # all, in vLLM
            options["top_k"] = 0
    if settings.get("seed") is not None:
        options["seeds"] = (settings["seed"],)
    group = int(options.get("group_size", 1))
    if "per_device_train_batch_size" in training and "prompts_per_step" in options:
        sizes = [training["per_device_train_batch_size"], training.get("gradient_accumulation_steps", 1)]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            names = "per_device_train_batch_size and gradient_accumulation_steps"
            raise InputError(f"actor_train.training_args: expected positive integers for {names}, got {sizes}")
        options["updates_per_rollout"] = max(1, int(options["prompts_per_step"]) * group // math.prod(sizes))
    return options | {
        "objective": reading.objective,
        "advantages": reading.advantages,
        "temperature": reading.temperature,
        "normalizer": reading.normalizer,
    }


def roll_section(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a nested section of ROLL's settings, empty if it is missing. Raise an InputError if it is no mapping."""
    section: Any = settings
    for i, name in enumerate(names):
        section = section.get(name)
        if section is None:
            return {}
        if not isinstance(section, Mapping):
            raise InputError(f"{'.'.join(names[: i + 1])}: expected keys and values, got {section!r}")
    return section


def converted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make arguments of `TrainConfig`: check the names, convert the values, leave out None, and make the Objective."""
    chosen: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name in TYPES:
            chosen[name] = value if value is None else convert(name, TYPES[name], value)
        elif name in OBJECTIVE:
            changes[name] = convert(name, OBJECTIVE[name], value)
        elif name != "objective":
            raise InputError(
                f"{name}: there is no such option{suggestion(name)}; `gspo train --dry-run` prints all options"
            )
    chosen = {name: value for name, value in chosen.items() if value is not None}
    of = options.get("objective", "gspo")
    try:
        if isinstance(of, Objective):
            changes = {f.name: getattr(of, f.name) for f in fields(Objective)} | changes
            # With all fields given, the presets differ only in that luspo does not warn about this aggregation.
            of = "luspo" if of.ratio != "token" and of.aggregation != "seq-mean-token-mean" else "gspo"
        chosen["objective"] = Objective.preset(of, **changes)
    except (TypeError, ValueError) as error:
        raise InputError(f"objective: {error}") from error
    return chosen


def suggestion(name: str) -> str:
    """Suggest an option: our equivalent of an option of TRL, the most similar name, or what `name` abbreviates."""
    names = [*TYPES, *OBJECTIVE, "objective", "preset"]
    similar = get_close_matches(name, [*TRL_NAMES, *names], 1, 0.75)
    if similar and similar[0] in TRL_NAMES:
        return f" (TRL's {similar[0]} is {TRL_NAMES[similar[0]]} here)"
    if not similar and len(name) > 1:
        initials = {option: "".join(word[:1] for word in option.split("_")) for option in names}
        similar = [option for option in names if option.startswith(name) or initials[option] == name]
    return f" (is it {similar[0]!r}?)" if similar else ""
