"""The prompts and rewards of a run: a task, a jsonl file of prompts and answers, or reward functions by import path."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..tasks import Example, RewardComponent, Rewards, Task, answer_found, nearest, task_by_name
from ..tasks.base import digest_of, make_task
from .config import InputError, TrainConfig

RewardFunction = Callable[..., Any]  # see tasks.rewards.Parameters
Reward = RewardFunction | Sequence[RewardFunction | RewardComponent]
EXPECTED = 'expected "module:function" or "file.py:function", with a weight if wanted: "0.5*file.py:function"'


def task_of(config: TrainConfig, task: Task | None = None, reward: Reward | None = None) -> Task:
    """Make the run's task, with the run's rewards. Takes arguments of `train`.

    Raises:
        InputError: prompts or rewards cannot be loaded, or a reward asks for a column that a row lacks.
    """
    components = tuple(load_reward(spec) for spec in config.reward)
    if reward is not None:
        components = components_of(reward)
    if task is not None:
        task = replace(task, rewards=replace(task.rewards, components=components or task.rewards.components))
    elif config.data is not None:
        task = jsonl_task(config.data, config.eval_prompts, components, config.eval_data)
    elif config.model is not None and not config.task:
        raise InputError("model needs data=FILE, the jsonl file to train it on, or task=NAME")
    else:
        task = task_by_name(config.task or "sorting", config.eval_prompts, components)
    task.rewards.check([*task.train, *task.held_out])
    return replace(task, rewards=replace(task.rewards, timeout=config.reward_timeout))


def components_of(reward: Reward) -> tuple[RewardComponent, ...]:
    """Convert the reward of `train` to components. Functions have weight 1 and are logged under their own names."""
    rewards: Any = reward
    if not isinstance(reward, list | tuple) or isinstance(reward, RewardComponent):  # a component is a tuple
        rewards = [reward]
    components: list[RewardComponent] = []
    for x in rewards:
        if isinstance(x, RewardComponent):
            components.append(x)
        elif callable(x):
            components.append(RewardComponent(getattr(x, "__name__", "reward"), 1.0, x))  # type: ignore[arg-type]
        else:
            expected = "a function, such as function(completion, answer), or a list of functions or RewardComponents"
            raise InputError(f"reward: expected {expected}, got {x!r}")
    return tuple(components)


def jsonl_task(
    path: Path, held_out: int, rewards: Sequence[RewardComponent] = (), eval_data: Path | None = None
) -> Task:
    """Make a task from a jsonl file. Hold out `held_out` prompts for evaluation, at most a fifth of the file.

    Args:
        rewards: if there are none, the reward is `answer_found`.
        eval_data: a jsonl file whose prompts are all used for evaluation. None of `path` are held out then.

    Raises:
        InputError: a file or a line cannot be used, or both files have a prompt. The message names the file, and the
            line if it is at fault.
    """
    examples = read_examples("data", path, needs_answer=not rewards)
    default = Rewards((RewardComponent("answer_found", 1.0, answer_found),))
    if eval_data is not None:
        evaluated = read_examples("eval_data", eval_data, needs_answer=not rewards)
        for option, file, of_file in (("data", path, examples), ("eval_data", eval_data, evaluated)):
            if not of_file:
                raise InputError(f"{option} {file}: expected at least 1 prompt, got 0")
        chosen = Rewards(tuple(rewards)) if rewards else default
        return Task(path.stem, examples, evaluated, chosen, split=f"all {len(evaluated)} prompts of {eval_data}")
    if len(examples) < 2:
        raise InputError(f"data {path}: expected at least 2 different prompts (one is held out), got {len(examples)}")
    held_out = max(1, min(held_out, len(examples) // 5))
    return make_task(path.stem, examples, held_out, rewards, default)


def read_examples(option: str, path: Path, needs_answer: bool) -> list[Example]:
    """Read a jsonl file: one object per line, with "prompt", usually "answer", and any other columns for the rewards.

    A prompt is text, or a list of chat messages, each with "role" and "content". If several lines have the same prompt,
    the first is used. Columns keep their JSON types. An answer that is text loses surrounding spaces.

    Args:
        option: names the file in messages.
        needs_answer: refuse answers that are neither text nor a number.

    Raises:
        InputError: the file or a line cannot be used. The message names the file, and the line if it is at fault.
    """
    if not path.is_file():
        raise InputError(f"{option} {path}: expected a jsonl file, got {'a folder' if path.is_dir() else 'no file'}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{option} {path}: expected readable UTF-8 text: {error}") from error
    by_key: dict[str, Example] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            example = parse_line(f"{option} {path}, line {number}", line, needs_answer)
            by_key.setdefault(example.key, example)
    return list(by_key.values())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_line(where: str, line: str, needs_answer: bool) -> Example:
    """Parse one line of the file. Raise an InputError that begins with `where` for an invalid line."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # also a number with thousands of digits
        raise InputError(f"{where}: expected a JSON object, got {line.strip()[:60]!r} ({error})") from error
    if not isinstance(record, dict):
        raise InputError(f'{where}: expected a JSON object with "prompt" and "answer", got {line.strip()[:60]!r}')
    for key in ("prompt", "answer") if needs_answer else ("prompt",):
        if key not in record:
            without = ", which the default reward needs" if key == "answer" else ""
            raise InputError(f'{where}: "{key}" is missing{without}; the keys are {sorted(record)}')
    prompt, answer = record.pop("prompt"), record.pop("answer", None)
    if not (is_chat(prompt) if isinstance(prompt, list) else isinstance(prompt, str) and prompt.strip()):
        expected = 'text that is not empty, or a list of chat messages, each with a "role" and a "content" of text'
        raise InputError(f'{where}: "prompt" must be {expected}, got {prompt!r}')
    if isinstance(answer, str):
        answer = answer.strip()
    if needs_answer and (isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == ""):
        raise InputError(
            f'{where}: "answer" must be text or a number, and not empty, for the default reward, got {answer!r}'
        )
    return Example(prompt, answer, record)


