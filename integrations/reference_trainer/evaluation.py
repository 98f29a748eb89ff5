"""`gspo eval`: reward the answers of a run's model, or of any model, greedy and sampled, with pass@k."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table

from ..tasks import Example, RewardBatch, RewardComponent, Rewards, Task, answer_found, nearest, task_by_name
from ..tasks.rewards import joined
from .checkpoints import replacing
from .config import InputError, TrainConfig
from .config_file import TYPES, convert, key_values, read_run, train_config
from .data import Reward, components_of, load_reward, read_examples
from .held_out import Estimate, check_failures, collect, columns, estimate, lines_of, pass_at_k, rewards_by_prompt
from .loading import ADAPTER, load_policy, pick_device, set_seed
from .policy import Policy
from .report import HELD_OUT, model_of_run
from .sampling import fitting

# Options of `gspo train` that apply to an evaluation. That of a run begins with the run's values.
SHARED = ("task", "data", "reward", "reward_timeout", "eval_prompts", "max_prompt_tokens", "max_new_tokens")
SHARED += ("chat_template_kwargs", "temperature", "top_k", "top_p", "min_p", "precision", "device", "threads")


@dataclass(frozen=True)
class EvalOptions:
    """The options of `gspo eval` that `gspo train` does not have."""

    n: int = 8  # sampled answers per prompt; 0: greedy answers only
    k: tuple[int, ...] | None = None  # of pass@k; None: powers of 2 up to n
    passing: float = 1.0  # an answer passes if its reward is at least this
    seed: int | None = None  # of the random numbers, and of a run's model; None: the run's first seed, or 0
    batch_size: int = 128  # answers that are generated together

    def __post_init__(self) -> None:
        for name, lowest in (("n", 0), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not lowest <= value < 2**32:
                raise InputError(f"{name}: expected a number from {lowest} to 2**32 - 1, got {value}")
        if self.k is not None and not all(1 <= k <= self.n for k in self.k):
            raise InputError(f"k: expected numbers from 1 to n={self.n}, got {list(self.k)}")

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k, in increasing order."""
        powers = (2**i for i in range(self.n.bit_length()))
        return tuple(powers) if self.k is None else tuple(sorted({*self.k}))


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` runs: a model, the task with the prompts as `held_out`, and options."""

    config: TrainConfig
    options: EvalOptions
    task: Task
    prompts: str  # where the prompts come from

    @property
    def seed(self) -> int:
        return self.options.seed or 0


@dataclass(frozen=True)
class EvalReport:
    """The rewards of a model, by reward ("total", then components if there are several) and measure.

    The measures are "greedy", and if there are samples "sampled" (their mean), "pass@1" and so on.
    """

    model: str
    prompts: int
    source: str  # of the prompts
    samples: int  # per prompt
    passing: float
    rewards: dict[str, dict[str, Estimate | None]]  # None: the reward applies to no prompt
    answers: list[dict[str, Any]]  # all answers with their rewards

    def table(self) -> Table:
        """A table with a line per measure and a column per reward."""
        title = f"{self.prompts} prompts ({self.source}), with 95% bootstrap intervals over the prompts"
        table = Table("", *self.rewards, title=title)
        for measure in next(iter(self.rewards.values())):
            label = f"mean of {self.samples} samples" if measure == "sampled" else measure
            table.add_row(label, *(str(of[measure] or "-") for of in self.rewards.values()))
        return table

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        names = ("model", "prompts", "source", "samples", "passing")
        rewards = {name: {key: x and x._asdict() for key, x in of.items()} for name, of in self.rewards.items()}
        return {**{name: getattr(self, name) for name in names}, "rewards": rewards}

    def write_answers(self, path: Path) -> None:
        """Write all answers to a jsonl file."""
        with replacing(path) as partial:
            partial.write_text("".join(f"{json.dumps(x, default=str)}\n" for x in self.answers), encoding="utf-8")


def read_evaluation(source: str, texts: Sequence[str] = (), reward: Reward | None = None) -> Evaluation:
    """Prepare the evaluation of a run's model, with the run's prompts and rewards, or of another model.

    Args:
        source: the folder of a run, or a folder or hub id of a model or adapter.
        texts: options as key=value.
        reward: instead of the option `reward`.

    Raises:
        InputError: an option, the run, the prompts or a reward cannot be used.
    """
    folder = convert("source", "Path", source)
    given = key_values(convert("texts", "tuple[str, ...]", texts))
    types = {f.name: str(f.type) for f in fields(EvalOptions)} | {name: TYPES[name] for name in SHARED}
    for name in given:
        if name not in types:
            known = f"the options are {', '.join(sorted(types))}"
            raise InputError(f"{name}: there is no such option of gspo eval{nearest(name, types)}; {known}")
    own = {name: convert(name, types[name], x) for name, x in given.items() if name not in SHARED and x is not None}
    options = EvalOptions(**own)
    shared = {"model": source} | {name: x for name, x in given.items() if name in SHARED}
    prompts = None
    from_python = []
    if (folder / "metrics.jsonl").is_file():
        then, record = read_run(folder)
        options = replace(options, seed=then["seeds"][0] if options.seed is None else options.seed)
        shared = options_of_run(folder, then, record, options, shared)
        prompts = None if "task" in given else folder / HELD_OUT
        from_python = record["from_python"]
    config = train_config(**shared)
    components = tuple(map(load_reward, config.reward)) if reward is None else components_of(reward)
    if from_python and not components:
        raise InputError(
            f"reward: expected reward=file.py:function, because {folder} was started with "
            f"{' and '.join(f'{x}=' for x in from_python)} from Python, got none"
        )
    task = task_by_name(config.task, config.eval_prompts, components) if config.task else None
    rewards = task.rewards if task else Rewards(components or (RewardComponent("answer_found", 1.0, answer_found),))
    if path := config.data or prompts:
        examples = read_examples("data", path, needs_answer=not components and task is None)
        if not examples:
            raise InputError(f"data {path}: expected at least 1 prompt, got 0")
        examples = examples[: config.eval_prompts] if "eval_prompts" in given else examples
        chosen = str(path)
    elif task:
        examples, chosen = task.held_out, f"{config.task}: {task.split}"
    elif not folder.is_dir():
        raise InputError(f"{source}: there is no such folder; a model of the hub needs data=FILE or task=NAME too")
    else:
        raise InputError(f"data: expected data=FILE or task=NAME with the prompts to evaluate {source} on, got neither")
    rewards.check(examples)
    rewards = replace(rewards, timeout=config.reward_timeout)
    return Evaluation(config, options, Task("evaluation", (), examples, rewards), chosen)


def options_of_run(
    folder: Path, then: dict[str, Any], record: dict[str, Any], options: EvalOptions, given: dict[str, Any]
) -> dict[str, Any]:
    """Combine the run's options for evaluation with the options in `given`, which take precedence."""
    model = model_of_run(folder, then["seeds"], options.seed)
    shared = {name: then[name] for name in SHARED if name not in ("data", "eval_prompts")}
    if (model / ADAPTER).is_file():
        shared["lora_rank"] = then["lora_rank"]
    has_task = not then["data"] and "task" not in record["from_python"] and "data" not in given
    shared["task"] = (then["task"] or "sorting") if has_task else ""
    return {**shared, **given, "model": model}


def evaluate(
    evaluation: Evaluation, say: Callable[[str], None] = print, tick: Callable[[int, int], None] | None = None
) -> EvalReport:
    """Sample and reward the answers of a model.

    Args:
        say: prints a line about prompts that are left out and reward calls that fail.
        tick: called with the numbers of finished answers and of all answers.

    Raises:
        InputError: the model cannot be loaded, or the prompts do not fit it.
        TrainingError: every call of a reward function failed.
    """
    config, options = evaluation.config, evaluation.options
    if config.threads:
        torch.set_num_threads(config.threads)
    set_seed(evaluation.seed)
    policy = load_policy(str(config.model), config, merge=False)  # merged, it would be rounded to the precision
    policy.model.to(pick_device(config.device))
    task, left_out = fitting(config, policy, evaluation.task)
    if left_out:
        say(f"max_prompt_tokens={config.max_prompt_tokens}: {left_out} prompts are left out")
    count = len(task.held_out)
    done = 0
    answers: list[dict[str, Any]] = []
    measures: dict[str, dict[str, Estimate | None]] = {}
    for kind, n in (("greedy", 0), *([("sampled", options.n)] if options.n else [])):
        parts = []
        for sampled, rewards in batches_of(evaluation, policy, task, n):
            answers += [{"kind": kind, **line} for line in lines_of(sampled, rewards)]
            parts.append(rewards)
            done += len(sampled)
            if tick is not None:
                tick(done, count * (1 + options.n))
        together = joined(parts)
        check_failures(together, f"the {kind} answers", say)
        for suffix, values in columns(rewards_by_prompt(together)).items():
            of_reward = measures.setdefault(suffix.removeprefix("/") or "total", {})
            of_reward |= of_samples(values, options) if n else {"greedy": estimate(values)}
    return EvalReport(str(config.model), count, evaluation.prompts, options.n, options.passing, measures, answers)


def batches_of(evaluation: Evaluation, policy: Policy, task: Task, n: int) -> Iterator[tuple[list[Any], RewardBatch]]:
    """Sample answers in batches, `n` per prompt; 0: one greedy answer. An answer does not depend on the batch size."""
    config, options = evaluation.config, evaluation.options
    examples: Sequence[Example] = task.held_out
    size = max(1, options.batch_size // max(1, n))
    for start in range(0, len(examples), size):
        part = examples[start : start + size]
        sampling: dict[str, Any] = {"group_size": n or 1, "temperature": config.temperature if n else None}
        if n:
            sampling["seeds"] = [(evaluation.seed, 0, start + i) for i in range(len(part))]
            sampling["truncation"] = config.truncation
        yield collect(config, policy, task, part, max_new_tokens=config.max_new_tokens, **sampling)


def of_samples(values: Sequence[float | None], options: EvalOptions) -> dict[str, Estimate | None]:
    """The mean of sampled answers, and pass@k. Prompts with fewer than k answers that have the reward do not count.

    Args:
        values: the rewards of n answers to the first prompt, then to the second, and so on.
    """
    by_prompt = [values[at : at + options.n] for at in range(0, len(values), options.n)]
    known = [[x for x in of_prompt if x is not None] for of_prompt in by_prompt]
    measures = {"sampled": estimate([fmean(x) if x else None for x in known])}
    for k in options.ks:
        passed = [(sum(x >= options.passing for x in of_prompt), len(of_prompt)) for of_prompt in known]
        measures[f"pass@{k}"] = estimate([pass_at_k(c, n, k) if n >= k else None for c, n in passed])
    return measures
