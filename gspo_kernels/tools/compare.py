"""Train with several objectives from the same initial weights, prompts and seeds, and measure what they clip.

Every arm samples its own answers, so its clip fractions are those of its own training. Rewards, clip fractions and
log-ratios are recorded for each of the updates of a rollout; in the first one, the ratio is always 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_kernels import LossOutput, Objective, gspo_fused_loss, linear_log_probs
from gspo_kernels.advantages import group_advantages
from gspo_kernels.integrations.reference_trainer.config import InputError
from gspo_kernels.integrations.reference_trainer.policy import Policy, demo_policy, make_policy
from gspo_kernels.integrations.reference_trainer.routing import changed_share, routing, stacked
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, sample
from gspo_kernels.integrations.reference_trainer.tasks import Task, batches, task_by_name

from .compare_report import REPLAY

Record = dict[str, Any]
Tick = Callable[[str], object]
EXPERTS = 8  # of each layer of the mixture
POINTS = 20  # most points of a saved curve
# 97.5 % quantiles of Student's t, by number of seeds
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


class Arm(NamedTuple):
    """An objective to train with, and whether the routing of the old policy is replayed."""

    objective: Objective
    replay: bool = False


class Size(NamedTuple):
    """How long to train, and on what."""

    task: str = "sorting"
    steps: int = 100  # rollouts
    prompts: int = 32  # per rollout
    group: int = 8  # answers per prompt
    updates: int = 4  # per rollout
    learning_rate: float = 5e-4
    max_new_tokens: int = 7
    eval_every: int = 5  # rollouts
    eval_prompts: int = 128


def arms_of(names: Sequence[str], moe: bool, size: Size) -> dict[str, Arm]:
    """Return the arms of a comparison. `names` are presets of `Objective`; "grpo" gets the window of the GSPO paper.

    With a mixture of experts, every objective is trained without and with Routing Replay.

    Raises:
        InputError: a name is not that of a preset.
    """
    changes: dict[str, Record] = {"grpo": {"clip_high": 0.27}, "dr_grpo": {"length_norm": size.max_new_tokens}}
    try:
        objectives = {name: Objective.preset(name, **changes.get(name, {})) for name in names}
    except ValueError as error:
        raise InputError(f"--objectives: {error}") from error
    arms = {name: Arm(objective) for name, objective in objectives.items()}
    return {f"{n}{r}": Arm(a.objective, bool(r)) for n, a in arms.items() for r in ("", REPLAY)} if moe else arms


def mixture_policy() -> Policy:
    """Make a Qwen3-MoE with random weights and the demo's tokenizer and sizes. It has no auxiliary loss."""
    demo = demo_policy()
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
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return make_policy(Qwen3MoeForCausalLM(config), demo.tokenizer)


def compare(arms: dict[str, Arm], seeds: Sequence[int], size: Size, moe: bool, tick: Tick) -> Record:
    """Train every arm with every seed. Return settings, the curves of each run, and a summary of each arm."""
    task = task_by_name(size.task, size.eval_prompts)
    runs: dict[str, list[Record]] = {name: [] for name in arms}
    for seed in seeds:
        for name, arm in arms.items():
            torch.manual_seed(seed)
            policy = mixture_policy() if moe else demo_policy()
            record = train(policy, task, arm, seed, size, partial(tick, f"{name}, seed {seed}"))
            runs[name].append({"seed": seed, **record})
    return {"settings": size._asdict(), "moe": moe, "runs": runs, "summary": summary(runs)}


