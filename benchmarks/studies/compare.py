"""Train with several objectives over a grid of settings, from the same initial weights, prompts and seeds.

Sampling, rewards and updates come from the reference trainer. Every arm samples its own answers and clips in its own
training. Metrics are recorded for each update of a rollout; in the first one, the ratio is always 1.
`compare_report.py` defines what is compared.
"""

from __future__ import annotations

import itertools
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
from gspo_kernels.integrations.reference_trainer.update import NotFiniteError, mini_batches, update, with_log_probs
from gspo_kernels.integrations.tasks import Task, batches, task_by_name
from gspo_kernels.objective import Objective
from gspo_kernels.sampler_mismatch import RolloutCorrection

from .compare_report import MIS, REPLAY, ROUNDED_SAMPLER, SAMPLER, TIS

Record = dict[str, Any]
Tick = Callable[[str], object]
METRICS = ("clip_fraction", "token_clip_fraction", "entropy", "token_log_ratio_std", "sequence_log_ratio_std")
METRICS += ("router_changed",)  # only of mixtures
METRICS += ("rollout_weight_mean", "rollout_bound_share")  # only with a correction
STUDIES = ("dense", "moe", "rounding")
BODIES = ("bf16", "autocast", "fp16", "fp16-autocast")  # values of TrainConfig.precision, besides fp32
EXPERTS = 8  # of each layer of the mixture
SETTINGS = ("task", "steps", "prompts_per_step", "group_size", "eval_every")


class Arm(NamedTuple):
    """An objective to train with, and the options of `TrainConfig` that only this arm has."""

    objective: Objective
    options: Record = {}  # noqa: RUF012 - never changed


def config_of(task: str, steps: int) -> TrainConfig:
    """Settings that all arms share: the demo of `gspo train`, with half its prompts and more evaluations."""
    return TrainConfig(
        task=task,
        steps=steps,
        prompts_per_step=16,
        max_new_tokens=TrainConfig.max_new_tokens if task == "sorting" else 24,
        eval_every=5,
        device="cpu",
        save=False,
    )


def grid_of(config: TrainConfig, learning_rates: Sequence[float], updates: Sequence[int]) -> list[TrainConfig]:
    """Return the configuration of every setting: each learning rate with each number of updates per rollout.

    Raises:
        InputError: a number cannot be used.
    """
    pairs = itertools.product(learning_rates, updates)
    try:
        return [replace(config, learning_rate=rate, updates_per_rollout=number) for rate, number in pairs]
    except InputError as error:
        raise InputError(f"--learning-rates, --updates: {error}") from error


def arms_of(names: Sequence[str], study: str, config: TrainConfig) -> dict[str, Arm]:
    """Return the arms of a study. `names` are presets of `Objective`; "grpo" gets the window of the GSPO paper.

    "moe": every objective is trained without and with Routing Replay. "rounding": every objective is trained in fp32,
    with a body in each of `BODIES`, and in fp32 with a sampler whose weights are rounded to bf16. The answers of this
    sampler get old log-probs from the trainer or from the sampler, or a truncated (TIS) or a masked (MIS) correction.

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
        if study == "rounding":
            rounded = {"sampler_precision": "bf16"}
            truncated = RolloutCorrection("token", "truncate", high=2.0)
            masked = RolloutCorrection("token", "mask", 0.5, 2.0)
            arms |= {f"{name} + {body}": Arm(objective, {"precision": body}) for body in BODIES}
            arms[name + ROUNDED_SAMPLER] = Arm(objective, rounded)
            arms[name + SAMPLER] = Arm(objective, {**rounded, "old_log_probs": "sampler"})
            arms[name + TIS] = Arm(replace(objective, rollout_correction=truncated), rounded)
            arms[name + MIS] = Arm(replace(objective, rollout_correction=masked), rounded)
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


def policy_of(study: str, task: Task, config: TrainConfig, seed: int) -> Policy:
    """Make the policy before training. With the precision bf16 or fp16, its weights are rounded."""
    torch.manual_seed(seed)
    policy = mixture_policy(task.characters) if study == "moe" else demo_policy(task.characters)
    if config.half_dtype and not config.uses_autocast:
        for parameter in policy.model.parameters():  # not the buffers: from_pretrained keeps them in fp32 too
            parameter.data = parameter.data.to(getattr(torch, config.half_dtype))
    return policy


def compare(arms: dict[str, Arm], seeds: Sequence[int], grid: Sequence[TrainConfig], study: str, tick: Tick) -> Record:
    """Train every arm with every seed at every setting. Return the shared settings and a record of each training.

    `study`: one of `STUDIES`; "moe" trains a mixture of experts, the others a dense model.
    """
    task = task_by_name(grid[0].task, grid[0].eval_prompts)
    runs: dict[str, list[Record]] = {name: [] for name in arms}
    for seed, (name, arm), setting in itertools.product(seeds, arms.items(), grid):
        config = replace(setting, objective=arm.objective, **arm.options)
        record = train(config, policy_of(study, task, config, seed), task, seed, partial(tick, f"{name}, seed {seed}"))
        at = {"seed": seed, "learning rate": config.learning_rate, "updates": config.updates_per_rollout}
        runs[name].append({**at, **record})
    return {"settings": {name: getattr(grid[0], name) for name in SETTINGS}, "study": study, "runs": runs}


def train(config: TrainConfig, policy: Policy, task: Task, seed: int, tick: Callable[[], object]) -> Record:
    """Train a policy. Return its held-out rewards, and the mean of each metric by update of a rollout.

    A training whose loss or gradient is not finite stops. Its later evaluations count as 0.
    """
    optimizer = Optimizer(policy, config)
    running = RunningMoments()
    prompts = batches(task.train, config.prompts_per_step, seed)
    held_out = [evaluate(config, policy, task)]
    steps: list[list[dict[str, float]]] = []
    evaluated = [step for step in range(1, config.steps + 1) if step % config.eval_every == 0 or step == config.steps]
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
        try:
            steps.append([update(config, policy, optimizer, batch, rows).numbers for rows in parts])
        except NotFiniteError:
            if not steps:
                raise  # no update of the training can be reported
            break
        if step in evaluated:
            held_out.append(evaluate(config, policy, task))
        tick()
    held_out += [0.0] * (1 + len(evaluated) - len(held_out))
    names = [name for name in METRICS if name in steps[0][0]]
    by_update = {n: [statistics.fmean(s[u][n] for s in steps) for u in range(len(steps[0]))] for n in names}
    return {"held-out reward": held_out, "by update": by_update}


def evaluate(config: TrainConfig, policy: Policy, task: Task) -> float:
    """Mean reward of greedy answers to the held-out prompts."""
    rollout = sample(policy, task.held_out, max_new_tokens=config.max_new_tokens, temperature=None, task=task)
    return statistics.fmean(task.rewards(rollout.texts, task.held_out, rollout.turns).total)
