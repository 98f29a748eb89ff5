"""Tasks of the user's own: a jsonl file of prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import InputError
from ..rewards import Example, RewardComponent, Rewards, answer_found
from .base import Task, make_task


def jsonl_task(path: Path, held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make a task from a jsonl file: one object with "prompt" and "answer" (text or number) per line.

    A prompt is text, or a list of chat messages, each with "role" and "content". If several lines have the same prompt,
    the first is used. `held_out` prompts, but at most a fifth of the file, are kept for evaluation. Without `rewards`,
    the reward is `answer_found`.

    Raises:
        InputError: the file or a line cannot be used. The message names the file, and the line if it is at fault.
    """
    by_key: dict[str, Example] = {}
    for number, line in read_lines(path):
        example = parse_line(path, number, line)
        by_key.setdefault(example.key, example)
    if len(by_key) < 2:
        raise InputError(f"data {path}: expected at least 2 different prompts (one is held out), got {len(by_key)}")
    held_out = max(1, min(held_out, len(by_key) // 5))
    default = Rewards((RewardComponent("answer_found", 1.0, answer_found),))
    return make_task(path.stem, list(by_key.values()), held_out, rewards, default)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines with their line numbers, from 1. Raise an InputError if there are none."""
    if not path.is_file():
        raise InputError(f"data {path}: expected a jsonl file, got {'a folder' if path.is_dir() else 'no file'}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data {path}: expected readable UTF-8 text: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InputError(f"data {path}: expected one JSON object per line, but the file is empty")
    yield from lines


def parse_line(path: Path, number: int, line: str) -> Example:
    """Parse one line of the file. Raise an InputError that names an invalid line."""
    where = f"data {path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: expected a JSON object, got {line.strip()[:60]!r} ({error})") from error
    if not isinstance(record, dict):
        raise InputError(f'{where}: expected a JSON object with "prompt" and "answer", got {line.strip()[:60]!r}')
    for key in ("prompt", "answer"):
        if key not in record:
            raise InputError(f'{where}: "{key}" is missing; the keys are {sorted(record)}')
    prompt, answer = record["prompt"], record["answer"]
    if not (is_chat(prompt) or (isinstance(prompt, str) and prompt.strip())):
        raise InputError(
            f'{where}: "prompt" must be text that is not empty, or a list of chat messages, each with a "role" and a '
            f'"content" of text, got {prompt!r}'
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise InputError(f'{where}: "answer" must be text or a number, and not empty, got {answer!r}')
    return Example(prompt, str(answer).strip())


def is_chat(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages."""
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(message, dict) and set(message) == {"role", "content"} for message in prompt)
        and all(isinstance(text, str) for message in prompt for text in message.values())
    )
