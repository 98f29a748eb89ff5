"""Held-out rewards: means with bootstrap intervals over prompts, their change since the start of a run, and pass@k."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, NamedTuple

import numpy as np

from ..tasks import Example, RewardBatch, Task
from ..tasks.base import digest_of
from .chat import encode
from .config import TrainConfig
from .data import code_of
from .policy import Policy
from .sampling import Answer, answers_to, end_tokens
from .update import TrainingError, autocast

RESAMPLES = 2000
FEWEST = 10  # prompts; with fewer, the interval is too narrow to decide anything
Row = dict[str, Any]


PARTS = ("", "_low", "_high", "_prompts")  # the endings of metrics: the fields of an Estimate


class Estimate(NamedTuple):
    """A mean over prompts, with its 95% interval."""

    mean: float
    low: float
    high: float
    prompts: int  # to which the reward applies

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def signed(self) -> str:
        """The text of a difference."""
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """The mean of the values, one per prompt, and its percentile bootstrap interval over the prompts.

    Values of None are left out. Without any value, return None. The resamples are the same in every call.
    """
    known = np.array([x for x in values if x is not None], dtype=np.float64)
    count = len(known)
    if not count:
        return None
    generator = np.random.default_rng(0)
    blocks = [known[generator.integers(count, size=(100, count))].mean(1) for _ in range(RESAMPLES // 100)]
    low, high = np.quantile(np.concatenate(blocks), [0.025, 0.975])
    return Estimate(known.mean().item(), low.item(), high.item(), count)


def difference(values: Sequence[float | None], start: Sequence[float | None]) -> Estimate | None:
    """The mean of the differences prompt by prompt, and its interval. Prompts that lack a value do not count."""
    pairs = zip(values, start, strict=True)
    return estimate([None if x is None or before is None else x - before for x, before in pairs])


def verdict(change: Estimate) -> str:
    """ "better" or "worse" if the interval of the paired difference excludes 0, otherwise "not decided"."""
    if change.prompts < FEWEST:
        return "not decided"
    return "better" if change.low > 0 else "worse" if change.high < 0 else "not decided"


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k answers to a prompt is correct.

    1 - C(n - c, k) / C(n, k) for c correct answers of n >= k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1 - comb(samples - correct, k) / comb(samples, k)


def rewards_by_prompt(rewards: RewardBatch) -> Row:
    """The rewards of one answer per prompt, for metrics.jsonl. The total is None if no component applies."""
    total = [x if scored else None for x, scored in zip(rewards.total, rewards.scored, strict=True)]
    return {"total": total, "components": rewards.components}


def defined_by(config: TrainConfig, policy: Policy, task: Task) -> Row:
    """What defines the rewards of an evaluation, except the policy's weights, by a name for messages.

    The token ids of the prompts also cover tokenizer, chat template and `max_prompt_tokens`. Sampling options are left
    out, because evaluations are greedy.
    """
    rewards = task.rewards
    return {
        **{f"code of the reward {x.name}": code_of(x.function) for x in rewards.components},
        "weights of rewards": {x.name: x.weight for x in rewards.components},
        "reward_timeout": rewards.timeout,
        "max_new_tokens": config.max_new_tokens,
        "tokens that end an answer": sorted(end_tokens(policy)),
        "encoding of the held-out prompts": digest_of(encode(policy, [example.prompt for example in task.held_out])),
    }


def changes_between(then: Row, now: Row) -> str:
    """The names of what differs between two results of `defined_by`; "" if nothing does."""
    return ", ".join(name for name in {**then, **now} if then.get(name) != now.get(name))


def held_out_metrics(now: Row, start: Row | None) -> Row:
    """The metrics of an evaluation, by their names in metrics.jsonl.

    Args:
        now: of `rewards_by_prompt`.
        start: the same before the first update; None: report no change.
    """
    metrics: Row = {}
    for suffix, values in columns(now).items():
        metrics |= named("eval_reward", suffix, estimate(values))
        if start is not None and suffix in columns(start):
            metrics |= named("eval_change", suffix, difference(values, columns(start)[suffix]))
    return metrics


def columns(rewards: Row) -> dict[str, list[float | None]]:
    """Rewards by prompt, by the suffix of their metrics: the total, and components if there are several."""
    components = rewards["components"]
    return {"": rewards["total"]} | ({f"/{name}": x for name, x in components.items()} if len(components) > 1 else {})


def named(name: str, suffix: str, of: Estimate | None) -> Row:
    """The metrics of an estimate, such as eval_reward_low/exact for the suffix "/exact"."""
    return {} if of is None else {f"{name}{part}{suffix}": x for part, x in zip(PARTS, of, strict=True)}


def read_estimate(row: Mapping[str, Any], name: str, suffix: str) -> Estimate | None:
    """The estimate that `named` has written, or None."""
    if f"{name}_low{suffix}" not in row:
        return None
    return Estimate(*(row[f"{name}{part}{suffix}"] for part in PARTS))


def suffixes(row: Mapping[str, Any]) -> list[str]:
    """Suffixes of the eval_reward columns of metrics.jsonl: "" for the total, then "/name" for each component."""
    return ["", *(key.removeprefix("eval_reward") for key in row if key.startswith("eval_reward/"))]


@dataclass(frozen=True)
class HeldOut:
    """A held-out reward, the total or one component, before the first update and at the last evaluation."""

    name: str
    start: Estimate | None  # None: the reward applied to no prompt, or the run did not have it
    end: Estimate | None
    change: Estimate | None  # of the differences prompt by prompt; None: start and end cannot be compared

    @property
    def verdict(self) -> str:
        """ "better", "worse", "not decided", or "not comparable"."""
        return "not comparable" if self.change is None else verdict(self.change)

    def cells(self) -> list[str]:
        """Name, start, end, change, number of prompts and verdict, for a table."""
        change = "-" if self.change is None else self.change.signed()
        known = self.change or self.end or self.start
        prompts = str(known.prompts if known else 0)
        return [self.name, str(self.start or "-"), str(self.end or "-"), change, prompts, self.verdict]


def held_out_results(rows: Sequence[Row]) -> tuple[HeldOut, ...]:
    """The held-out rewards of a seed in its first and its last evaluation: the total, then each component.

    Args:
        rows: of metrics.jsonl, from step 0 on.
    """
    first, last = rows[0], [row for row in rows if "eval_reward" in row][-1]
    return tuple(
        HeldOut(
            suffix.removeprefix("/") or "total",
            read_estimate(first, "eval_reward", suffix),
            read_estimate(last, "eval_reward", suffix),
            read_estimate(last, "eval_change", suffix),
        )
        for suffix in suffixes(last)
    )


def sentence(results: Sequence[HeldOut]) -> str:
    """Say whether the held-out reward rose. The verdict follows from the interval of the paired difference."""
    total, *components = results
    if total.change is None or total.start is None or total.end is None:
        return f"{total.verdict}: what defines the held-out rewards has changed, or no held-out prompt has one"
    mean, low, high = (f"{x:+.3f}" for x in total.change[:3])
    prompts = total.change.prompts
    start, end = f"{total.start.mean:.3f}", f"{total.end.mean:.3f}"
    text = f"{total.verdict}: the held-out reward went from {start} to {end}, a change of {mean}"
    text += f" (95% interval {low} to {high}, {prompts} prompts)"
    if prompts < FEWEST:
        text += f". At least {FEWEST} prompts are needed to decide"
    for word in ("worse", "better"):
        named = [x.name for x in components if x.verdict == word]
        if named and word != total.verdict:
            text += f". {word.capitalize()}: {', '.join(named)}"
    return text


def collect(
    config: TrainConfig, policy: Policy, task: Task, examples: Sequence[Example], **options: Any
) -> tuple[list[Answer], RewardBatch]:
    """Sample answers and compute their rewards. Takes the options of `answers_to`."""
    with autocast(config, policy):
        answers = answers_to(policy, examples, **options)
    return answers, task.rewards([answer.text for answer in answers], [answer.example for answer in answers])


def lines_of(answers: Sequence[Answer], rewards: RewardBatch) -> Iterator[Row]:
    """Answers with their rewards, for a jsonl file. A reward of None: no component applies."""
    for i, answer in enumerate(answers):
        example = answer.example
        yield {
            "prompt": example.prompt,
            "answer": example.answer,
            "completion": answer.text,
            "reward": rewards.total[i] if rewards.scored[i] else None,
            "components": {name: values[i] for name, values in rewards.components.items()},
        }


def check_failures(rewards: RewardBatch, when: str, say: Callable[[str], object], allowed: bool = False) -> None:
    """Print one of the calls of reward functions that failed.

    Raises:
        TrainingError: all calls of a component failed, unless `allowed`.
    """
    for failure in [] if allowed else rewards.all_failed:
        failed = f"the reward {failure.component!r} failed for all {len(rewards.total)} answers"
        raise TrainingError(f"{failed} in {when}. One of them: {failure}")
    for failure in rewards.failures[:1]:
        count = len(rewards.failures)
        say(f"{count} reward call{'s' * (count > 1)} failed in {when}. One of them: {failure}")
