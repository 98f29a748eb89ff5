"""Adding with a calculator: a dialogue in which every turn has its own reward.

The prompt "2+7-4 by calculator:" has this dialogue. The calculator computes one operation per turn; its replies are
masked, so the policy is not trained on them.

    policy      2+7
    calculator  =9;
    policy      9-4
    calculator  =5;
    policy      5
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from .base import Task, make_task
from .rewards import Example, RewardComponent, Rewards, letters_in_place

CALL = re.compile(r"(-?\d{1,9}) ?([+*-]) ?(-?\d{1,9})")
PROBLEMS = 640
MAX_TURNS = 3
PROMPT = " by calculator:"


def calculator_task(held_out: int, rewards: Sequence[RewardComponent] = ()) -> Task:
    """Make the task of computing one or two sums or differences of one-digit numbers by calling a calculator.

    It has 640 prompts. The answer of an example lists the expected turns: "2+7;9-4;5". The reward of a turn is
    `letters_in_place` divided by the number of expected turns, so that the reward of a dialogue is at most 1.
    `rewards` replace these rewards. They get the policy's turns, joined by newlines.
    """
    generator = random.Random(0)
    by_prompt = {}
    while len(by_prompt) < PROBLEMS:
        example = problem(generator)
        by_prompt.setdefault(example.prompt, example)
    options = dict(reply=calculate, max_turns=MAX_TURNS, characters="".join(sorted(set(PROMPT + "0123456789+-=;"))))
    examples = list(by_prompt.values())
    return make_task("calculator", examples, held_out, rewards, Rewards(turn_reward=turns_in_place), **options)


def problem(generator: random.Random) -> Example:
    """Make a problem of one or two operations."""
    value = generator.randint(1, 9)
    prompt = str(value)
    turns = []
    for _ in range(generator.choice((1, 2, 2, 2))):
        sign, number = generator.choice("+-"), generator.randint(1, 9)
        prompt += f"{sign}{number}"
        turns.append(f"{value}{sign}{number}")
        value = value + number if sign == "+" else value - number
    return Example(prompt + PROMPT, ";".join([*turns, str(value)]))


def calculate(turn: str, _: Example) -> str | None:
    """Reply to a call, such as "2+7", with its result, "=9;". Any other text ends the dialogue."""
    if (call := CALL.fullmatch(turn.strip())) is None:
        return None
    left, sign, right = int(call[1]), call[2], int(call[3])
    results = {"+": left + right, "-": left - right, "*": left * right}
    return f"={results[sign]};"


def turns_in_place(turns: list[str], answer: str) -> list[float]:
    """The reward of each turn. Turns beyond the expected ones get 0."""
    expected = answer.split(";")
    scores = [letters_in_place(turn.replace(" ", ""), e) / len(expected) for turn, e in zip(turns, expected)]  # noqa: B905
    return scores + [0.0] * (len(turns) - len(scores))
