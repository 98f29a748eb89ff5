"""What a gradient budget saves and costs, on this CPU.

    python -m benchmarks.sparsity --passes    matrix passes and gradient error by budget, losing cases too (10 minutes)
    python -m benchmarks.sparsity --time      time and peak memory against the naive loss, interleaved (5 minutes)

Without a GPU passes and errors are what can be known; times are ratios within one run. Results go to one JSON file.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gspo_kernels
from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, live_tiles, ops, portable_tiles

from . import peaked

RESULTS = Path(__file__).parent / "results" / "sparsity-cpu.json"
WIDTH, VOCAB = 896, 151_936  # Qwen2.5-0.5B
BUDGETS = (0.0, 1e-4, 1e-3, 4e-3, 1e-2)
CLIPPED = 1e-3  # a log-ratio outside the window of 3e-4 / 4e-4


class Batch(NamedTuple):
    policy: peaked.Policy
    advantages: Tensor  # [S]
    old_log_probs: Tensor  # [N]
    ref_log_probs: Tensor | None
    objective: Objective

    @property
    def cu_seqlens(self) -> Tensor:
        sequences = self.advantages.shape[0]
        return torch.arange(sequences + 1) * (self.old_log_probs.shape[0] // sequences)


def batch(rows: int, sequences: int, zero: int, clipped: int, kl: bool = False, **policy: Any) -> Batch:
    """Sequences of one length: the first `zero` have advantage 0, the next `clipped` lie beyond the clip."""
    made = peaked.make(rows, WIDTH, VOCAB, **policy)
    sign = torch.tensor([1.0, -1.0]).repeat(sequences)[:sequences]
    advantages = sign * torch.linspace(0.5, 1.5, sequences)
    advantages[:zero] = 0
    log_ratio = torch.linspace(-1e-4, 1e-4, sequences)
    log_ratio[zero : zero + clipped] = sign[zero : zero + clipped] * CLIPPED
    with torch.no_grad():
        log_probs = linear_log_probs(made.hidden, made.weight, made.target_ids).log_probs
    old = log_probs - log_ratio.repeat_interleave(rows // sequences)
    rng = torch.Generator().manual_seed(1)
    ref = log_probs + 0.1 * torch.randn(rows, generator=rng) if kl else None
    return Batch(made, advantages, old, ref, Objective(kl_coef=0.04) if kl else Objective())


def ours(b: Batch, budget: float, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    hidden, weight = (x.to(dtype).detach().requires_grad_() for x in b.policy[:2])
    out = gspo_fused_loss(
        hidden, weight, b.policy.target_ids, b.advantages, cu_seqlens=b.cu_seqlens, old_log_probs=b.old_log_probs,
        ref_log_probs=b.ref_log_probs, objective=b.objective, gradient_budget=budget,
    )  # fmt: skip
    out.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return out.metrics, hidden.grad, weight.grad


def naive(b: Batch) -> tuple[Tensor, Tensor]:
    """GSPO from full logits, as a loop in plain PyTorch has it."""
    hidden, weight = (x.detach().requires_grad_() for x in b.policy[:2])
    log_probs = (hidden @ weight.t()).log_softmax(-1).gather(1, b.policy.target_ids[:, None])[:, 0]
    u = (log_probs - b.old_log_probs).view(b.advantages.shape[0], -1).mean(1)
    ratio = u.exp()
    clip = ratio.clamp(1 - b.objective.clip_low, 1 + b.objective.clip_high)
    torch.maximum(-ratio * b.advantages, -clip * b.advantages).mean().backward()
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad, weight.grad


# Passes and errors


CASES: dict[str, dict[str, Any]] = {  # 64 sequences of 32; 19 of zero advantage and 7 of the others clipped: 0.594 live
    "rl-like": dict(zero=19, clipped=7),
    "heavier tail": dict(zero=19, clipped=7, tail=1e-3),
    "no zero rows": dict(zero=0, clipped=0),
    "KL on": dict(zero=19, clipped=7, kl=True),
    "flat policy": dict(zero=19, clipped=7, peaked=False),
    "cells of 128 x 256": dict(zero=19, clipped=7),  # 128 x 256, as on Hopper, where a CPU has 128 x 168
}


def passes(case: str) -> list[dict[str, Any]]:
    found = []
    with _cells_of_kernels() if case.startswith("cells") else nullcontext():
        b = batch(2048, 64, **CASES[case])
        exact: tuple[Tensor, Tensor] | None = None
        for budget in BUDGETS:
            metrics, *gradients = ours(b, budget)
            exact = exact or (gradients[0], gradients[1])
            errors = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)]
            names = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")
            record = {"case": case, "budget": budget, **{k: metrics[k].item() for k in names}}
            record |= {"d_hidden error": errors[0], "d_weight error": errors[1], **peaked.about(b.policy)}
            found.append(record)
            print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in record.items()}, flush=True)
    return found


@contextmanager
def _cells_of_kernels() -> Iterator[None]:
    before = portable_tiles._TILE_ON_CPU, portable_tiles._CELL_ON_CPU
    portable_tiles._TILE_ON_CPU, portable_tiles._CELL_ON_CPU = (128, 24 * 256), 256
    try:
        yield
    finally:
        portable_tiles._TILE_ON_CPU, portable_tiles._CELL_ON_CPU = before


# Time and memory


def timed_batch() -> Batch:
    """8 sequences of 128: 2 of zero advantage, 3 clipped."""
    return batch(1024, 8, zero=2, clipped=3)


CANDIDATES: dict[str, Callable[[Batch], object]] = {
    "naive": naive,
    "exact": lambda b: ours(b, 0.0),
    "budget 1e-3": lambda b: ours(b, 1e-3),
}


def times(rounds: int) -> dict[str, Any]:
    b, taken = timed_batch(), {name: [] for name in CANDIDATES}
    for _ in range(rounds + 1):
        for name, run in CANDIDATES.items():
            start = time.perf_counter()
            run(b)
            taken[name].append(time.perf_counter() - start)
    median = {name: statistics.median(t[1:]) for name, t in taken.items()}  # the first round warms up
    spread = {name: [min(t[1:]), max(t[1:])] for name, t in taken.items()}
    memory = {name: _memory(name) for name in CANDIDATES}
    lists = _list_building(b)
    return {
        "seconds": median, "least and most": spread, "over naive": {k: v / median["naive"] for k, v in median.items()},
        "peak extra MiB": memory, "memory over naive": {k: v / memory["naive"] for k, v in memory.items()},
        "ordering and lists over budget 1e-3": lists / median["budget 1e-3"],
    }  # fmt: skip


def _list_building(b: Batch) -> float:
    """Seconds spent to choose what is computed, in a forward that does."""
    taken, choose = [], live_tiles.choose

    def measured(*args: Any) -> Any:
        start = time.perf_counter()
        found = choose(*args)
        taken.append(time.perf_counter() - start)
        return found

    ops.choose = measured
    try:
        for _ in range(3):
            ours(b, 1e-3)
    finally:
        ops.choose = choose
    return statistics.median(taken)


def _memory(name: str) -> float:
    """Peak of resident memory above what the inputs take, MiB, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sparsity", "--memory-of", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _print_memory(name: str) -> None:
    b = timed_batch()
    small = b._replace(policy=peaked.make(8, 64, 1000), old_log_probs=torch.zeros(8))
    CANDIDATES[name](small)  # libraries allocate at their first call
    Path("/proc/self/clear_refs").write_text("5")  # Linux forgets the peak so far
    before = _status("VmRSS")
    CANDIDATES[name](b)
    print((_status("VmHWM") - before) / 1024)


