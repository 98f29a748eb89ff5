"""What zero coefficients save, and what a gradient budget saves and costs.

    python -m gspo_kernels.benchmarks sparsity --passes    matrix passes and gradient error (15 minutes on two cores)
    python -m gspo_kernels.benchmarks sparsity --time      time and peak memory against the naive loss (20 minutes)

Passes and errors do not depend on the machine (but for the size of a cell); times are ratios within one run. With
neither option both parts are measured; each keeps what the file has of the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss, ops
from gspo_kernels.backends import live_tiles
from gspo_kernels.backends.torch import tiles as torch_tiles

from .. import peaked, workloads
from ..candidates import ALL, Candidate, ours_at
from ..measure import OUTPUT, Record, destination, fresh, interleaved, over, peak_bytes, save_part, spread
from ..workloads import BUDGETS, Old, Workload
from . import bench
from .step import positive, say

WIDTH, VOCAB = 896, 151_936  # Qwen2.5-0.5B
SEQUENCES = 64
RL_LIKE: dict[str, Any] = dict(zero=19, clipped=7)  # of 64: 0.594 of the rows have a gradient
CASES: dict[str, dict[str, Any]] = {
    "rl-like": RL_LIKE,
    "heavier tail": RL_LIKE | dict(tail=1e-3),
    "no zero rows": dict(zero=0, clipped=0),
    "KL on": RL_LIKE | dict(kl=True),
    "flat policy": RL_LIKE | dict(peaked=False),
    "cells of 128 x 256": RL_LIKE,  # as on Hopper, where a CPU has 128 x 168
}
SHARES = {f"zero share {zero / SEQUENCES:g}": dict(zero=zero, clipped=0) for zero in (0, 16, 32, 48)}
SURE = {f"sure {sure:g}": RL_LIKE | dict(sure=sure) for sure in (0.1, 0.3, 0.5, 0.8)}  # tokens under 0.01 nats
SWEEPS = {"cases": (CASES, BUDGETS), "zero share": (SHARES, (0.0, 1e-3)), "entropy": (SURE, (0.0, 1e-3))}
DRIFT = 0.1  # of reference log-probs, standard deviation


def make(
    rows: int, sequences: int = SEQUENCES, *, zero: int, clipped: int, kl: bool = False, **policy: Any
) -> Workload:
    width, vocab = policy.pop("width", WIDTH), policy.pop("vocab", VOCAB)
    w = workloads.batch(peaked.make(rows, width, vocab, **policy), sequences, zero, clipped)
    if not kl:
        return w
    return w._replace(kl_drift=DRIFT * torch.randn(w.target_ids.shape, generator=torch.Generator().manual_seed(1)))


def ours(w: Workload, old: Old, budget: float) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Metrics and gradients."""
    hidden, weight = w.hidden.detach().requires_grad_(), w.weight.detach().requires_grad_()
    out = gspo_fused_loss(
        hidden,
        weight,
        w.target_ids,
        w.advantages,
        old_log_probs=old.log_probs,
        ref_log_probs=old.ref_log_probs,
        objective=w.objective,
        gradient_budget=budget,
    )
    d_hidden, d_weight = torch.autograd.grad(out.loss, (hidden, weight))
    return out.metrics, d_hidden, d_weight


def passes(rows: int, case: str, options: dict[str, Any], budgets: tuple[float, ...], sizes: Record) -> list[Record]:
    """A record per budget; errors are relative to the exact gradients, norm over norm."""
    with _cells_of_kernels() if case.startswith("cells") else nullcontext():
        w = make(rows, **options, **sizes)
        old = ALL["ours"].old(w)
        about_policy = peaked.entropy_quantiles(w.entropy.flatten())
        records = by_budget(lambda budget: ours(w, old, budget), budgets, case)
    return [{"case": case, **record, **about_policy} for record in records]


def by_budget(
    run: Callable[[float], tuple[dict[str, Tensor], Tensor, Tensor]], budgets: tuple[float, ...], name: str
) -> list[Record]:
    """What each budget leaves to compute, and how far its gradients are from those of the first, which is exact.

    `run`: budget -> metrics and both gradients. `name`: of what is run, for the line that tells of each.
    """
    records: list[Record] = []
    exact: tuple[Tensor, Tensor] | None = None
    for budget in budgets:
        metrics, *gradients = run(budget)
        exact = exact or (gradients[0], gradients[1])
        errors = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)]
        names = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")
        record: Record = {"budget": budget, **{k: metrics[k].item() for k in names}}
        records.append(record | {"d_hidden error": errors[0], "d_weight error": errors[1]})
        print(name, {k: float(f"{v:.4g}") for k, v in records[-1].items()}, flush=True)
    return records


@contextmanager
def _cells_of_kernels() -> Iterator[None]:
    before = torch_tiles._TILE_ON_CPU, torch_tiles._CELL_ON_CPU
    torch_tiles._TILE_ON_CPU, torch_tiles._CELL_ON_CPU = (128, 24 * 256), 256
    try:
        yield
    finally:
        torch_tiles._TILE_ON_CPU, torch_tiles._CELL_ON_CPU = before


