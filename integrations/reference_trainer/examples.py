"""Examples of a task: how they are split into training and held-out examples, and drawn in batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .config import InputError

SPLIT_SEED = 0  # fixed, so that runs with different seeds are evaluated on the same prompts
Prompt = str | list[dict[str, str]]  # text, or chat messages with "role" and "content"


@dataclass(frozen=True)
class Example:
    """A prompt, as text or chat messages, and the answer that the rewards compare with."""

    prompt: Prompt
    answer: str

    @property
    def key(self) -> str:
        """The prompt as one text. Two examples with the same key have the same prompt."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


def split(examples: Sequence[Example], held_out: int) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out examples, identically in every call. Prompts must be distinct."""
    if held_out >= len(examples):
        raise InputError(f"eval_prompts: expected fewer than the task's {len(examples)} prompts, got {held_out}")
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
