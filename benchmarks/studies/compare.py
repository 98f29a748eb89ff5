"""Train with several objectives over a grid of settings, from the same initial weights, prompts and seeds.

Each training is a `Learner` of the reference trainer. Every arm samples its own answers and clips in its own training.
Metrics are recorded for each update of a rollout; in the first one, the ratio is always 1. `scores.py` defines what is
compared. `run` is the command `gspo compare`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gspo_kernels.extras import needs
from gspo_kernels.objective import Objective
from gspo_kernels.sampler_mismatch import RolloutCorrection

from .. import bench_table, measure
from .scores import ALONE, FULL_LOGITS, MIS, ROUNDED_SAMPLER, SAMPLER, STUDENT, TEACHER, TIS, WINDOW, means, rows

with needs("gspo compare", "train", "transformers", "tokenizers"):
    from gspo_kernels.integrations.reference_trainer.config import InputError, Step, TrainConfig
    from gspo_kernels.integrations.reference_trainer.policy import Policy, demo_policy
    from gspo_kernels.integrations.reference_trainer.trainer import Learner
    from gspo_kernels.integrations.reference_trainer.update import NotFiniteError
    from gspo_kernels.integrations.tasks import Task, batches, task_by_name

Record = dict[str, Any]
Tick = Callable[[str], object]
METRICS = ("clip_fraction", "token_clip_fraction", "entropy", "token_log_ratio_std", "sequence_log_ratio_std")
METRICS += ("rollout_weight_mean", "distillation")  # only with a correction, only with a teacher
CURVES = ("reward", "answer_tokens")
PARTS = 4  # of a training of the study "long"; curves have the mean over the rollouts of each
BODIES = ("bf16", "autocast", "fp16", "fp16-autocast")  # values of TrainConfig.precision, besides fp32
WINDOWS: dict[str, tuple[float, ...]] = {"gspo": (10, 30), "grpo": (0.1, 0.01)}  # factors of the paper's windows
LONGEST = {"sorting": 7, "long-sorting": 96}  # most tokens of an answer
WARM_UP: Record = dict(steps=60, batch=24, learning_rate=2e-3)  # supervised steps before the study "long"
# The teacher of the study "teachers": GSPO for more rollouts, from other weights than the students'
TAUGHT: Record = dict(steps=400, learning_rate=1.5e-3, updates_per_rollout=4, eval_every=100)
TEACHER_SEED = 100
COEFFICIENTS = (0.3, 1.0)  # of the divergence from the teacher
SETTINGS = ("task", "steps", "prompts_per_step", "group_size", "eval_every")
FOLDER = Path("runs") / "compare"


class Study(NamedTuple):
    """A study's task, its grid of settings, and what it trains unless the command's options say otherwise."""

    objectives: str = "gspo,grpo"
    task: str = "sorting"
    steps: int = 40
    learning_rates: tuple[float, ...] = (5e-4, 1.5e-3, 5e-3)
    updates: tuple[int, ...] = (4, 8)  # optimizer updates per rollout


STUDIES = {
    "dense": Study(),
    "rounding": Study(learning_rates=(1.5e-3,), updates=(4,)),
    "long": Study("gspo,grpo,luspo", "long-sorting", 14, (5e-4,), (4,)),
    "teachers": Study("gspo", updates=(4,)),
}


class Arm(NamedTuple):
    """An objective to train with, and the options of `TrainConfig` that only this arm has."""

    objective: Objective
    options: Record = {}  # noqa: RUF012 - never changed
    full_logits: bool = False  # instead of our head


class FullLogits(Policy):
    """A policy that makes all logits in the dtype of its body, as plain PyTorch does.

    The loss gets them as hidden states, with a head that is the identity. So it computes exactly their softmax.
    """

    def run(self, rollout: Any, with_head: Callable[..., Any], train: bool = False) -> tuple[Any, Any]:
        def with_logits(hidden: Tensor, head: nn.Module, **options: Any) -> Any:
            logits = F.linear(hidden, head.get_parameter("weight"))
            return with_head(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), **options)

        return super().run(rollout, with_logits, train)


def config_of(task: str, steps: int) -> TrainConfig:
    """Settings that all arms share: the demo of `gspo train`, with fewer prompts and more evaluations.

    Answers with advantage 0 run too, so that all metrics cover all answers. Long answers are evaluated at the end only.
    """
    is_long = task == "long-sorting"
    return TrainConfig(
        task=task,
        steps=steps,
        prompts_per_step=8 if is_long else 16,
        max_new_tokens=LONGEST[task],
        eval_every=steps if is_long else 5,
        eval_prompts=64 if is_long else 128,
        warmup_updates=min(12, 4 * steps) if is_long else 0,
        skip_zero_advantage=False,
        device="cpu",
        save=False,
    )


def arms_of(names: Sequence[str], study: str, config: TrainConfig) -> dict[str, Arm]:
    """Return the arms of a study. `names` are presets of `Objective`; "grpo" gets the window of the GSPO paper.

    "rounding": every objective is trained in fp32, with a body in each of `BODIES`, and in fp32 with a sampler whose
    weights are rounded to bf16. The answers of this sampler get old log-probs from the trainer or from the sampler, or
    a truncated (TIS) or a masked (MIS) correction. A body in half precision is also trained with full logits. "long":
    GSPO and GRPO are also trained with the windows of `WINDOWS`. "teachers": every objective is also trained beside the
    divergence from a teacher, with each of `COEFFICIENTS`. In a last arm all advantages are 0, so only the teacher's
    term is trained.

    Raises:
        InputError: a name is not a preset.
    """
    changes: dict[str, Record] = {"grpo": {"clip_high": 0.27}, "dr_grpo": {"length_norm": config.max_new_tokens}}
    try:
        objectives = {name: Objective.preset(name, **changes.get(name, {})) for name in names}
    except ValueError as error:
        raise InputError(f"--objectives: {error}") from error
    arms: dict[str, Arm] = {}
    for name, objective in objectives.items():
        arms[name] = Arm(objective)
        if study == "rounding":
            rounded = {"sampler_precision": "bf16"}
            truncated = RolloutCorrection("token", "truncate", high=2.0)
            masked = RolloutCorrection("token", "mask", 0.5, 2.0)
            for body in BODIES:
                arms[f"{name} + {body}"] = Arm(objective, {"precision": body})
                arms[f"{name} + {body}{FULL_LOGITS}"] = Arm(objective, {"precision": body}, full_logits=True)
            arms[name + ROUNDED_SAMPLER] = Arm(objective, rounded)
            arms[name + SAMPLER] = Arm(objective, {**rounded, "old_log_probs": "sampler"})
            arms[name + TIS] = Arm(replace(objective, rollout_correction=truncated), rounded)
            arms[name + MIS] = Arm(replace(objective, rollout_correction=masked), rounded)
        for factor in WINDOWS.get(name, ()) if study == "long" else ():
            low, high = factor * objective.clip_low, factor * objective.clip_high
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # GSPO's window is wide on purpose
                arms[f"{name}{WINDOW}{factor:g}"] = Arm(replace(objective, clip_low=low, clip_high=high))
        for coefficient in COEFFICIENTS if study == "teachers" else ():
            taught = {"teacher": "demo", "distillation_k": 8, "distillation_coef": coefficient}
            arms[f"{name}{TEACHER}{coefficient:g}"] = Arm(objective, taught)
    if study == "teachers":
        no_reward = (Step("clamp", {"min": 0, "max": 0}),)
        arms[ALONE] = Arm(objectives[names[0]], {"teacher": "demo", "distillation_k": 8, "advantages": no_reward})
    return arms


def policy_of(task: Task, config: TrainConfig, seed: int) -> Policy:
    """Make the policy before training. With the precision bf16 or fp16, its weights are rounded."""
    torch.manual_seed(seed)
    policy = demo_policy(task.characters)
    if config.half_dtype and not config.uses_autocast:
        for parameter in policy.model.parameters():  # not the buffers: from_pretrained keeps them in fp32 too
            parameter.data = parameter.data.to(getattr(torch, config.half_dtype))
    return policy


def warm_start(task: Task) -> dict[str, Tensor]:
    """The demo's weights after some supervised steps on a task, for answers that are too long to begin at random."""
    torch.manual_seed(0)
    policy = demo_policy(task.characters)
    tokenizer = policy.tokenizer
    prompts, answers = (
        tokenizer(list(x))["input_ids"] for x in zip(*((e.prompt, e.answer) for e in task.train), strict=True)
    )
    texts = [(a + b + [tokenizer.eos_token_id], len(a)) for a, b in zip(prompts, answers, strict=True)]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=WARM_UP["learning_rate"], weight_decay=0.0)
    for batch in itertools.islice(batches(texts, WARM_UP["batch"], seed=0), WARM_UP["steps"]):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(policy, batch).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
    return policy.model.state_dict()


