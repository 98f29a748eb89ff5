"""Arithmetic problems of one or two steps with small numbers, generated from a seed with their worked solutions."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .base import Task, make_task
from .rewards import Example, RewardComponent, Rewards, answer_found

SMALLEST, LARGEST_START = 2, 24  # bounds of the first number of a problem
LARGEST = 48  # upper bound of every result
WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text())
EQUATION = re.compile(r"(-?\d+) ?([+-]) ?(\d+) ?= ?(-?\d+)")
Step = tuple[str, int, int]  # sign, number, result


class Problem(NamedTuple):
    prompt: str
    solution: str  # steps and answer, the continuation of the prompt
    answer: str


def joined(kind: str) -> list[str]:
    """Join the parts of names of a kind in `words.json`: every combination, capitalised and shuffled."""
    words = ["".join(choice).capitalize() for choice in itertools.product(*(part.split() for part in WORDS[kind]))]
    words = list(dict.fromkeys(words))
    random.Random(len(words)).shuffle(words)
    return words


FIRST = joined("first")


def problem(rng: random.Random) -> Problem:
    """Make a problem of one or two steps."""
    name = FIRST[rng.randrange(60)]
    good = rng.choice(WORDS["small_goods"])
    first = value = rng.randint(SMALLEST, LARGEST_START)
    steps: list[Step] = []
    for _ in range(rng.choice((1, 2, 2))):
        up = value < 6 or (value < LARGEST - 1 and rng.random() < 0.5)
        by = rng.randint(1, min(12, LARGEST - value)) if up else rng.randint(1, min(12, value - 1))
        value = value + by if up else value - by
        steps.append(("+" if up else "-", by, value))
    return Problem(_question(rng, name, good, first, steps), _solution(rng, first, steps), str(value))


def _question(rng: random.Random, name: str, good: str, first: int, steps: list[Step]) -> str:
    if rng.random() < 0.3:
        term = " ".join([str(first), *(f"{sign} {by}" for sign, by, _ in steps)])
        return rng.choice(WORDS["tasks"]).format(term)
    events = [f"{rng.choice(WORDS['gains' if sign == '+' else 'losses'])} {by}" for sign, by, _ in steps]
    start = rng.choice(WORDS["starts"]).format(name, first, good)
    return f"{start} and {', then '.join(events)}. {rng.choice(WORDS['asks']).format(good=good)}"


def _solution(rng: random.Random, first: int, steps: list[Step]) -> str:
    values = [first, *(value for *_, value in steps)]
    sums = [f"{at} {sign} {by} = {value}" for at, (sign, by, value) in zip(values, steps, strict=False)]
    style = rng.random()
    if style < 0.4:
        return f" {', '.join(sums)}."
    if style < 0.7:
        return f" First {'. Then '.join(sums)}." if len(sums) > 1 else f" Now {sums[0]}."
    return f" {', '.join(sums)}. {rng.choice(WORDS['ends'])} {values[-1]}."


def problems(count: int, seed: int) -> list[Problem]:
    """Make problems with different prompts."""
    rng = random.Random(seed)
    by_prompt = {}
    while len(by_prompt) < count:
        candidate = problem(rng)
        by_prompt.setdefault(candidate.prompt, candidate)
    return list(by_prompt.values())


def arithmetic_task(held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make the task of solving 2,048 problems. It is for a model that has learned to add.

    The reward is 0.9 for the answer at the end (`answer_found`) and 0.1 for right steps (`steps_add_up`).
    """
    examples = [Example(p.prompt, p.answer) for p in problems(2048, seed=1)]
    components = (RewardComponent("answer", 0.9, answer_found), RewardComponent("steps", 0.1, steps_add_up))
    return make_task("arithmetic", examples, held_out, rewards, Rewards(components))


def steps_add_up(completion: str, answer: str) -> float:
    """1 if the completion has equations, all of them are true, and the last one results in the answer; else 0."""
    steps = [(int(a), int(b) if sign == "+" else -int(b), int(c)) for a, sign, b, c in EQUATION.findall(completion)]
    return float(bool(steps) and all(a + b == c for a, b, c in steps) and str(steps[-1][2]) == answer)
