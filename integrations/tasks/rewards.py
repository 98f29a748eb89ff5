"""Examples, and rewards: weighted sums of functions, each with a time limit. A call that fails scores 0."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

LARGEST = 3.4028234663852886e38  # of a reward: the largest finite float32
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
Prompt = str | list[dict[str, str]]  # text, or chat messages with "role" and "content"


class InputError(ValueError):
    """An option or a file cannot be used. The message names it, the expected value and the actual value."""


def nearest(name: object, names: Iterable[str]) -> str:
    """A suggestion for a message: " (is it 'x'?)" for the most similar of the names, or ""."""
    similar = difflib.get_close_matches(str(name), list(names), 1, 0.5)
    return f" (is it {similar[0]!r}?)" if similar else ""


@dataclass(frozen=True)
class Example:
    """A prompt, as text or chat messages, with the answer and the other columns of its row, for the rewards."""

    prompt: Prompt
    answer: Any = None  # text or a number, or another JSON value if the rewards take one; None: the row has none
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """The prompt as one text. Two examples with the same key have the same prompt."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)

    @property
    def row(self) -> dict[str, Any]:
        """The columns that a reward may ask for, by name: prompt, answer (unless it is None) and all others."""
        answer = {} if self.answer is None else {"answer": self.answer}
        return {**self.columns, "prompt": self.prompt, **answer}


class RewardComponent(NamedTuple):
    """A reward function with its name in the log and its weight in the sum. See `Parameters` for its arguments."""

    name: str
    weight: float
    function: Callable[..., Any]


class Failure(NamedTuple):
    """A call of a reward function that failed."""

    component: str
    reason: str
    completion: str

    def __str__(self) -> str:
        return f"{self.component}: {self.reason}; completion {self.completion[:60]!r}"


class RewardBatch(NamedTuple):
    """The rewards of B completions."""

    total: list[float]  # B weighted sums of the components that apply
    components: dict[str, list[float | None]]  # B unweighted rewards by component; None: the component does not apply
    failures: list[Failure]

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
    total = [x for part in parts for x in part.total]
    return RewardBatch(total, components, [x for part in parts for x in part.failures])


