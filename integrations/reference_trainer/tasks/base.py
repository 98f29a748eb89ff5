"""`Task`: examples, rewards and, for dialogues, the environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..examples import Example, split
from ..rewards import RewardComponent, Rewards


@dataclass(frozen=True)
class Task:
    """Training and held-out examples, rewards, and for dialogues the function that replies to a turn.

    Raises:
        ValueError: a prompt is both trained on and held out.
    """

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    rewards: Rewards
    reply: Callable[[str, Example], str | None] | None = None  # reply(turn, example); None ends the dialogue
    max_turns: int = 1
    characters: str = ""  # of prompts, answers and replies, for a tokenizer of single characters

    def __post_init__(self) -> None:
        shared = {example.key for example in self.train} & {example.key for example in self.held_out}
        if shared:
            raise ValueError(f"{len(shared)} prompts are both trained on and held out, such as {min(shared)!r}")


def make_task(
    name: str,
    examples: Sequence[Example],
    held_out: int,
    rewards: Sequence[RewardComponent],
    default: Rewards,
    **options: Any,
) -> Task:
    """Make a task that holds out `held_out` examples. Without `rewards`, use `default`. `options`: fields of Task."""
    characters = "".join(sorted({character for e in examples for character in e.key + e.answer}))
    chosen = Rewards(tuple(rewards)) if rewards else default
    return Task(name, *split(examples, held_out), chosen, **{"characters": characters, **options})
