"""Examples, and rewards: weighted sums of functions, each with a time limit. A call that fails scores 0."""

from __future__ import annotations

import difflib
import math
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

TURNS = "turns"  # the name under which rewards of turns are logged
LARGEST = 3.4028234663852886e38  # of a reward: the largest finite float32
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Prompt = str | list[dict[str, str]]  # text, or chat messages with "role" and "content"


class InputError(ValueError):
    """An option or a file cannot be used. The message names it, the expected value and the actual value."""


def nearest(name: object, names: Iterable[str]) -> str:
    """A suggestion for a message: " (is it 'x'?)" for the most similar of the names, or ""."""
    similar = difflib.get_close_matches(str(name), list(names), 1, 0.5)
    return f" (is it {similar[0]!r}?)" if similar else ""


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


class RewardComponent(NamedTuple):
    """A reward function with its name in the log and its weight in the sum."""

    name: str
    weight: float
    function: Callable[[str, str], float | None]  # function(completion, answer); None: does not apply


class Failure(NamedTuple):
    """A call of a reward function that failed."""

    component: str
    reason: str
    completion: str

    def __str__(self) -> str:
        return f"{self.component}: {self.reason}; completion {self.completion[:60]!r}"


class RewardBatch(NamedTuple):
    """The rewards of B completions."""

    total: list[float]  # B weighted sums of the components that apply, plus the rewards of the turns
    components: dict[str, list[float | None]]  # B unweighted rewards by component; None: the component does not apply
    failures: list[Failure]
    turns: list[list[float]] | None = None  # one reward per turn of each completion; None without a `turn_reward`

    @property
    def scored(self) -> list[bool]:
        """For each completion, whether any component applies. If none does, its total of 0 means nothing."""
        columns = list(self.components.values())
        return [not columns or any(column[i] is not None for column in columns) for i in range(len(self.total))]

    @property
    def mean(self) -> float:
        """The mean total of the scored completions, or 0 if there are none."""
        totals = [total for total, scored in zip(self.total, self.scored, strict=True) if scored]
        return sum(totals) / max(1, len(totals))

    @property
    def all_failed(self) -> list[Failure]:
        """For each component whose every call failed, its first failure."""
        first = {failure.component: failure for failure in reversed(self.failures)}
        counts = Counter(failure.component for failure in self.failures)
        return [first[name] for name in self.components if 0 < counts[name] == len(self.total)]

    def metrics(self, group_size: int) -> dict[str, float]:
        """Mean rewards, the share of groups without a signal, and counts of failures, by name.

        Completions to which no component applies are left out of the means, and a component that applies to none has no
        mean.
        """
        metrics = {"reward": self.mean, "groups_without_signal": self.share_of_equal_groups(group_size)}
        if len(self.components) > 1:
            applied = {name: [x for x in column if x is not None] for name, column in self.components.items()}
            metrics |= {f"reward/{name}": sum(x) / len(x) for name, x in applied.items() if x}
        if not all(self.scored):
            metrics["unscored"] = 1 - sum(self.scored) / len(self.scored)
        return metrics | ({"reward_failures": len(self.failures)} if self.failures else {})

    def share_of_equal_groups(self, group_size: int) -> float:
        """Share of groups whose scored totals are all equal, so that their advantages are 0."""
        totals = [total if scored else None for total, scored in zip(self.total, self.scored, strict=True)]
        groups = [set(totals[at : at + group_size]) - {None} for at in range(0, len(totals), group_size)]
        return sum(len(group) <= 1 for group in groups) / len(groups)


def joined(parts: Sequence[RewardBatch]) -> RewardBatch:
    """Concatenate batches of rewards of the same components, at least one."""
    components = {name: [x for part in parts for x in part.components[name]] for name in parts[0].components}
    turns = None if parts[0].turns is None else [row for part in parts for row in part.turns or []]
    total = [x for part in parts for x in part.total]
    return RewardBatch(total, components, [x for part in parts for x in part.failures], turns)


