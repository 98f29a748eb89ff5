"""Train with several objectives from the same initial weights, prompts and seeds, and measure what they clip.

Sampling, rewards and updates come from the reference trainer. Every arm samples its own answers and clips in its own
training. Metrics are recorded for each update of a rollout; in the first one, the ratio
is always 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_kernels.advantages import RunningMoments
from gspo_kernels.integrations.reference_trainer.advantages import advantages_of
from gspo_kernels.integrations.reference_trainer.config import InputError, TrainConfig
from gspo_kernels.integrations.reference_trainer.optimizer import Optimizer
from gspo_kernels.integrations.reference_trainer.policy import SORTING, Policy, demo_policy, make_policy
from gspo_kernels.integrations.reference_trainer.sampling import sample, sampler_weights
from gspo_kernels.integrations.reference_trainer.update import mini_batches, update, with_log_probs
from gspo_kernels.integrations.tasks import Task, batches, task_by_name
from gspo_kernels.objective import Objective
from gspo_kernels.sampler_mismatch import RolloutCorrection

from .compare_report import MIS, REPLAY, SAMPLER, TIS

Record = dict[str, Any]
Tick = Callable[[str], object]
METRICS = ("clip_fraction", "token_clip_fraction", "entropy", "ratio_min", "ratio_max")
METRICS += ("token_log_ratio_std", "sequence_log_ratio_std")
METRICS += ("router_changed",)  # only of mixtures
METRICS += ("rollout_weight_mean", "rollout_bound_share")  # only with a correction
EXPERTS = 8  # of each layer of the mixture
POINTS = 20  # most points of a saved curve
SETTINGS = ("task", "steps", "prompts_per_step", "group_size", "updates_per_rollout", "learning_rate", "eval_every")
# 97.5 % quantiles of Student's t, by number of seeds
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


class Arm(NamedTuple):
    """An objective to train with, and the options of `TrainConfig` that only this arm has."""

    objective: Objective
    options: Record = {}  # noqa: RUF012 - never changed


def config_of(
    task: str,
    steps: int,
    learning_rate: float = TrainConfig.learning_rate,
    updates: int = TrainConfig.updates_per_rollout,
) -> TrainConfig:
    """Settings that all arms share: the demo of `gspo train`, with an evaluation every 5 rollouts."""
    return TrainConfig(
        task=task,
        steps=steps,
        learning_rate=learning_rate,
        updates_per_rollout=updates,
        max_new_tokens=TrainConfig.max_new_tokens if task == "sorting" else 24,
        eval_every=5,
        device="cpu",
        save=False,
    )


def arms_of(names: Sequence[str], study: str, config: TrainConfig) -> dict[str, Arm]:
    """Return the arms of a study. `names` are presets of `Objective`; "grpo" gets the window of the GSPO paper.

    "moe": every objective is trained without and with Routing Replay. "mismatch": every objective is trained with old
    log-probs from the trainer, with log-probs from the sampler, and with a truncated (TIS) and a masked (MIS)
    correction.

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
        if study == "moe":
            arms[name + REPLAY] = Arm(objective, {"routing_replay": True})
        if study == "mismatch":
            arms[name + SAMPLER] = Arm(objective, {"old_log_probs": "sampler"})
            arms[name + TIS] = Arm(
                replace(objective, rollout_correction=RolloutCorrection("token", "truncate", high=2.0))
            )
            arms[name + MIS] = Arm(replace(objective, rollout_correction=RolloutCorrection("token", "mask", 0.5, 2.0)))
    return arms


