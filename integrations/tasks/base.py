"""`Task`: examples and rewards. How examples are split and drawn in batches."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .rewards import Example, InputError, RewardComponent, Rewards

Item = TypeVar("Item")
SPLIT_SEED = 0  # fixed, so that runs with different seeds are evaluated on the same prompts


@dataclass(frozen=True)
class Task:
    """Training and held-out examples, and rewards.

    Raises:
        InputError: a prompt is both trained on and held out.
    """

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    rewards: Rewards
    characters: str = ""  # of prompts and answers, for a tokenizer of single characters
    split: str = ""  # how the held-out examples were chosen

    def __post_init__(self) -> None:
        shared = {example.key for example in self.train} & {example.key for example in self.held_out}
        if shared:
            raise InputError(f"{len(shared)} prompts are both trained on and held out, such as {min(shared)!r}")

    @property
    def digest(self) -> str:
        """A hash of prompts, answers and other columns in their order."""
        total = hashlib.sha256()
        for examples in (self.train, self.held_out):
            for example in examples:
                total.update(f"{row_text(example)}\n".encode())
            total.update(b"\n")
        return total.hexdigest()[:16]


def row_text(example: Example) -> str:
    """The prompt, the answer and the other columns of an example, as JSON."""
    record = [example.prompt, example.answer, *([example.columns] if example.columns else [])]
    return json.dumps(record, default=lambda x: type(x).__name__)


def digest_of(value: Any) -> str:
    """A hash of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def make_task(
    name: str,
    examples: Sequence[Example],
    held_out: int,
    rewards: Sequence[RewardComponent],
    default: Rewards,
    **options: Any,
) -> Task:
    """Make a task that holds out `held_out` examples. Without `rewards`, use `default`. `options`: fields of Task."""
    texts = [text for e in examples for text in (e.key, e.answer) if isinstance(text, str)]
    characters = "".join(sorted(set("".join(texts))))
    chosen = Rewards(tuple(rewards)) if rewards else default
    rule = f"{held_out} of {len(examples)} prompts, by random.Random({SPLIT_SEED}).sample"
    return Task(name, *split(examples, held_out), chosen, **{"characters": characters, "split": rule, **options})


def split(examples: Sequence[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out examples, identically in every call. Prompts must be distinct."""
    if held_out >= len(examples):
        raise InputError(f"eval_prompts: expected fewer than the task's {len(examples)} prompts, got {held_out}")
    shuffled = random.Random(SPLIT_SEED).sample(examples, len(examples))
    return shuffled[held_out:], shuffled[:held_out]


def batches(examples: Sequence[Item], size: int, seed: int) -> Iterator[list[Item]]:
    """Yield batches endlessly. Each pass over the examples has a new random order."""
    generator = random.Random(seed)
    queue: list[Item] = []
    while True:
        while len(queue) < size:
            queue += generator.sample(examples, len(examples))
        yield queue[:size]
        queue = queue[size:]