# Time and memory

TIMED: dict[str, Any] = dict(sequences=8, zero=2, clipped=1)  # rl-like of `workloads`
NAIVE = ALL[bench.NAIVE]._replace(name="naive")
NAMES = {"exact": 0.0} | {f"budget {b:g}": b for b in BUDGETS[1:]}


def times(rows: int, rounds: int, sizes: Record) -> Record:
    """By budget, by the share of sequences of zero advantage, and by how sure the policy is."""
    w = make(rows, **TIMED, **sizes)
    by_budget = _times(w, tuple(NAMES), rounds)
    memory = {
        name: fresh("suites.sparsity", "memory_of", name=name, rows=rows, sizes=sizes) for name in (NAIVE.name, *NAMES)
    }
    two, shares, sure = ("exact", "budget 0.001"), [], []
    for zero in (0, 2, 4, 6):
        shares.append({"zero share": zero / 8, **_times(make(rows, 8, zero=zero, clipped=0, **sizes), two, rounds)})
    for share in (0.1, 0.5, 0.8):
        timed = make(rows, **TIMED, sure=share, **sizes)
        sure.append({"mean entropy": timed.entropy.mean().item(), **_times(timed, two, rounds)})
    return {
        "rows": rows,
        "sequences": TIMED,
        "by budget": by_budget,
        "peak bytes": memory,
        "by zero share": shares,
        "by entropy": sure,
        "choosing cells over budget 1e-3": _choosing(w) / by_budget["budget 0.001"]["seconds"],
    }


def _candidate(name: str) -> Candidate:
    return NAIVE if name == NAIVE.name else ours_at(NAMES[name], name)


def _times(w: Workload, names: Sequence[str], rounds: int) -> Record:
    """No times of wrong gradients: a fault of ours is none to be reported as a result."""
    chosen, old = [NAIVE, *map(_candidate, names)], ALL["ours"].old(w)
    olds = {candidate.name: old for candidate in chosen} | {NAIVE.name: NAIVE.old(w)}
    records: dict[str, Record] = {
        candidate.name: {"name": candidate.name, "against": candidate.against} for candidate in chosen
    }
    bench.check(w, chosen, olds, records, say, w)
    for name, record in records.items():
        for why in record.keys() & bench.OUT:
            raise RuntimeError(f"{name}: {why} gradients, {record[why]}")
    runs = {candidate.name: partial(candidate.step, w, olds[candidate.name]) for candidate in chosen}
    taken = interleaved(runs, rounds, torch.device("cpu"), say)
    return {name: spread(s) | {"over_naive": over(s, taken[NAIVE.name])} for name, s in taken.items()}


def _choosing(w: Workload) -> float:
    """Seconds spent to choose what is computed, in a forward that does."""
    taken, choose, old = [], live_tiles.choose, ALL["ours"].old(w)

    def measured(*args: Any) -> Any:
        start = time.perf_counter()
        chosen = choose(*args)
        taken.append(time.perf_counter() - start)
        return chosen

    ops.choose = measured
    try:
        for _ in range(3):
            ours(w, old, 1e-3)
    finally:
        ops.choose = choose
    return statistics.median(taken)


def memory_of(name: str, rows: int, sizes: Record) -> int:
    """Peak bytes beyond the inputs, for a process of its own."""
    candidate, small = _candidate(name), make(64, width=64, vocab=1000, **TIMED)
    candidate.step(small, candidate.old(small))  # libraries allocate at their first call
    w = make(rows, **TIMED, **sizes)
    old = candidate.old(w)
    return peak_bytes(lambda: candidate.step(w, old), torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks sparsity", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--passes", action="store_true", help="matrix passes and gradient error")
    parser.add_argument("--time", action="store_true", help="time and memory against the naive loss")
    parser.add_argument("--rounds", type=positive, default=5, help="of --time (default 5)")
    parser.add_argument("--tiny", action="store_true", help="a trial with small shapes")
    parser.add_argument("--output", type=Path, help=OUTPUT)
    options = parser.parse_args()
    both = not (options.passes or options.time)
    device = torch.device("cpu")
    output = destination("sparsity", device, options.output, options.tiny)
    rows, timed_rows, rounds, sizes = 2048, 1024, options.rounds, {}
    if options.tiny:
        rows, timed_rows, rounds, sizes = 256, 64, 1, {"width": 64, "vocab": 2000}
    head = {"width": WIDTH, "vocab": VOCAB, **sizes}
    if options.passes or both:
        results = {
            sweep: [r for case, case_options in cases.items() for r in passes(rows, case, case_options, budgets, sizes)]
            for sweep, (cases, budgets) in SWEEPS.items()
        }
        print(save_part("sparsity", device, "passes", {**head, "rows": rows, **results}, output))
    if options.time or both:
        print(save_part("sparsity", device, "time", {**head, **times(timed_rows, rounds, sizes)}, output))