def mixture_policy(alphabet: str = SORTING) -> Policy:
    """Make a Qwen3-MoE with random weights and the demo's tokenizer and sizes. It has no auxiliary loss."""
    demo = demo_policy(alphabet)
    options = demo.model.config.to_dict()
    sizes = {name: options[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    sizes |= {name: options[name] for name in ("num_key_value_heads", "head_dim", "eos_token_id", "pad_token_id")}
    config = Qwen3MoeConfig(
        **sizes,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=options["intermediate_size"] // 2,
        initializer_range=0.05,
        router_aux_loss_coef=0.0,
        max_position_embeddings=options["max_position_embeddings"],
        tie_word_embeddings=False,
    )
    return make_policy(Qwen3MoeForCausalLM(config), demo.tokenizer)


def compare(arms: dict[str, Arm], seeds: Sequence[int], config: TrainConfig, study: str, tick: Tick) -> Record:
    """Train every arm with every seed. Return settings, the curves of each run, and a summary of each arm.

    `study`: "dense", "moe" for a mixture of experts, or "mismatch" for a sampler with weights in bf16.
    """
    if study == "mismatch":
        config = replace(config, sampler_precision="bf16")
    task = task_by_name(config.task, config.eval_prompts)
    runs: dict[str, list[Record]] = {name: [] for name in arms}
    for seed in seeds:
        for name, arm in arms.items():
            torch.manual_seed(seed)
            policy = mixture_policy(task.characters) if study == "moe" else demo_policy(task.characters)
            settings = replace(config, objective=arm.objective, **arm.options)
            record = train(settings, policy, task, seed, partial(tick, f"{name}, seed {seed}"))
            runs[name].append({"seed": seed, **record})
    shared = {name: getattr(config, name) for name in SETTINGS}
    return {"settings": shared, "study": study, "runs": runs, "summary": summary(runs)}


def train(config: TrainConfig, policy: Policy, task: Task, seed: int, tick: Callable[[], object]) -> Record:
    """Train a policy. Return its held-out rewards, thinned curves over the rollouts, and means by update."""
    optimizer = Optimizer(policy, config)
    running = RunningMoments()
    prompts = batches(task.train, config.prompts_per_step, seed)
    held_out = [evaluate(config, policy, task)]
    rewards = []
    steps = []
    for step in range(1, config.steps + 1):
        examples = next(prompts)
        options = {"group_size": config.group_size, "max_new_tokens": config.max_new_tokens, "task": task}
        with sampler_weights(policy, config.sampler_precision):
            rollout = sample(policy, examples, temperature=config.temperature, **options)
        repeated = [example for example in examples for _ in range(config.group_size)]
        rewarded = task.rewards(rollout.texts, repeated, rollout.turns)
        (parts,) = mini_batches(config, seed, step)
        batch = with_log_probs(config, policy, rollout, parts)
        batch = replace(batch, advantages=advantages_of(config, batch, rewarded, running))
        steps.append([update(config, policy, optimizer, batch, rows).numbers for rows in parts])
        rewards.append(statistics.fmean(rewarded.total))
        if step % config.eval_every == 0 or step == config.steps:
            held_out.append(evaluate(config, policy, task))
        tick()
    names = [name for name in METRICS if name in steps[0][0]]
    by_update = {n: [statistics.fmean(s[u][n] for s in steps) for u in range(len(steps[0]))] for n in names}
    curves = {n: thinned([pick(n)(u[n] for u in s) for s in steps], pick(n)) for n in names}
    return {"held-out reward": held_out, "reward": thinned(rewards), **curves, "by update": by_update}


def evaluate(config: TrainConfig, policy: Policy, task: Task) -> float:
    """Mean reward of greedy answers to the held-out prompts."""
    rollout = sample(policy, task.held_out, max_new_tokens=config.max_new_tokens, temperature=None, task=task)
    return statistics.fmean(task.rewards(rollout.texts, task.held_out, rollout.turns).total)


def pick(name: str) -> Callable[..., float]:
    """How to combine values of a metric: the extreme for ratio_min and ratio_max, else the mean."""
    return {"ratio_min": min, "ratio_max": max}.get(name, statistics.fmean)


def thinned(curve: Sequence[float], how: Callable[..., float] = statistics.fmean) -> list[float]:
    """Divide a curve into at most `POINTS` consecutive parts, and combine each part to one value."""
    size = math.ceil(len(curve) / POINTS)
    return [how(curve[at : at + size]) for at in range(0, len(curve), size)]


def summary(runs: dict[str, list[Record]]) -> dict[str, Record]:
    """Summarize each arm: means over the seeds, with 95 % intervals of rewards.

    "mean held-out reward" is the mean over all evaluations of a training. Its differences, seed by seed, are "against
    first", to the first arm, and "replay", to the arm without replay.
    """
    area = {arm: [statistics.fmean(run["held-out reward"]) for run in records] for arm, records in runs.items()}
    end = {arm: [run["held-out reward"][-1] for run in records] for arm, records in runs.items()}
    first = next(iter(runs))
    result = {}
    for arm, records in runs.items():
        without = arm.removesuffix(REPLAY)
        by_update = [record["by update"] for record in records]
        result[arm] = {
            "held-out reward at the end": about(end[arm]),
            "mean held-out reward": about(area[arm]),
            "against first": gap(area[arm], area[first]),
            **({"replay": gap(area[arm], area[without])} if without != arm else {}),
            "by update": {
                n: [statistics.fmean(x) for x in zip(*(r[n] for r in by_update), strict=True)] for n in by_update[0]
            },
            **{n: pick(n)(x for record in records for x in record[n]) for n in by_update[0]},
        }
    return result


def gap(values: Sequence[float], base: Sequence[float]) -> Record:
    """Mean of the differences seed by seed, and its 95 % interval."""
    return about([a - b for a, b in zip(values, base, strict=True)])


def about(values: Sequence[float]) -> Record:
    """The mean and its 95 % interval by Student's t. A single value has no interval: None."""
    mean = statistics.fmean(values)
    if len(values) not in STUDENT:
        return {"mean": mean, "95 %": None}
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "95 %": [mean - half, mean + half]}