def train(policy: Policy, task: Task, arm: Arm, seed: int, size: Size, tick: Callable[[], object]) -> Record:
    """Train a policy. Return its held-out rewards, thinned curves over the rollouts, and means by update."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=size.learning_rate, weight_decay=0.0)
    prompts = batches(task.train, size.prompts, seed)
    held_out, rewards, steps = [evaluate(policy, task, size)], [], []
    for step in range(1, size.steps + 1):
        examples = next(prompts)
        rollout = sample(
            policy,
            examples,
            group_size=size.group,
            max_new_tokens=size.max_new_tokens,
            temperature=1.0,
            task=task,
        )
        repeated = [example for example in examples for _ in range(size.group)]
        reward = torch.tensor(task.rewards(rollout.texts, repeated, rollout.turns).total)  # [B]
        rewards.append(reward.mean().item())
        steps.append(updates(policy, optimizer, arm, rollout, group_advantages(reward, size.group), size.updates))
        if step % size.eval_every == 0 or step == size.steps:
            held_out.append(evaluate(policy, task, size))
        tick()
    names = steps[0][0].keys()
    by_update = {n: [statistics.fmean(s[u][n] for s in steps) for u in range(size.updates)] for n in names}
    curves = {n: thinned([pick(n)(u[n] for u in s) for s in steps], pick(n)) for n in names}
    return {"held-out reward": held_out, "reward": thinned(rewards), **curves, "by update": by_update}


def updates(
    policy: Policy, optimizer: torch.optim.Optimizer, arm: Arm, rollout: Rollout, advantages: Tensor, count: int
) -> list[dict[str, float]]:
    """Take `count` optimizer steps on a rollout. Return the metrics of each."""
    size = len(advantages) // count
    parts = [rollout.select(at, at + size) for at in range(0, size * count, size)]
    is_mixture = hasattr(policy.model.config, "num_experts")
    measured = []
    with torch.no_grad():
        old = [old_policy(policy, part, is_mixture) for part in parts]
    for part, (old_log_probs, experts), advantage in zip(parts, old, advantages.split(size), strict=True):
        with routing(policy.model, experts if arm.replay else None) if experts is not None else nullcontext() as chosen:
            hidden = policy.hidden_states(part.input_ids, part.attention_mask, part.prompt_width)
        out = gspo_fused_loss(
            hidden,
            policy.head,
            part.answer_ids,
            advantage,
            mask=part.answer_mask,
            old_log_probs=old_log_probs,
            objective=arm.objective,
            entropy=True,
            **policy.head_options,
        )
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        metrics = metrics_of(out, old_log_probs, part.answer_mask)
        if experts is not None:
            after = stacked(chosen or [], size)
            metrics["experts changed"] = changed_share(experts, after, part.attention_mask)
        measured.append(metrics)
    return measured


def old_policy(policy: Policy, part: Rollout, is_mixture: bool) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs [b, T] of answers, and the experts of all tokens, [b, P + T, layers, k], of a mixture."""
    with routing(policy.model) if is_mixture else nullcontext() as chosen:
        hidden = policy.hidden_states(part.input_ids, part.attention_mask, part.prompt_width)
    out = linear_log_probs(hidden, policy.head, part.answer_ids, mask=part.answer_mask, **policy.head_options)
    return out.log_probs, None if chosen is None else stacked(chosen, len(part.texts))


def metrics_of(out: LossOutput, old_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Return what an update clips, its ratios, and the spread of its log-ratios (lp - old) in nats."""
    log_ratio = torch.where(mask, out.log_probs - old_log_probs, 0)  # [b, T]
    of_sequences = log_ratio.sum(1) / mask.sum(1).clamp(min=1)
    shown = {"sequences clipped": "clip_fraction", "tokens clipped": "token_clip_fraction", "entropy": "entropy"}
    shown |= {"smallest ratio": "ratio_min", "largest ratio": "ratio_max"}
    return {
        **{name: out.metrics[key].item() for name, key in shown.items()},
        "token log-ratio std": log_ratio[mask].std().item(),
        "sequence log-ratio std": of_sequences.std().item(),
    }


def evaluate(policy: Policy, task: Task, size: Size) -> float:
    """Return the mean reward of greedy answers to the held-out prompts."""
    rollout = sample(policy, task.held_out, max_new_tokens=size.max_new_tokens, temperature=None, task=task)
    return statistics.fmean(task.rewards(rollout.texts, task.held_out, rollout.turns).total)


def pick(name: str) -> Callable[..., float]:
    """Return how values of a metric are combined: the extreme for the smallest and largest ratio, else the mean."""
    return {"smallest ratio": min, "largest ratio": max}.get(name, statistics.fmean)


def thinned(curve: Sequence[float], how: Callable[..., float] = statistics.fmean) -> list[float]:
    """Divide a curve into at most `POINTS` consecutive parts, and return one value of each."""
    size = math.ceil(len(curve) / POINTS)
    return [how(curve[at : at + size]) for at in range(0, len(curve), size)]


def summary(runs: dict[str, list[Record]]) -> dict[str, Record]:
    """Return for each arm means over the seeds, with 95 % intervals of rewards.

    "mean held-out reward" is the mean over all evaluations of a training. Its differences, seed by seed, are "against
    first", to the first arm, and "replay", to the arm without replay.
    """
    area = {arm: [statistics.fmean(run["held-out reward"]) for run in records] for arm, records in runs.items()}
    end = {arm: [run["held-out reward"][-1] for run in records] for arm, records in runs.items()}
    first, result = next(iter(runs)), {}
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
    """Return the mean of the differences seed by seed, and its 95 % interval."""
    return about([a - b for a, b in zip(values, base, strict=True)])


def about(values: Sequence[float]) -> Record:
    """Return the mean and its 95 % interval by Student's t, or None for a single value."""
    mean = statistics.fmean(values)
    if len(values) not in STUDENT:
        return {"mean": mean, "95 %": None}
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "95 %": [mean - half, mean + half]}
