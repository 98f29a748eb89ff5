"""Read a TrainConfig from presets, a YAML file and key=value texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from gspo_kernels import Objective

from ..tasks import nearest
from .advantages import check_steps
from .config import TYPES, InputError, TrainConfig, convert

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
RECORD = "started_with"  # the key of config.json that is not an option
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
    if not isinstance(preset, str) or preset not in PRESETS:
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
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        first_line, *_ = str(error).split("\n")
        raise InputError(f"advantages: {first_line}") from error
    return config


def read_config(
    file: str | Path | None = None, texts: Sequence[str] = (), resume: str | Path | None = None
) -> TrainConfig:
    """Make a TrainConfig. Later sources win: preset, the file or the resumed run's options, key=value texts.

    Raises:
        InputError: an option does not exist (the message names the nearest), or its value cannot be used.
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


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the options of a run, and its record (see `record_of`).

    Raises:
        InputError: the folder has no run, its config.json is damaged, or it has an option that no longer exists.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder}: expected the folder of a run, with a config.json")
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
        record = options.pop(RECORD)
        return train_config(**options).to_dict(), record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged: {error}") from error


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
        text = path.read_text(encoding="utf-8")
        options = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
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
    return options


def converted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Make arguments of `TrainConfig`: check the names, convert the values, leave out None, and make the Objective."""
    chosen: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name in TYPES:
            chosen[name] = value if value is None else convert(name, TYPES[name], value)
        elif name in OBJECTIVE and (value is not None or OBJECTIVE[name].endswith("| None")):
            changes[name] = convert(name, OBJECTIVE[name], value)
        elif name != "objective" and name not in OBJECTIVE:
            similar = nearest(name, [*TYPES, *OBJECTIVE, "objective", "preset"])
            raise InputError(f"{name}: there is no such option{similar}; `gspo train --dry-run` prints all options")
    chosen = {name: value for name, value in chosen.items() if value is not None}
    of = "gspo" if options.get("objective") is None else options["objective"]
    try:
        if isinstance(of, Objective):
            changes = {f.name: getattr(of, f.name) for f in fields(Objective)} | changes
            # With all fields given, the presets differ only in that luspo does not warn about this aggregation.
            of = "luspo" if of.ratio != "token" and of.aggregation != "seq-mean-token-mean" else "gspo"
        chosen["objective"] = Objective.preset(of, **changes)
    except (TypeError, ValueError) as error:
        raise InputError(f"objective: {error}") from error
    return chosen