def teacher_of(task: Task, config: TrainConfig, tick: Tick) -> tuple[Policy, list[float]]:
    """Train the demo longer. Return it and its held-out rewards."""
    config = replace(config, **TAUGHT)
    policy = policy_of(task, config, TEACHER_SEED)
    record = train(config, policy, task, TEACHER_SEED, partial(tick, "teacher"))
    policy.model.requires_grad_(False)
    return policy, record["held-out reward"]


def cross_entropy(policy: Policy, batch: Sequence[tuple[list[int], int]]) -> Tensor:
    """Mean loss of texts: token ids, and how many of them, at the start, are not learned."""
    length = max(len(ids) for ids, _ in batch)
    learned = torch.tensor([[prompt <= at < len(ids) for at in range(1, length)] for ids, prompt in batch])
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logits = policy.head(hidden[learned])
    return F.cross_entropy(logits.float(), ids[:, 1:][learned])


def compare(arms: dict[str, Arm], seeds: Sequence[int], grid: Sequence[TrainConfig], study: str, tick: Tick) -> Record:
    """Train every arm with every seed at every setting. Return the shared settings and a record of each training.

    `study`: one of `STUDIES`.
    """
    task = task_by_name(grid[0].task, grid[0].eval_prompts)
    weights = warm_start(task) if study == "long" else None
    teacher, of_teacher = teacher_of(task, grid[0], tick) if study == "teachers" else (None, None)
    runs: dict[str, list[Record]] = {name: [] for name in arms}
    for seed, (name, arm), setting in itertools.product(seeds, arms.items(), grid):
        config = replace(setting, objective=arm.objective, **arm.options)
        policy = policy_of(task, config, seed)
        if weights:
            policy.model.load_state_dict(weights)
        if config.teacher:
            policy.teacher = teacher
        if arm.full_logits:
            policy = FullLogits(**vars(policy))
        record = train(config, policy, task, seed, partial(tick, f"{name}, seed {seed}"))
        if study != "long":
            del record["over training"]
        at = {"seed": seed, "learning rate": config.learning_rate, "updates": config.updates_per_rollout}
        runs[name].append({**at, **record})
    settings: Record = {name: getattr(grid[0], name) for name in SETTINGS}
    settings |= {"warm_up": WARM_UP["steps"]} if weights else {}
    settings |= {"teacher": {**TAUGHT, "seed": TEACHER_SEED, "held-out reward": of_teacher}} if teacher else {}
    return {"settings": settings, "study": study, "runs": runs}