def _status(name: str) -> int:
    """A figure of this process, KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparsity", description=__doc__.split("\n\n")[0])
    parser.add_argument("--passes", action="store_true", help="matrix passes and gradient error by budget")
    parser.add_argument("--case", choices=CASES, action="append", help="of --passes, only this one; may be repeated")
    parser.add_argument("--time", action="store_true", help="time and memory against the naive loss")
    parser.add_argument("--rounds", type=int, default=5, help="of --time (default 5)")
    parser.add_argument("--memory-of", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS, help="default benchmarks/results/sparsity-cpu.json")
    arguments = parser.parse_args()
    if arguments.memory_of:
        return _print_memory(arguments.memory_of)
    if not (arguments.passes or arguments.time):
        parser.error("nothing to do: give --passes or --time")
    if arguments.case and not arguments.passes:
        parser.error("--case goes with --passes")
    report = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "commit": commit,
        "versions": {"torch": torch.__version__, "gspo_kernels": gspo_kernels.__version__},
    }  # fmt: skip
    if arguments.passes:
        old = report.get("passes", {}).get("results", [])
        chosen = arguments.case or list(CASES)
        results = [r for r in old if r["case"] not in chosen] + [r for case in chosen for r in passes(case)]
        report["passes"] = {**about, "rows": 2048, "width": WIDTH, "vocab": VOCAB, "results": results}
    if arguments.time:
        report["time"] = {**about, "rows": 1024, "width": WIDTH, "vocab": VOCAB, **times(arguments.rounds)}
        print(json.dumps(report["time"], indent=1))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