@dataclass(frozen=True)
class Rewards:
    """Weighted components and, for multi-turn tasks, a function that rewards each turn.

    A component that returns None does not apply to the completion: it adds nothing to the total. A call that raises an
    exception, takes longer than `timeout` seconds or returns anything but finite numbers is a failure, and its reward
    is 0. `turn_reward` must return a number for every turn.

    The time limit uses SIGALRM. It interrupts Python code and C code that checks for signals, such as `re`. Other C
    code is interrupted when it returns. Outside the main thread and on Windows there is no limit.

    Raises:
        InputError: two components have the same name, a weight is not finite, or `timeout` is not above 0.
    """

    components: tuple[RewardComponent, ...] = ()
    timeout: float = 10.0  # seconds per call
    turn_reward: Callable[[list[str], str], list[float]] | None = None  # function(turns, answer): one reward per turn

    def __post_init__(self) -> None:
        names = Counter([*(component.name for component in self.components), *([TURNS] if self.turn_reward else [])])
        if repeated := [name for name, count in names.items() if count > 1]:
            raise InputError(f"reward: expected components with different names, got two named {repeated[0]!r}")
        for name, weight, _ in self.components:
            if not math.isfinite(weight):
                raise InputError(f"reward: expected a finite weight of {name!r}, got {weight!r}")
        if not 0 < self.timeout < math.inf:
            raise InputError(f"reward_timeout: expected a number of seconds above 0, got {self.timeout!r}")

    def __call__(
        self, completions: Sequence[str], examples: Sequence[Example], turns: Sequence[list[str]] | None = None
    ) -> RewardBatch:
        """Reward B completions of B examples. `turns` has the policy's text of each turn of each completion."""
        failures: list[Failure] = []
        components: dict[str, list[float | None]] = {name: [] for name, *_ in self.components}
        of_turns: list[list[float]] = []
        for text, example, said in zip(completions, examples, turns or [[x] for x in completions], strict=True):
            for name, _, function in self.components:
                rewards = self._call(name, partial(function, text, example.answer), 1, text, failures, optional=True)
                components[name].append(None if rewards is None else rewards[0])
            if self.turn_reward is not None:
                call = partial(self.turn_reward, said, example.answer)
                of_turns.append(self._call(TURNS, call, len(said), text, failures) or [])
        weights = {name: weight for name, weight, _ in self.components}
        if self.turn_reward is not None:
            components[TURNS] = [sum(rewards) for rewards in of_turns]
            weights[TURNS] = 1.0
        total = [
            sum((weights[name] * reward for name, x in components.items() if (reward := x[i]) is not None), 0.0)
            for i in range(len(completions))
        ]
        return RewardBatch(total, components, failures, None if self.turn_reward is None else of_turns)

    def _call(
        self,
        name: str,
        function: Callable[[], Any],
        count: int,
        completion: str,
        failures: list[Failure],
        optional: bool = False,
    ) -> list[float] | None:
        """Call a function that returns `count` numbers, or one number if `count` is 1, with the time limit.

        If it fails, append to `failures` and return zeros. Return None if the function does and `optional` allows it.
        """
        try:
            with time_limit(self.timeout):
                result: Any = function()
                if result is None and optional:
                    return None
                values: list[Any] = result if isinstance(result, list) else [result]
                rewards = [float(value) for value in values]
            if len(rewards) == count and all(abs(x) <= LARGEST for x in rewards):
                return rewards
            reason = f"expected {count} finite float32 number{'s' * (count > 1)}, got {', '.join(map(str, rewards))}"
        except RewardTimeout:
            reason = f"no result after {self.timeout:g} s"
        except Exception as error:  # whatever the user's function raises is reported
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        failures.append(Failure(name, reason, completion))
        return [0.0] * count


class RewardTimeout(BaseException):
    """A reward function reached its time limit. Not an Exception, so that the function's own handlers let it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a RewardTimeout in the block after `seconds`. Works in the main thread of a system with SIGALRM.

    Elsewhere the block has no limit. The caller's own SIGALRM handler and timer are restored at the end.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise RewardTimeout

    previous = signal.signal(signal.SIGALRM, expire)
    started = time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the alarm arrives at the last moment
            signal.signal(signal.SIGALRM, previous)
            if remaining:
                signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - started), 1e-3), interval)


def letters_in_place(completion: str, answer: str) -> float:
    """Number of characters in the right place, divided by the longer length of completion and answer.

    Surplus characters cost as much as missing ones, so the model must learn to stop.
    """
    correct = sum(letter == expected for letter, expected in zip(completion, answer, strict=False))
    return correct / max(len(completion), len(answer), 1)


def answer_found(completion: str, answer: str) -> float:
    """1 if the completion equals the answer or ends with it, else 0.

    If the answer is a number, the last number of the completion must equal it in value: 1,200 is 1200.0. Otherwise the
    last words of the completion must equal it, ignoring final punctuation.
    """
    completion = completion.strip()
    if completion == answer:
        return 1.0
    if NUMBER.fullmatch(answer):
        numbers = NUMBER.findall(completion)
        values = [float(text.replace(",", "")) for text in (answer, *numbers[-1:])]
        return float(len(values) == 2 and values[0] == values[1])
    words = completion.rstrip(".!?\"')*").split()
    expected = answer.split()
    return float(words[-len(expected) :] == expected)
