"""The training loop: sample groups of answers, reward them, compute old log-probs, update four times, evaluate.

Old log-probs belong to the policy that sampled, so they are computed before the first update. They are computed with
the same micro-batches and the same padding as the updates. So the first update of a rollout has a ratio of exactly 1,
and later ratios measure only the updates, not rounding that depends on the batch shape.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs
from gspo_kernels.advantages import group_advantages

from .config import InputError, TrainConfig
from .policy import Policy, check_head, check_room, demo_policy, load_policy
from .progress import TrainingProgress
from .report import RunFolder, RunReport, SeedResult
from .sampling import Rollout, sample
from .stopping import StopSignals
from .tasks import Example, Task, batches, jsonl_task, task_by_name

LOSS_METRICS = (
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "ratio_mean",
    "entropy",
    "dropped_gradient_mass",
    "passes",
)


class TrainingError(RuntimeError):
    """Training cannot continue."""


@dataclass(frozen=True)
class MicroBatch:
    """The b answers of one forward and one backward."""

    rollout: Rollout
    advantages: Tensor  # [b]
    old_log_probs: Tensor  # [b, T] fp32, of the policy that sampled


def train(config: TrainConfig) -> RunReport:
    """Train once per seed. Write metrics.jsonl, curves.png and the trained models to `config.folder`.

    On the CPU of one machine, the same seed and thread count always give the same numbers. Ctrl-C and SIGTERM save the
    current model, unless `config.save` is off, and then raise KeyboardInterrupt or SystemExit(143).

    Raises:
        InputError: an option, a file or the checkpoint cannot be used.
        TrainingError: a loss or a gradient is not finite.
    """
    refuse_several_processes()
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    if config.data is None:
        task = task_by_name("sorting", config.eval_prompts)
    else:
        task = jsonl_task(config.data, config.eval_prompts)
    results = []
    with StopSignals() as stop, RunFolder(config) as folder, TrainingProgress(config) as progress:
        for seed in config.seeds:
            torch.manual_seed(seed)
            policy = demo_policy() if config.model is None else load_policy(config.model)
            policy.model.to(device)
            check_head(policy, config.backend)
            check_room(policy, (e.key for e in (*task.train, *task.held_out)), config.max_new_tokens)
            if seed == config.seeds[0]:
                print_notes(config, policy, progress)
            try:
                results.append(train_seed(config, seed, policy, task, folder, progress, stop))
                if config.save:
                    folder.save_model(policy, seed)
            except (KeyboardInterrupt, SystemExit):
                save_stopped(config, seed, policy, folder, progress)
                raise
    return RunReport(results, folder.path, *folder.plot())


def print_notes(config: TrainConfig, policy: Policy, progress: TrainingProgress) -> None:
    """Print notes about the checkpoint and the settings before training begins."""
    if policy.router_note:
        progress.say(policy.router_note)
    if config.updates_per_rollout == 1:
        progress.say("--updates-per-rollout 1: the importance ratio is always 1, and nothing is clipped")


def refuse_several_processes() -> None:
    """Raise an InputError if torchrun started several processes. They would train separately into the same folder."""
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if world_size != "1":
        raise InputError(
            f"WORLD_SIZE: expected 1 process, got {world_size}: this trainer uses one device. Start it without "
            "torchrun; for several GPUs use TRL or verl (docs/integrations.md)"
        )


def save_stopped(config: TrainConfig, seed: int, policy: Policy, folder: RunFolder, progress: TrainingProgress) -> None:
    """Save the current model of a seed that was stopped, and print where."""
    if folder.latest_seed != seed:
        progress.say(f"stopped before training seed {seed}; its model is not saved")
    elif not config.save:
        progress.say(f"stopped during seed {seed}; the model is not saved (--no-save); metrics: {folder.metrics}")
    else:
        progress.say("stopping: saving the current model; a second signal stops without saving")
        try:
            model = folder.save_model(policy, seed)
        except (KeyboardInterrupt, SystemExit):
            progress.say("stopped by a second signal: the model is not saved")
            raise
        progress.say(f"stopped during seed {seed}; metrics: {folder.metrics}; model: {model}")


def train_seed(
    config: TrainConfig,
    seed: int,
    policy: Policy,
    task: Task,
    folder: RunFolder,
    progress: TrainingProgress,
    stop: StopSignals,
) -> SeedResult:
    """Train one seed. Write the metrics of each step. Step 0 has the held-out reward before training."""
    started = time.perf_counter()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    stop.watch(optimizer)
    rows = [{"step": 0, "eval_reward": evaluate(config, policy, task)}]
    folder.write(seed, rows[0])
    progress.start(seed, rows[0])
    prompts = batches(task.train, config.prompts_per_step, seed)
    for step in range(1, config.steps + 1):
        row = {"step": step, **train_step(config, policy, optimizer, task, next(prompts))}
        if step % config.eval_every == 0 or step == config.steps:
            row["eval_reward"] = evaluate(config, policy, task)
        rows.append(row)
        folder.write(seed, row)
        progress.advance(row)
    return SeedResult.from_rows(seed, rows, time.perf_counter() - started)


def train_step(
    config: TrainConfig, policy: Policy, optimizer: torch.optim.Optimizer, task: Task, examples: list[Example]
) -> dict[str, float]:
    """Sample one rollout and train on it. Return the step's metrics. Metrics of the loss are means over the updates."""
    started = time.perf_counter()
    rollout, reward_list = collect(config, policy, task, examples, config.group_size, config.temperature)
    rewards = torch.tensor(reward_list, device=rollout.input_ids.device)  # [B]
    micro_batches = make_micro_batches(config, policy, rollout, group_advantages(rewards, config.group_size))
    per_update = len(micro_batches) // config.updates_per_rollout
    updates = [
        update(config, policy, optimizer, micro_batches[first : first + per_update])
        for first in range(0, len(micro_batches), per_update)
    ]
    tokens = int(rollout.answer_mask.sum())
    return {
        "reward": rewards.mean().item(),
        "groups_without_signal": share_of_equal_groups(rewards, config.group_size),
        **average(updates),
        "answer_tokens": tokens / config.rollout_size,
        "tokens_per_second": tokens / (time.perf_counter() - started),
    }


