"""How a run starts: anew, or from its checkpoint. config.json records what must not change in between."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from gspo_kernels import Objective

from ..tasks import Task
from .checkpoints import check_form, read_checkpoint
from .config import InputError, TrainConfig
from .data import Reward, task_of
from .loading import located

RECORD = "started_with"  # the key of config.json that is not an option
FIXED = ("model", "lora_rank", "lora_alpha", "lora_head")  # trained weights need these
# What every config.json has.
FORM = {"seeds": list, "steps": int, RECORD: {"from_python": list, "rewards": dict, "prompts": str, "started_in": str}}
PROMPTS = ("task", "data", "eval_data", "eval_prompts")  # they define prompts and answers


class Start(NamedTuple):
    """What a run starts with."""

    task: Task
    record: dict[str, Any]  # for config.json
    saved: dict[str, Any] | None  # the checkpoint from which the run continues
    notes: list[str]  # lines that say what has changed since the run was started


def start_of(config: TrainConfig, task: Task | None, reward: Reward | None) -> Start:
    """Load prompts, rewards and, to resume a run, its checkpoint. Takes arguments of `train`.

    Raises:
        InputError: prompts or rewards cannot be loaded; there is no such run; or the options, the prompts or the
            arguments of `train` differ from the run's in a way that it cannot continue with.
    """
    from_python = [name for name, x in (("task", task), ("reward", reward)) if x is not None]
    if not config.resume:
        task = task_of(config, task, reward)
        return Start(task, record_of(config, task, from_python), None, [])
    before, then = read_run(config.folder)
    check_arguments(config.folder, then["from_python"], from_python)
    changes = changed_options(config, before)
    path = config.folder / "checkpoint.pt"
    saved = read_checkpoint(path) if path.is_file() else None
    if saved is None:
        check_untrained(config.folder)
    check_changes(config, changes, before, saved)
    task = task_of(config, task, reward)
    record = record_of(config, task, from_python)
    if then["prompts"] != record["prompts"]:
        related = "".join(f"; {name}: {arrow(*changes[name])}" for name in PROMPTS if name in changes)
        got = f"{len(task.train) + len(task.held_out):,} prompts, which, or their answers, columns or order, differ"
        refuse("data" if config.data else "task", f"the prompts with which {config.folder} was started", got + related)
    if then["rewards"] != record["rewards"]:
        changes["weights of rewards"] = [then["rewards"], record["rewards"]]
    notes = [f"resume: {name}: {arrow(*change)}, taken from here on" for name, change in changes.items()]
    if saved is None:
        notes.append(f"resume: {config.folder} has trained no step yet, so training starts again from the beginning")
    return Start(task, record, saved, notes)


def record_of(config: TrainConfig, task: Task, from_python: list[str]) -> dict[str, Any]:
    """What config.json adds to the options: arguments from Python, weights of rewards, a hash of the prompts, ..."""
    rewards = {component.name: component.weight for component in task.rewards.components}
    record: dict[str, Any] = {"from_python": from_python, "rewards": rewards, "prompts": task.digest}
    record["started_in"] = place_of(Path.cwd(), config.folder.resolve())
    model = None if config.model is None else located(config.model)[0]
    return record | {"held_out": task.split or "those of the task from Python", "model": model, "versions": versions()}


def place_of(folder: Path, run: Path) -> str:
    """The path of `folder` relative to the run, so that both can be moved together; absolute on another drive."""
    return os.path.relpath(folder, run) if folder.drive == run.drive else str(folder)


def found_from(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Make the options' relative paths absolute if they exist in `folder`. Leave others, such as hub ids, unchanged."""

    def absolute(path: str) -> str:
        return str(folder / path) if (folder / path).exists() else path

    paths = {name: absolute(options[name]) for name in ("model", "data", "eval_data") if options[name]}
    rewards = []
    for spec in options["reward"]:
        factor, separator, place = spec.rpartition("*")
        source, colon, function = place.rpartition(":")
        rewards.append(f"{factor}{separator}{absolute(source)}{colon}{function}")
    return {**options, **paths, "reward": rewards}


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that matter for a model."""
    installed = {"Python": platform.python_version()}
    for name in ("gspo-kernels", "torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the options of a run, and its record (see `record_of`). Raise an InputError if the folder has no run.

    Relative paths are resolved from the folder in which the run was started.
    """
    path = folder / "config.json"
    if not path.is_file():
        got = folder if folder.is_dir() else f"no folder: {folder}"
        refuse("resume", "the folder of a run, with a config.json", got)
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"resume: {path} cannot be read: {error}") from error
    check_form(f"resume: {path}", options, FORM)
    then = options.pop(RECORD)
    # An option of an earlier version that was off, or only changed what was printed, may be missing.
    known = {f.name for kind in (TrainConfig, Objective) for f in fields(kind)}
    lost = [f"{name}={json.dumps(x)}" for name, x in options.items() if name not in {*known, "warn_after"} and x]
    if lost:
        got = f"{', '.join(lost)}. To continue without {'it' if len(lost) == 1 else 'them'}, edit the file"
        refuse("resume", f"options that this version of gspo train has in {path}", got)
    options = TrainConfig().to_dict() | {name: x for name, x in options.items() if name in known}
    if (started_in := (folder.resolve() / then["started_in"]).resolve()) != Path.cwd():
        options = found_from(started_in, options)
    return options, then