class Parameters(NamedTuple):
    """Which arguments a reward function asks for.

    A function of one completion has a parameter `completion` (or else its first parameter is the completion), and may
    have the parameters `prompt`, `answer` and any other column of the row. It returns a number or None. A function in
    the form of TRL has a parameter `completions`, gets a list for each parameter, and returns a list. `**kwargs`
    get all columns that are not parameters. A function with `*args` is called as function(completion, answer).
    """

    completion: str  # the name of the parameter of the completion, or "": call function(completion, answer)
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # columns whose parameters have a default
    takes_any: bool = False  # has **kwargs
    takes_lists: bool = False

    def columns(self, example: Example) -> dict[str, Any]:
        """The columns of an example by the names that the function has for them."""
        row = example.row
        return {"prompts" if self.takes_lists and name == "prompt" else name: x for name, x in row.items()}

    def of_one(self, completion: str, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for one completion."""
        if not self.completion:
            return (completion, example.answer), {}
        row = self.columns(example)
        names = row if self.takes_any else [name for name in self.required + self.optional if name in row]
        return (), {**{name: row[name] for name in names}, self.completion: completion}

    def of_all(self, completions: Sequence[str], examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Keyword arguments for all completions. As in TRL, the completion of a chat is a list of one message."""
        rows = [self.columns(example) for example in examples]
        present = dict.fromkeys(name for row in rows for name in row)
        names = present if self.takes_any else [name for name in self.required + self.optional if name in present]
        said = [
            text if isinstance(example.prompt, str) else [{"role": "assistant", "content": text}]
            for text, example in zip(completions, examples, strict=True)
        ]
        return {**{name: [row.get(name) for row in rows] for name in names}, self.completion: said}


def parameters_of(component: RewardComponent) -> Parameters:
    """Read the signature of a reward function. Raise an InputError if it has no parameter for the completion."""
    name, _, function = component
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if any(x.kind in (x.VAR_POSITIONAL, x.POSITIONAL_ONLY) for x in parameters):
        return Parameters("")
    named = [x for x in parameters if x.kind is not x.VAR_KEYWORD]
    names = [x.name for x in named]
    takes_any = len(named) < len(parameters)
    takes_lists = "completions" in names or "prompts" in names
    completion = "completions" if takes_lists else "completion"
    if completion not in names and not takes_lists and names and names[0] not in ("prompt", "answer"):
        completion = names[0]
    elif completion not in names and not takes_any:
        expected = "expected a function with a parameter for the completion, such as (completion, answer)"
        raise InputError(f"reward {name!r}: {expected}, got {signature}")
    others = [x for x in named if x.name != completion]
    required = tuple(x.name for x in others if x.default is x.empty)
    optional = tuple(x.name for x in others if x.default is not x.empty)
    return Parameters(completion, required, optional, takes_any, takes_lists)


@dataclass(frozen=True)
class Rewards:
    """Weighted components.

    A component that returns None does not apply to the completion: it adds nothing to the total. A call that raises an
    exception, takes longer than `timeout` seconds or returns anything but finite numbers is a failure, and its reward
    is 0. A function in the form of TRL has `timeout` seconds per completion.

    The time limit uses SIGALRM. It interrupts Python code and C code that checks for signals, such as `re`. Other C
    code is interrupted when it returns. Outside the main thread and on Windows there is no limit.

    Raises:
        InputError: two components have the same name, a weight is not finite, or `timeout` is not above 0.
    """

    components: tuple[RewardComponent, ...] = ()
    timeout: float = 10.0  # seconds per completion

    def __post_init__(self) -> None:
        names = Counter(component.name for component in self.components)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise InputError(f"reward: expected components with different names, got two named {repeated[0]!r}")
        for name, weight, _ in self.components:
            if not math.isfinite(weight):
                raise InputError(f"reward: expected a finite weight of {name!r}, got {weight!r}")
        if not 0 < self.timeout < math.inf:
            raise InputError(f"reward_timeout: expected a number of seconds above 0, got {self.timeout!r}")

    def check(self, examples: Sequence[Example]) -> None:
        """Check that every example has the columns that the reward functions ask for.

        Raises:
            InputError: a function has no parameter for the completion, or asks for a column that an example lacks.
        """
        for component in self.components:
            parameters = parameters_of(component)
            rows = [parameters.columns(example) for example in examples]
            for name in parameters.required:
                lacking = [row for row in rows if name not in row]
                if lacking:
                    given = "completions, prompts" if parameters.takes_lists else "completion, prompt"
                    raise InputError(
                        f"reward {component.name!r}: expected parameters named {given}, answer or another column of "
                        f"each row, got {name!r}, which {len(lacking)} of {len(rows)} rows lack; the columns of one of "
                        f"them are {', '.join(sorted(lacking[0]))}{nearest(name, lacking[0])}"
                    )

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> RewardBatch:
        """Reward B completions of B examples."""
        total = [0.0] * len(completions)
        components: dict[str, list[float | None]] = {}
        failures: list[Failure] = []
        for component in self.components:
            values = components[component.name] = []
            for i, (value, reason) in enumerate(self._results(component, completions, examples)):
                if reason:
                    failures.append(Failure(component.name, reason, completions[i]))
                    value = 0.0
                values.append(value)
                total[i] += component.weight * (value or 0.0)
        return RewardBatch(total, components, failures)

    def _results(
        self, component: RewardComponent, completions: Sequence[str], examples: Sequence[Example]
    ) -> list[tuple[float | None, str]]:
        """For each completion its reward and "", or None and the reason why the call failed."""
        parameters = parameters_of(component)
        count = len(completions)
        if not parameters.takes_lists:
            calls = [parameters.of_one(text, example) for text, example in zip(completions, examples, strict=True)]
            results = [attempt(self.timeout, partial(component.function, *args), **named) for args, named in calls]
        elif completions:
            columns = parameters.of_all(completions, examples)
            values, reason = attempt(self.timeout * count, lambda: list(component.function(**columns)))
            if not reason and len(values) != count:
                reason = f"expected a list of {count} rewards, got {len(values)}"
            results = [(None, reason)] * count if reason else [(value, "") for value in values]
        else:
            results = []
        return [(value, reason) if reason else attempt(self.timeout, number, value) for value, reason in results]


def attempt(seconds: float, function: Callable[..., Any], /, *args: Any, **options: Any) -> tuple[Any, str]:
    """Call a function with a time limit. Return its result and "", or None and the reason why it failed."""
    try:
        with time_limit(seconds):
            return function(*args, **options), ""
    except RewardTimeout:
        return None, f"no result after {seconds:g} s"
    except Exception as error:  # whatever the user's function raises is reported
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"


def number(reward: Any) -> float | None:
    """Convert a reward to a float. None stays None."""
    if reward is None:
        return None
    if not abs(x := float(reward)) <= LARGEST:
        raise ValueError(f"expected a finite float32 number, got {x}")
    return x


class RewardTimeout(BaseException):
    """A reward function reached its time limit. Not an Exception, so that the function's own handlers let it pass."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a RewardTimeout in the block after `seconds`. Works in the main thread of a system with SIGALRM.

    Elsewhere the block has no limit. At the end the caller's SIGALRM handler is restored, and its timer goes on.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise RewardTimeout

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, min(seconds, 1e9))  # the system's clock may not reach further
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the alarm arrives at the last moment
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)


def letters_in_place(completion: str, answer: str) -> float:
    """Number of characters in the right place, divided by the longer length of completion and answer.

    Surplus characters cost as much as missing ones, so the model must learn to stop.
    """
    correct = sum(letter == expected for letter, expected in zip(completion, answer, strict=False))
    return correct / max(len(completion), len(answer), 1)


def answer_found(completion: str, answer: str | float) -> float:
    """1 if the completion equals the answer or ends with it, else 0.

    If the answer is a number, the last number of the completion must equal it in value: 1,200 is 1200.0. Otherwise the
    last words of the completion must equal it, ignoring final punctuation.
    """
    completion, answer = completion.strip(), str(answer)
    if completion == answer:
        return 1.0
    if NUMBER.fullmatch(answer):
        numbers = NUMBER.findall(completion)
        values = [Decimal(text.replace(",", "")) for text in (answer, *numbers[-1:])]
        return float(len(values) == 2 and values[0] == values[1])
    words = completion.rstrip(".!?\"')*").split()
    expected = answer.split()
    return float(words[-len(expected) :] == expected)
