"""How a run starts: anew, or from its checkpoint. config.json records what must not change in between."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..tasks import Task
from .checkpoints import read_checkpoint
from .config import InputError, TrainConfig
from .config_file import read_run
from .data import Reward, task_of

FIXED = ("model", "lora_rank", "lora_alpha", "lora_head")  # trained weights need these


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
        return Start(task, record_of(task, from_python), None, [])
    before, then = read_run(config.folder)
    check_arguments(config.folder, then["from_python"], from_python)
    changes = changed_options(config, before)
    path = config.folder / "checkpoint.pt"
    if not path.is_file():
        refuse("resume", f"a {path}, from which to continue", "none; overwrite=true starts the run again")
    saved = read_checkpoint(path)
    check_changes(config, changes, before, saved)
    task = task_of(config, task, reward)
    record = record_of(task, from_python)
    if then["prompts"] != record["prompts"]:
        got = f"{len(task.train) + len(task.held_out):,} prompts, which, or their answers, columns or order, differ"
        refuse("data" if config.data else "task", f"the prompts with which {config.folder} was started", got)
    notes = [f"resume: {name}: {arrow(*change)}, taken from here on" for name, change in changes.items()]
    return Start(task, record, saved, notes)


def forecast(config: TrainConfig, task: Task | None = None, reward: Reward | None = None) -> str:
    """Describe a run for --dry-run: options as YAML, changes since its start, prompts, and rewards.

    Takes arguments of `train`, and raises its errors, except those of the model.
    """
    task, _, _, notes = start_of(config, task, reward)
    options = (f"{name}: {json.dumps(value)}" for name, value in config.to_dict().items())
    prompts = f"{len(task.train):,} prompts for training, {len(task.held_out):,} for evaluation"
    rewards = ", ".join(component.name for component in task.rewards.components)
    notes = [*notes, f"{prompts}; rewards: {rewards}"]
    return "\n".join([*options, "", *(f"# {note}" for note in notes)])


def record_of(task: Task, from_python: list[str]) -> dict[str, Any]:
    """What config.json adds to the options: the arguments that came from Python, and a hash of the prompts."""
    return {"from_python": from_python, "prompts": task.digest}


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
    now = config.to_dict()
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
    config: TrainConfig, changes: dict[str, list[Any]], before: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Refuse changes of options that the run cannot continue with."""
    folder = config.folder
    for name in FIXED:
        if name in changes:
            refuse(name, f"{json.dumps(before[name])}, with which {folder} was started", json.dumps(changes[name][1]))
    seed = saved["seed"]
    seeds = before["seeds"]
    begun = seeds[: seeds.index(seed) + 1] if seed in seeds else [seed]
    if list(config.seeds[: len(begun)]) != begun:
        refuse("seeds", f"{begun} first, on which {folder} has trained", list(config.seeds))
    if config.steps < saved["step"]:
        refuse("steps", f"at least {saved['step']}, which seed {seed} of {folder} has reached", config.steps)
    if "steps" in changes and len(begun) > 1:
        refuse("steps", f"{before['steps']}, after which earlier seeds of {folder} have ended", config.steps)
