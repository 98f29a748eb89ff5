"""Sorting letters: a task that a model with random weights can learn from rewards alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from .base import Task, make_task
from .rewards import Example, RewardComponent, Rewards, letters_in_place

LETTERS = "abcdef"
IN_PLACE = Rewards((RewardComponent("letters_in_place", 1.0, letters_in_place),))


def sorting_task(held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make the task of sorting three to five letters: "sort dbca:" -> "abcd".

    It has 648 prompts, of which `held_out` are kept for evaluation.
    """
    generator = random.Random(0)
    examples: list[Example] = []
    for length in (3, 4, 5):
        words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=length)]
        # Take the same number of words of each length. Otherwise nearly all words would have the greatest length.
        words = generator.sample(words, len(LETTERS) ** 3)
        examples += [Example(f"sort {word}:", "".join(sorted(word))) for word in words]
    return make_task("sorting", examples, held_out, rewards, IN_PLACE, characters=LETTERS + "sort :")


def long_sorting_task(held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make the task of sorting 64 to 80 letters, so that answers are long. It has 2,048 prompts.

    Some letters are more frequent than others, in each word differently, so the model must count them.
    """
    generator = random.Random(0)
    examples: list[Example] = []
    for _ in range(2048):
        weights = [generator.random() for _ in LETTERS]
        word = "".join(generator.choices(LETTERS, weights, k=generator.randint(64, 80)))
        examples.append(Example(f"sort {word}:", "".join(sorted(word))))
    return make_task("long-sorting", examples, held_out, rewards, IN_PLACE, characters=LETTERS + "sort :")
