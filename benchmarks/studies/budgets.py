"""Train a small policy with gradient budgets at the log-prob seam, and compare with training at budget 0.

    python -m gspo_kernels.benchmarks budgets    15 trainings of 640 updates, with one thread: 25 minutes

The loss is `policy_loss` of the log-probs from `linear_log_probs(gradient_budget=...)`, as in TRL and verl. A budget
mostly leaves out gradients of likely tokens, which is a bias. So rewards and entropies are compared with the run at
budget 0 with the same seed. Sampling amplifies differences, at random, so only a difference whose 95 % interval over
the seeds excludes 0 counts as drift. The policy is that of `policy.py` with smaller sizes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from gspo_kernels import LossOutput, linear_log_probs, policy_loss
from gspo_kernels.integrations.backwards import METRICS, BackwardMetrics
from gspo_kernels.integrations.reference_trainer import train_config, update
from gspo_kernels.integrations.reference_trainer.data import task_of
from gspo_kernels.integrations.reference_trainer.loading import load_policy
from gspo_kernels.integrations.reference_trainer.trainer import Learner
from gspo_kernels.integrations.tasks import batches

from .. import measure
from ..measure import Record
from ..suites.options import parser_of
from .compare_report import about, means
from .policy import TINY as TINY_POLICY
from .policy import Size, learn

EXACT = "budget 0"
ARMS: dict[str, float] = {EXACT: 0.0, "budget 1e-3": 1e-3, "budget 1e-2": 1e-2}
CURVES = ("reward", "entropy", "passes", "dropped_gradient_mass")
POLICY_OPTIONS = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "objective", "normalizer", "kl_normalizer")
PARTS = 10  # of a training; curves have the mean over the rollouts of each

POLICY = Size(4096, 20_000, 20_000, 2, 128, 1200, 32, 3e-3, probe=128, sequences=0, for_rl=2048)
FULL: Record = dict(steps=160, prompts_per_step=6, group_size=8, updates_per_rollout=4, max_new_tokens=24)
FULL |= dict(learning_rate=2e-4, eval_prompts=128)
TINY: Record = dict(steps=2, prompts_per_step=2, group_size=4, updates_per_rollout=2, max_new_tokens=4, eval_prompts=2)
FULL_SEEDS, TINY_SEEDS = (0, 1, 2, 3, 4), (0, 1)


class Seam:
    """The loss as trainers compute it that only take log-probs. Takes the arguments of `gspo_fused_loss`."""

    def __init__(self) -> None:
        self.backwards = BackwardMetrics()

    def loss(self, hidden: Tensor, head: nn.Module, ids: Tensor, advantages: Tensor, **options: Any) -> LossOutput:
        self.backwards.collect()  # of the update before
        of_policy = {name: options.pop(name) for name in POLICY_OPTIONS}
        both: Record = {"mask": options.pop("mask"), "backend": options.pop("backend")}
        out = linear_log_probs(hidden, head, ids, **both, **options)
        assert out.entropy is not None
        return policy_loss(out.log_probs, advantages, entropy=out.entropy.detach(), **both, **of_policy)

    def metrics(self) -> dict[str, float]:
        """The metrics of the backwards since the last call."""
        self.backwards.collect()
        taken = self.backwards.take()
        return {name: taken[f"gspo/{name}"] for name in METRICS}


def run(model: Path, data: Path, seed: int, budget: float, options: Record) -> Record:
    """Train once. Return means over the training, values at its end, and curves."""
    machine: Record = dict(device="cpu", threads=1, seeds=(seed,))
    config = train_config(model=str(model), data=data, gradient_budget=budget, **machine, **options)
    learner = Learner(config, seed, task_of(config), load_policy(str(model), config), say=print)
    prompts = batches(learner.task.train, config.prompts_per_step, seed)
    held_out = [learner.evaluate(0)[0]["eval_reward"]]
    seam = Seam()
    rows: list[Record] = []
    with patch.object(update, "gspo_fused_loss", seam.loss):
        for step in range(1, config.steps + 1):
            row, _ = learner.learn(learner.prepare(step, next(prompts)))
            rows.append(row | seam.metrics())
    held_out.append(learner.evaluate(config.steps)[0]["eval_reward"])
    values = {key: [row[key] for row in rows] for key in CURVES}
    return {
        "seed": seed,
        "held-out reward": held_out,
        "mean": {key: statistics.fmean(values[key]) for key in ("passes", "dropped_gradient_mass")},
        "at the end": {key: at_the_end(values[key]) for key in ("entropy", "reward")},
        "over training": {key: means(curve, PARTS) for key, curve in values.items()},
    }


def at_the_end(curve: Sequence[float]) -> float:
    """Mean over the last fifth of the rollouts."""
    return statistics.fmean(curve[-max(1, round(0.2 * len(curve))) :])


def trainings(options: Record, seeds: Sequence[int], model: Path, data: Path) -> dict[str, list[Record]]:
    """Train every arm with every seed. Return records by arm, in the order of the seeds."""
    runs: dict[str, list[Record]] = {arm: [] for arm in ARMS}
    for seed, arm in itertools.product(seeds, ARMS):
        runs[arm].append(run(model, data, seed, ARMS[arm], options))
        before, after = runs[arm][-1]["held-out reward"]
        print(f"{arm}, seed {seed}: held-out reward {before:.3f} -> {after:.3f}", flush=True)
    return runs


def differences(runs: dict[str, list[Record]], key: str) -> Record:
    """Each arm's value at the end minus budget 0's with the same seed: mean and 95 % interval over the seeds."""
    ends = {arm: [record["at the end"][key] for record in records] for arm, records in runs.items()}
    base = ends.pop(EXACT)
    return {arm: about([a - b for a, b in zip(values, base, strict=True)]) for arm, values in ends.items()}


def main() -> None:
    parser = parser_of("budgets", __doc__)
    asked = parser.parse_args()
    size, options, seeds = (TINY_POLICY, TINY, TINY_SEEDS) if asked.tiny else (POLICY, FULL, FULL_SEEDS)
    output = measure.destination("budgets", torch.device("cpu"), asked.output, asked.tiny)
    torch.set_num_threads(1)
    disable_progress_bar()  # transformers' progress bar would write between our lines
    with TemporaryDirectory(prefix="budgets-") as name:  # of the policy
        folder = Path(name)
        *_, training = learn(size, folder)
        runs = trainings(options, seeds, folder / "model", folder / "problems.jsonl")
    model = {"layers": size.layers, "H": size.width, "V": size.vocab}
    results: Record = {"model": model, "policy": training, "settings": options, "runs": runs}
    results["differences"] = {key: differences(runs, key) for key in ("entropy", "reward")}
    print(measure.save("budgets", torch.device("cpu"), results, output))
