"""Following a format: write letters in a style that the prompt names, such as "abc as list:" -> "[a,b,c]"."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from .base import Task, make_task
from .rewards import Example, RewardComponent, Rewards, letters_in_place

LETTERS = "abcdef"
STYLES = {  # name of a style -> what stands before, between and after the letters
    "list": ("[", ",", "]"),
    "call": ("f(", ",", ")"),
    "path": ("/", "/", ""),
    "sum": ("", "+", ""),
}
WORDS = 160  # per style


def format_task(held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make the task of writing two to four letters in one of four styles. It has 640 prompts.

    The reward is the mean of two components: `content`, the letters in their order, and `format`, all other characters
    in their places.
    """
    generator = random.Random(0)
    examples: list[Example] = []
    for style, (before, between, after) in STYLES.items():
        words: dict[str, None] = {}
        while len(words) < WORDS:
            words["".join(generator.choices(LETTERS, k=generator.randint(2, 4)))] = None
        examples += [Example(f"{word} as {style}:", before + between.join(word) + after) for word in words]
    components = (RewardComponent("content", 0.5, content), RewardComponent("format", 0.5, form))
    return make_task("format", examples, held_out, rewards, Rewards(components))


def content(completion: str, answer: str) -> float:
    """Share of the letters that are right, ignoring everything between them."""
    marks = re.compile(r"[^a-z]|f\(")
    return letters_in_place(marks.sub("", completion), marks.sub("", answer))


def form(completion: str, answer: str) -> float:
    """Share of characters in the right place, if all letters count as the same character."""
    return letters_in_place(re.sub("[a-z]", "x", completion), re.sub("[a-z]", "x", answer))