def train(config: TrainConfig, policy: Policy, task: Task, seed: int, tick: Callable[[], object]) -> Record:
    """Train a policy. Return its held-out rewards, the mean of each metric by update of a rollout, and curves.

    A training whose loss or gradient is not finite stops. Its later rewards count as 0, and its other metrics cover the
    rollouts before. If the first rollout diverges, there are none.
    """
    learner = Learner(config, seed, task, policy, say=lambda text: None)
    prompts = batches(task.train, config.prompts_per_step, seed)
    held_out = [learner.evaluate(0)[0]["eval_reward"]]
    rows: list[dict[str, Any]] = []
    steps: list[list[dict[str, float]]] = []
    evaluated = [step for step in range(1, config.steps + 1) if step % config.eval_every == 0 or step == config.steps]
    for step in range(1, config.steps + 1):
        try:
            row, updates = learner.learn(learner.prepare(step, next(prompts)))
        except NotFiniteError:
            break
        rows.append(row)
        steps.append([x.numbers for x in updates])
        if step in evaluated:
            held_out.append(learner.evaluate(step)[0]["eval_reward"])
        tick()
    held_out += [0.0] * (1 + len(evaluated) - len(held_out))
    names = [name for name in METRICS if steps and name in steps[0][0]]
    by_update = {n: [statistics.fmean(s[u][n] for s in steps) for u in range(len(steps[0]))] for n in names}
    missing = config.steps - len(rows)
    values = {name: [row[name] for row in rows] + [math.nan] * missing for name in CURVES}
    values["reward"] = [row["reward"] for row in rows] + [0.0] * missing
    curves = {name: means(curve, PARTS) for name, curve in values.items()}
    return {"held-out reward": held_out, "by update": by_update, "over training": curves}