def is_chat(messages: list[Any]) -> bool:
    """True for a list of messages, each with a role and text content."""
    shaped = all(isinstance(message, dict) and set(message) == {"role", "content"} for message in messages)
    return bool(messages) and shaped and all(isinstance(x, str) for message in messages for x in message.values())


def load_reward(spec: str) -> RewardComponent:
    """Load a reward function from "module:function" or "file.py:function". A weight may precede it: "0.5*...".

    Modules are also looked for in the current folder. The function's name is the component's name.

    Raises:
        InputError: the text has another form, or the function cannot be imported. The message gives the reason.
    """
    factor, separator, place = spec.rpartition("*")
    source, colon, name = place.rpartition(":")
    try:
        weight = float(factor) if separator else 1.0
    except ValueError as error:
        raise InputError(f"reward: {EXPECTED}, got {spec!r}") from error
    if not (colon and source and name.isidentifier()):
        raise InputError(f"reward: {EXPECTED}, got {spec!r}")
    try:
        module = import_source(source)
    except Exception as error:  # whatever the user's file raises when imported
        raise InputError(f"reward {spec!r}: {source} cannot be imported: {type(error).__name__}: {error}") from error
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        hint = nearest(name, [other for other, value in vars(module).items() if callable(value)])
        raise InputError(f"reward {spec!r}: {source} has no function {name}{hint}")
    return RewardComponent(name, weight, function)


def import_source(source: str) -> Any:
    """Import a file, which can import modules of its folder, or a module, which may be in the current folder."""
    path = Path(source).expanduser().resolve()
    sys.path.insert(0, str(path.parent))
    try:
        if path.suffix != ".py":
            return importlib.import_module(source)
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


def code_of(function: Callable[..., Any]) -> str:
    """Hash the source file that defines a function. Return "" if it has no source file."""
    function = inspect.unwrap(getattr(function, "func", function))  # a partial has the function in `func`
    function = function if inspect.isroutine(function) else type(function).__call__
    try:
        source = inspect.getsourcefile(function)
        return digest_of(Path(source or "").read_text(encoding="utf-8", errors="replace"))
    except (OSError, TypeError):
        return ""