def check_untrained(folder: Path) -> None:
    """Raise an InputError if the files of a run without a checkpoint show that it has trained.

    To start it again would remove its models and metrics. Before the first step, a run writes one line of metrics.
    """
    traces = [path.name for path in sorted(folder.glob("model-seed*"))]
    traces += [name for name in ("curves.png", "samples.jsonl") if (folder / name).is_file()]
    traces = [name for name in traces if (folder / name).is_dir() or (folder / name).stat().st_size]
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and metrics.read_bytes().partition(b"\n")[2]:
        traces.append("steps in metrics.jsonl")
    if traces:
        found = f"none, but {', '.join(traces)}; only a start with overwrite=true replaces them"
        refuse("resume", f"a checkpoint.pt in {folder}, from which to continue", found)


def continue_command(folder: Path, from_python: Sequence[str]) -> str:
    """The command that continues a run or, if the run got arguments from Python, the call."""
    if not from_python:
        return f"gspo train --resume {shlex.quote(str(folder))}"
    arguments = "".join(f", {name}=..." for name in from_python)
    return f"train(read_config(resume={json.dumps(str(folder), ensure_ascii=False)}){arguments})"


def refuse(name: str, expected: object, got: object) -> NoReturn:
    raise InputError(f"{name}: expected {expected}, got {got}")


def arrow(before: Any, now: Any) -> str:
    return f"{json.dumps(before)} -> {json.dumps(now)}"


def changed_options(config: TrainConfig, before: dict[str, Any]) -> dict[str, list[Any]]:
    """The options that have changed, each with its values before and now."""
    now = json.loads(json.dumps(config.to_dict()))
    names = [name for name in now if name not in ("name", "output")]
    return {name: [before[name], now[name]] for name in names if before[name] != now[name]}


def check_arguments(folder: Path, started: list[str], resumed: list[str]) -> None:
    """Refuse to resume a run unless the same arguments of `train` come from Python as when it was started."""
    if started != resumed:
        then, now = (
            f"{' and '.join(f'{x}=' for x in names) or 'no task= or reward='} from Python"
            for names in (started, resumed)
        )
        command = continue_command(folder, started)
        raise InputError(
            f"resume: {folder} was started with {then}, but resumed with {now}. Continue it with {command}"
        )


def check_changes(
    config: TrainConfig, changes: dict[str, list[Any]], before: dict[str, Any], saved: dict[str, Any] | None
) -> None:
    """Refuse changes of options that the run cannot continue with."""
    folder = config.folder
    for name in FIXED:
        if name in changes:
            refuse(name, f"{json.dumps(before[name])}, with which {folder} was started", json.dumps(changes[name][1]))
    if saved is None:
        return
    seed = saved["seed"]
    seeds = before["seeds"]
    begun = seeds[: seeds.index(seed) + 1] if seed in seeds else [seed]
    if list(config.seeds[: len(begun)]) != begun:
        refuse("seeds", f"{begun} first, on which {folder} has trained", list(config.seeds))
    if config.steps < saved["step"]:
        refuse("steps", f"at least {saved['step']}, which seed {seed} of {folder} has reached", config.steps)
    if "steps" in changes and len(begun) > 1:
        refuse("steps", f"{before['steps']}, after which earlier seeds of {folder} have ended", config.steps)
