"""Does a gradient budget train? The reference trainer at several budgets, from the policy of `policy.py`, on a CPU.

    python -m gspo_kernels.benchmarks budgets    12 trainings of 300 updates, two at a time, one thread each

What a budget drops has a direction: it is always the gradient of likely tokens. So rewards, entropies and final
parameters stand beside those of budget 0. Yet sampling is chaotic: one token that rounds otherwise, and two runs part
for good. Two controls say how far: other seeds at budget 0, and the same seeds at budget 0 from weights that differ by
a millionth. What a budget does is what it does beyond the second.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils.logging import disable_progress_bar

from gspo_kernels.integrations.reference_trainer import train, train_config
from gspo_kernels.integrations.reference_trainer.policy import Policy, load_policy
from gspo_kernels.integrations.reference_trainer.report import read_rows

from .. import measure
from ..measure import Record
from ..suites.step import positive
from .policy import FOLDER as POLICY
from .policy import digest

FOLDER = Path("runs") / "budgets"
EXACT, CONTROL = "budget 0", "budget 0, weights x (1 + 1e-6 noise)"
ARMS: dict[str, float] = {EXACT: 0.0, "budget 1e-3": 1e-3, "budget 4e-3": 4e-3, CONTROL: 0.0}
NOISE = 1e-6  # relative, of every initial weight of the control
CURVES = ("reward", "entropy", "clip_fraction", "dropped_gradient_mass", "passes", "grad_norm", "answer_tokens")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # t of 97.5 %, by the number of seeds
END = 0.2  # the share of the steps that is "the end"


class Size(NamedTuple):
    seeds: tuple[int, ...]
    steps: int
    prompts: int
    group: int
    updates: int
    tokens: int  # of the longest answer
    learning_rate: float
    eval_every: int
    eval_prompts: int

    def options(self) -> dict[str, Any]:
        """For the reference trainer."""
        return {
            "steps": self.steps,
            "prompts_per_step": self.prompts,
            "group_size": self.group,
            "updates_per_rollout": self.updates,
            "max_new_tokens": self.tokens,
            "learning_rate": self.learning_rate,
            "eval_every": self.eval_every,
            "eval_prompts": self.eval_prompts,
        }


# Tried with seed 0: over 15 rollouts 2e-5 has a mean reward of 0.653, 1e-4 on the same prompts 0.688; after 24 rollouts
# 1e-4 has kept its held-out reward of 0.875, and 3e-4, in smaller rollouts, has fallen to 0.69.
FULL = Size((0, 1, 2), 75, 6, 8, 4, 24, 1e-4, 25, 128)
TINY = Size((0, 1), 2, 2, 4, 2, 4, 1e-3, 1, 2)


# One training, in a process of its own


def run(name: str, model: str, data: str, folder: str, seed: int, budget: float, options: dict[str, Any]) -> Record:
    """Train once; the curves of its metrics.jsonl and the seconds it took."""
    started = time.perf_counter()
    config = train_config(
        name=name,
        model=model,
        data=Path(data),
        output=Path(folder),
        seeds=(seed,),
        gradient_budget=budget,
        device="cpu",
        threads=1,
        overwrite=True,
        **options,
    )
    train(config)
    rows = read_rows(config.folder / "metrics.jsonl")
    held_out = [[row["step"], row["eval_reward"]] for row in rows if "eval_reward" in row]
    curves = {key: [float(f"{row[key]:.6g}") for row in rows[1:]] for key in CURVES}
    return {"seconds": time.perf_counter() - started, **curves, "held-out reward": held_out}


def moved(model: Path, seed: int, folder: Path) -> Path:
    """The same checkpoint, its weights moved by a millionth."""
    torch.manual_seed(seed)
    policy = load_policy(str(model))
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1 + NOISE * torch.randn_like(weight))
    policy.save(folder / f"start-{seed}")
    return folder / f"start-{seed}"


def trainings(size: Size, model: Path, data: Path, folder: Path, workers: int) -> dict[str, list[Record]]:
    """Every arm with every seed, `workers` at a time."""
    records: dict[str, list[Record]] = {arm: [{} for _ in size.seeds] for arm in ARMS}
    with ThreadPoolExecutor(workers) as pool, _none_more(pool):
        waiting: dict[Future[Record | None], tuple[str, int]] = {}
        for place, seed in enumerate(size.seeds):
            for arm, budget in ARMS.items():
                start = moved(model, seed, folder) if arm == CONTROL else model
                how: Record = {"model": str(start), "data": str(data), "folder": str(folder), "seed": seed}
                how |= {"name": f"{name_of(arm)}-{seed}", "budget": budget, "options": size.options()}
                waiting[pool.submit(measure.fresh, "studies.budgets", "run", **how)] = (arm, place)
        for done in as_completed(waiting):
            arm, place = waiting[done]
            last = done.result()
            if last is None:
                raise MemoryError(f"{arm}, seed {size.seeds[place]}: out of memory; try --workers 1")
            records[arm][place] = {"seed": size.seeds[place], **last}
            (_, before), *_, (_, after) = last["held-out reward"]
            entropy = f"entropy {last['entropy'][0]:.4f} -> {last['entropy'][-1]:.4f}"
            rewards = f"held out {before:.3f} -> {after:.3f}"
            print(f"{arm}, seed {size.seeds[place]}: {last['seconds']:.0f} s, {rewards}, {entropy}", flush=True)
    return records


@contextmanager
def _none_more(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Who stops this, or a training that fails, does not start what waits."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def name_of(arm: str) -> str:
    """As a folder."""
    return re.sub(r"[^\w.]+", "-", arm).strip("-")


# How far apart


def distance(a: Policy, b: Policy) -> float:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return math.sqrt(sum((x.detach().double() - y.detach().double()).square().sum().item() for x, y in pairs))


def distances(size: Size, model: Path, folder: Path) -> Record:
    """Of final parameters, over how far budget 0 of the same seed has gone from the start."""

    def trained(arm: str, seed: int) -> Policy:
        return load_policy(str(folder / f"{name_of(arm)}-{seed}" / f"model-seed{seed}"))

    start = load_policy(str(model))
    exact = {seed: trained(EXACT, seed) for seed in size.seeds}
    gone = {seed: distance(policy, start) for seed, policy in exact.items()}
    distances_of: Record = {"from the start": list(gone.values())}
    if 0 in gone.values():  # nobody was rewarded, which takes a policy that knows nothing
        return distances_of
    for arm in ARMS:
        if arm != EXACT:
            distances_of[arm] = [distance(trained(arm, seed), exact[seed]) / gone[seed] for seed in size.seeds]
    pairs = itertools.combinations(size.seeds, 2)
    distances_of["other seeds"] = [distance(exact[a], exact[b]) / math.sqrt(gone[a] * gone[b]) for a, b in pairs]
    return distances_of


def drift(runs: dict[str, list[Record]], key: str) -> Record:
    """How an arm's curve differs from that of budget 0 with the same seed, beside how the seeds differ at budget 0."""
    differences: Record = {}
    for arm in ARMS:
        if arm != EXACT:
            pairs = zip(runs[arm], runs[EXACT], strict=True)
            apart = [[x - y for x, y in zip(a[key], b[key], strict=True)] for a, b in pairs]
            differences[arm] = {"per step": [about(step) for step in zip(*apart, strict=True)]}
            differences[arm]["at the end"] = about([at_the_end(difference) for difference in apart])
            differences[arm]["over all steps"] = about([statistics.fmean(difference) for difference in apart])
    ends = [at_the_end(run[key]) for run in runs[EXACT]]
    differences["other seeds"] = {"at the end": about(ends)}
    differences["other seeds"]["over all steps"] = about([statistics.fmean(run[key]) for run in runs[EXACT]])
    return differences