def run(
    objectives: str | None, study: str, seeds: str, steps: int | None, output: Path | None, console: Console
) -> None:
    """Compare objectives. Print the table, and write the results.

    Raises:
        InputError: an option cannot be used.
    """
    if study not in STUDIES:
        raise InputError(f"--study: expected {', '.join(STUDIES)}, got {study!r}")
    of_study = STUDIES[study]
    steps = steps or of_study.steps
    config = config_of(of_study.task, steps)
    arms = arms_of((objectives or of_study.objectives).split(","), study, config)
    pairs = itertools.product(of_study.learning_rates, of_study.updates)
    grid = [replace(config, learning_rate=rate, updates_per_rollout=number) for rate, number in pairs]
    numbers = seeds_of(seeds)
    path = output or FOLDER / f"{'compare' if study == 'dense' else study}-cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the models are too small to gain from several threads
    rollouts = len(arms) * len(numbers) * len(grid) * steps + (TAUGHT["steps"] if study == "teachers" else 0)
    with bench_table.progress(console, rollouts) as tick:
        results = compare(arms, numbers, grid, study, tick)
    measure.save(path.stem.removesuffix("-cpu"), torch.device("cpu"), results, path)
    show(results, console)
    console.print(f"results: {path}", soft_wrap=True)


def seeds_of(text: str) -> list[int]:
    """Parse "0,1,2" as [0, 1, 2].

    Raises:
        InputError: a number is not a seed, or occurs twice, or there are more than the table of intervals has.
    """
    parts = text.split(",")
    numbers = {int(part) for part in parts if part.isdecimal() and int(part) < 2**32}
    if not len(numbers) == len(parts) <= max(STUDENT):
        expected = f"--seeds: expected at most {max(STUDENT)} different numbers from 0 to 2**32 - 1, such as 0,1,2"
        raise InputError(f"{expected}, got {text!r}")
    return [int(part) for part in parts]


def show(results: Record, console: Console) -> None:
    """Print the table."""
    settings = results["settings"]
    header, lines = rows(results)
    seeds = len({run["seed"] for records in results["runs"].values() for run in records})
    table = Table(title=f"{settings['task']}, {settings['steps']} rollouts, {seeds} seeds: means and 95 % intervals")
    for name in header:
        table.add_column(name, justify="left" if name == "" else "right")
    for row in lines:
        table.add_row(*row)
    console.print(table)