def share_of_equal_groups(rewards: Tensor, group_size: int) -> float:
    """Return the share of groups whose rewards are all equal and whose advantages are therefore 0."""
    groups = rewards.view(-1, group_size)  # [prompts, group_size]
    return (groups == groups[:, :1]).all(1).float().mean().item()


def collect(
    config: TrainConfig,
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    group_size: int,
    temperature: float | None,
) -> tuple[Rollout, list[float]]:
    """Sample `group_size` answers per prompt and compute their rewards. A temperature of None means greedy decoding."""
    with autocast(config, policy):
        rollout = sample(
            policy,
            examples,
            group_size=group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=temperature,
            task=task,
        )
    repeated = [example for example in examples for _ in range(group_size)]
    return rollout, task.rewards(rollout.texts, repeated, rollout.turns).total


@torch.no_grad()
def make_micro_batches(config: TrainConfig, policy: Policy, rollout: Rollout, advantages: Tensor) -> list[MicroBatch]:
    """Divide a rollout into micro-batches and compute their old log-probs."""
    size = config.micro_batch_size or config.mini_batch_size
    micro_batches = []
    for start in range(0, config.rollout_size, size):
        answers = rollout.select(start, start + size)
        with autocast(config, policy):
            old = linear_log_probs(
                policy.hidden_states(answers.input_ids, answers.attention_mask, answers.prompt_width),
                policy.head,
                answers.answer_ids,
                mask=answers.answer_mask,
                temperature=config.temperature,
                backend=config.backend,
                **policy.head_options,
            ).log_probs
        micro_batches.append(MicroBatch(answers, advantages[start : start + size], old))
    return micro_batches


def update(
    config: TrainConfig, policy: Policy, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]
) -> dict[str, float]:
    """Take one optimizer step on micro-batches of equal size. Return the means of their metrics."""
    optimizer.zero_grad(set_to_none=True)
    measured = []
    for micro_batch in micro_batches:
        rollout = micro_batch.rollout
        inputs = rollout.input_ids, rollout.attention_mask, rollout.prompt_width
        with autocast(config, policy):
            hidden, router_loss = policy.hidden_states_and_router_loss(*inputs)
            out = gspo_fused_loss(
                hidden,
                policy.head,
                rollout.answer_ids,
                micro_batch.advantages,
                mask=rollout.answer_mask,
                old_log_probs=micro_batch.old_log_probs,
                temperature=config.temperature,
                objective=Objective(clip_low=config.clip_low, clip_high=config.clip_high),
                normalizer=config.mini_batch_size,  # so that the losses of the micro-batches add up
                entropy=True,
                gradient_budget=config.gradient_budget,
                cache_mib=config.cache_mib,
                backend=config.backend,
                **policy.head_options,
            )
        metrics = {name: out.metrics[name].item() for name in LOSS_METRICS}
        loss = out.loss
        if router_loss is not None:
            loss = loss + policy.router_loss_weight * router_loss / len(micro_batches)  # a mean over micro-batches
            metrics["router_aux_loss"] = router_loss.item()
        loss.backward()
        measured.append({"loss": loss.item() * len(micro_batches), **metrics})
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.max_grad_norm)
    means = {**average(measured), "grad_norm": norm.item()}
    if not math.isfinite(means["loss"]) or not math.isfinite(means["grad_norm"]):
        raise TrainingError(
            f"an update is not finite (loss {means['loss']}, gradient norm {means['grad_norm']}); "
            "training stops before this update. A lower --learning-rate may help"
        )
    optimizer.step()
    return means


def average(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every entry."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def evaluate(config: TrainConfig, policy: Policy, task: Task) -> float:
    """Return the mean reward of greedy answers to the held-out prompts, sampled in batches of a rollout's size."""
    rewards: list[float] = []
    for start in range(0, len(task.held_out), config.rollout_size):
        examples = task.held_out[start : start + config.rollout_size]
        rewards += collect(config, policy, task, examples, group_size=1, temperature=None)[1]
    return sum(rewards) / len(rewards)


def autocast(config: TrainConfig, policy: Policy) -> torch.autocast:
    """Return an autocast to bfloat16, enabled by `config.bf16`. The weights and the optimizer stay fp32."""
    return torch.autocast(policy.model.device.type, torch.bfloat16, enabled=config.bf16)


def pick_device(name: str) -> torch.device:
    """Return the named device; "auto" is a GPU if torch has one. Raise an InputError if torch cannot use it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it supports the device
        reason = str(error).split("\n")[0]
        raise InputError(f"device (--device): expected a device torch can use, got {name!r}: {reason}") from error
    return device