def at_the_end(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-max(1, round(END * len(curve))) :])


def about(values: Sequence[float]) -> Record:
    """Over the seeds, with the 95 % interval of the mean by Student's t."""
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = STUDENT[len(values)] * deviation / math.sqrt(len(values))
    summary: Record = {"mean": mean, "standard deviation": deviation, "least": min(values), "most": max(values)}
    return summary | {"95 %": [mean - half, mean + half]}


def compared(runs: dict[str, list[Record]]) -> Record:
    comparison: Record = {key: drift(runs, key) for key in ("entropy", "reward")}
    comparison["held-out reward"] = {arm: about([run["held-out reward"][-1][1] for run in runs[arm]]) for arm in ARMS}
    comparison["work"] = {
        arm: {
            "passes": statistics.fmean(x for run in runs[arm] for x in run["passes"]),
            "dropped gradient mass": statistics.fmean(x for run in runs[arm] for x in run["dropped_gradient_mass"]),
            "clip fraction": statistics.fmean(x for run in runs[arm] for x in run["clip_fraction"]),
        }
        for arm in ARMS
    }
    return comparison


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks budgets", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds; its numbers mean nothing")
    parser.add_argument(
        "--policy",
        type=Path,
        help="of `gspo_kernels.benchmarks.studies.policy` (default runs/policy, runs/tiny-policy)",
    )
    parser.add_argument("--folder", type=Path, help="of the trainings (default runs/budgets, runs/tiny-budgets)")
    parser.add_argument("--workers", type=positive, default=2, help="trainings at a time (default 2)")
    parser.add_argument("--output", type=Path, help=measure.OUTPUT)
    arguments = parser.parse_args()
    tiny = " --tiny" if arguments.tiny else ""
    policy = arguments.policy or (POLICY.with_name("tiny-policy") if tiny else POLICY)
    size, model, data = TINY if tiny else FULL, policy / "model", policy / "problems.jsonl"
    folder = arguments.folder or (FOLDER.with_name("tiny-budgets") if tiny else FOLDER)
    if not model.is_dir():
        parser.error(f"--policy: {policy} holds no policy: run `python -m gspo_kernels.benchmarks policy{tiny}` first")
    output = measure.destination("budgets", torch.device("cpu"), arguments.output, arguments.tiny)
    torch.set_num_threads(1)
    disable_progress_bar()  # of loading, which would write between our lines
    runs = trainings(size, model, data, folder, arguments.workers)
    results = {
        "policy": digest(policy),
        "updates": size.steps * size.updates,
        "settings": size._asdict(),
        "budgets": ARMS,
        "noise": NOISE,
        "control": CONTROL,
        "runs": runs,
        "distance": distances(size, model, folder),
        "compared": compared(runs),
    }
    for seed in size.seeds:  # gigabytes of checkpoints, of which nothing else is wanted
        for name in (f"start-{seed}", *(f"{name_of(arm)}-{seed}" for arm in ARMS)):
            shutil.rmtree(folder / name)
    for name, apart in results["distance"].items():
        print(f"distance of final parameters, {name}:", *(f"{x:.4g}" for x in apart))
    print(measure.save("budgets", torch.device("cpu"), results, output))
