"""Tasks: prompts with known answers, and a reward that a program can compute.

A model with random weights can learn the `sorting_task` from rewards alone. `jsonl_task` reads the user's own file. A
Task raises a ValueError if a prompt is both trained on and held out.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import InputError

LETTERS = "abcdef"
SPLIT_SEED = 0  # fixed, so that runs with different seeds are evaluated on the same prompts


@dataclass(frozen=True)
class Example:
    """A prompt and the answer that gets the full reward."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """Training and held-out examples, and a reward function: reward(completion, answer) is from 0 to 1."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    reward: Callable[[str, str], float]

    def __post_init__(self) -> None:
        shared = {example.prompt for example in self.train} & {example.prompt for example in self.held_out}
        if shared:
            raise ValueError(f"{len(shared)} prompts are both trained on and held out, such as {min(shared)!r}")


def sorting_task(held_out: int) -> Task:
    """Make the task of sorting three to five letters: "sort dbca:" -> "abcd".

    It has 648 prompts, of which `held_out` are kept for evaluation.
    """
    generator = random.Random(SPLIT_SEED)
    examples: list[Example] = []
    for length in (3, 4, 5):
        words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=length)]
        # Take equally many words of each length. Otherwise nearly all words would have the greatest length.
        words = generator.sample(words, len(LETTERS) ** 3)
        examples += [Example(f"sort {word}:", "".join(sorted(word))) for word in words]
    return Task(*split(examples, held_out), letters_in_place)


def letters_in_place(completion: str, answer: str) -> float:
    """Return the number of letters in the right place, divided by the longer length of completion and answer.

    Surplus letters cost as much as missing letters, so the model must learn to stop.
    """
    correct = sum(letter == expected for letter, expected in zip(completion, answer, strict=False))
    return correct / max(len(completion), len(answer))


def jsonl_task(path: Path, held_out: int) -> Task:
    """Make a task from a jsonl file: one object with "prompt" (text) and "answer" (text or number) per line.

    If several lines have the same prompt, the first is used. `held_out` prompts, but at most a fifth of the file, are
    kept for evaluation. The reward is `answer_found`.

    Raises:
        InputError: the file or a line cannot be used. The message names the file, and the line if it is at fault.
    """
    by_prompt: dict[str, Example] = {}
    for number, line in read_lines(path):
        example = parse_line(path, number, line)
        by_prompt.setdefault(example.prompt, example)
    if len(by_prompt) < 2:
        raise InputError(
            f"--data {path}: expected at least 2 different prompts (one is held out), got {len(by_prompt)}"
        )
    held_out = max(1, min(held_out, len(by_prompt) // 5))
    return Task(*split(list(by_prompt.values()), held_out), answer_found)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines with their line numbers, from 1. Raise an InputError if there are none."""
    if not path.is_file():
        raise InputError(f"--data {path}: expected a jsonl file, got {'a folder' if path.is_dir() else 'no file'}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--data {path}: expected readable UTF-8 text: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InputError(f"--data {path}: expected one JSON object per line, but the file is empty")
    yield from lines


def parse_line(path: Path, number: int, line: str) -> Example:
    """Parse one line of the file. Raise an InputError that names an invalid line."""
    where = f"--data {path}, line {number}"
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
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f'{where}: "prompt" must be text that is not empty, got {prompt!r}')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise InputError(f'{where}: "answer" must be text or a number, and not empty, got {answer!r}')
    return Example(prompt, str(answer).strip())


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def answer_found(completion: str, answer: str) -> float:
    """Return 1 if the completion equals the answer or ends in it, else 0.

    If the answer is a number, the last number of the completion must equal it in value: 1,200 is 1200.0. Otherwise the
    last words of the completion must equal it, ignoring final punctuation.
    """
    completion = completion.strip()
    if completion == answer:
        return 1.0
    if NUMBER.fullmatch(answer):
        numbers = NUMBER.findall(completion)
        return float(bool(numbers) and as_number(numbers[-1]) == as_number(answer))
    words = completion.rstrip(".!?\"')*").split()
    expected = answer.split()
    return float(words[-len(expected) :] == expected)


def as_number(text: str) -> float:
    """Parse a number in which commas may group digits."""
    return float(text.replace(",", ""))


def split(examples: list[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out examples, identically in every call. Prompts must be distinct."""
    if held_out >= len(examples):
        raise InputError(
            f"eval_prompts (--eval-prompts): expected fewer than the task's {len(examples)} prompts, got {held_out}"
        )
    shuffled = random.Random(SPLIT_SEED).sample(examples, len(examples))
    return shuffled[held_out:], shuffled[:held_out]


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches endlessly. Each pass over the examples has a new random order."""
    generator = random.Random(seed)
    queue: list[Example] = []
    while True:
        while len(queue) < size:
            queue += generator.sample(examples, len(examples))
        yield queue[:size]
        queue = queue[size:]
