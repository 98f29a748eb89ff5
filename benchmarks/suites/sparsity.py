"""Measure what zero coefficients save, and what a gradient budget saves and costs.

    python -m gspo_kernels.benchmarks sparsity --passes    matrix passes and gradient errors (15 minutes on two cores)
    python -m gspo_kernels.benchmarks sparsity --time      time and peak memory over the naive loss (10 minutes)

Passes and errors depend on the machine only by its cell size; times are ratios within one run. Without these options
both parts are measured; each keeps the file's other part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.torch import tiles as torch_tiles

from .. import peaked, workloads
from ..candidates import ALL, Candidate, ours_at
from ..measure import Record, destination, fresh, interleaved, over, peak_bytes, save_part, spread
from ..workloads import BUDGETS, Old, Workload
from . import bench
from .options import parser_of, positive, say

WIDTH, VOCAB = 896, 151_936  # Qwen2.5-0.5B
CPU = torch.device("cpu")
SEQUENCES = 64
RL_LIKE: dict[str, Any] = dict(zero=19, clipped=7)  # of 64 sequences: 59.4 % of the rows have a gradient
CASES: dict[str, dict[str, Any]] = {
    "rl-like": RL_LIKE,
    "heavier tail": RL_LIKE | dict(tail=1e-3),
    "no zero rows": dict(zero=0, clipped=0),
    "KL on": RL_LIKE | dict(kl=True),
    "flat policy": RL_LIKE | dict(peaked=False),
    "cells of 128 x 256": RL_LIKE,  # as on Hopper; a CPU's are 128 x 168
}
TIMED: dict[str, Any] = dict(sequences=8, zero=2, clipped=1)  # `rl-like` of workloads.py
NAIVE = ALL[bench.NAIVE]._replace(name="naive")
NAMES = {"exact": 0.0} | {f"budget {b:g}": b for b in BUDGETS[1:]}
DRIFT = 0.1  # standard deviation of reference less current log-probs


def make(
    rows: int, sequences: int = SEQUENCES, *, zero: int, clipped: int, kl: bool = False, **policy: Any
) -> Workload:
    """Return a batch of `rows` tokens. `policy`: arguments of `peaked.make`."""
    width, vocab = policy.pop("width", WIDTH), policy.pop("vocab", VOCAB)
    w = workloads.batch(peaked.make(rows, width, vocab, **policy), sequences, zero, clipped)
    if not kl:
        return w
    return w._replace(kl_drift=DRIFT * torch.randn(w.target_ids.shape, generator=torch.Generator().manual_seed(1)))


def ours(w: Workload, old: Old, budget: float) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return metrics and both gradients of our loss."""
    hidden, weight = w.hidden.detach().requires_grad_(), w.weight.detach().requires_grad_()
    out = gspo_fused_loss(
        hidden, weight, w.target_ids, w.advantages, old_log_probs=old.log_probs, ref_log_probs=old.ref_log_probs,
        objective=w.objective, gradient_budget=budget,
    )  # fmt: skip  # lines by subject
    d_hidden, d_weight = torch.autograd.grad(out.loss, (hidden, weight))
    return out.metrics, d_hidden, d_weight


def passes(rows: int, case: str, sizes: Record) -> list[Record]:
    """Return a record per budget: passes, dropped mass, and errors relative to the exact gradients."""
    with ExitStack() as stack:
        if case.startswith("cells"):
            stack.enter_context(patch.object(torch_tiles, "_TILE_ON_CPU", (128, 24 * 256)))
            stack.enter_context(patch.object(torch_tiles, "_CELL_ON_CPU", 256))
        w = make(rows, **CASES[case], **sizes)
        old = ALL["ours"].old(w)
        records = by_budget(partial(ours, w, old), BUDGETS, case)
    return [{"case": case, **record, **peaked.entropy_quantiles(w.entropy.flatten())} for record in records]


def by_budget(
    run: Callable[[float], tuple[dict[str, Tensor], Tensor, Tensor]], budgets: tuple[float, ...], name: str
) -> list[Record]:
    """Return a record per budget: what is left to compute, and errors relative to the first budget's gradients.

    `run` maps a budget to metrics and both gradients; the first budget is 0. Each record is printed after `name`.
    """
    records: list[Record] = []
    exact: list[Tensor] = []
    for budget in budgets:
        metrics, *gradients = run(budget)
        exact = exact or gradients
        errors = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)]
        names = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")
        record: Record = {"budget": budget, **{k: metrics[k].item() for k in names}}
        records.append(record | {"d_hidden error": errors[0], "d_weight error": errors[1]})
        print(name, {k: float(f"{v:.4g}") for k, v in records[-1].items()}, flush=True)
    return records


def times(rows: int, rounds: int, sizes: Record) -> Record:
    """Return time over naive GSPO's, and peak memory, by budget."""
    w = make(rows, **TIMED, **sizes)
    by_name = _times(w, tuple(NAMES), rounds)
    for name, timed in by_name.items():
        print(f"{name}: {timed['over_naive']['ratio']:.2f} of the naive loss's time", flush=True)
    how: Record = dict(rows=rows, sizes=sizes)
    memory = {name: fresh("suites.sparsity", "memory_of", name=name, **how) for name in (NAIVE.name, *NAMES)}
    return {"rows": rows, "sequences": TIMED, "by budget": by_name, "peak bytes": memory}


def _candidate(name: str) -> Candidate:
    return NAIVE if name == NAIVE.name else ours_at(NAMES[name], name)


def _times(w: Workload, names: Sequence[str], rounds: int) -> Record:
    """Return times of the naive loss and of ours; raise RuntimeError if a gradient is wrong."""
    chosen = [NAIVE, *map(_candidate, names)]
    records, olds = bench.checked(w, chosen)
    for name, record in records.items():
        for reason in record.keys() & {*bench.NOT_TIMED}:
            raise RuntimeError(f"{name}: {reason} gradients, {record[reason]}")
    runs = {candidate.name: partial(candidate.step, w, olds[candidate.name]) for candidate in chosen}
    taken = interleaved(runs, rounds, CPU, say)
    return {name: spread(s) | {"over_naive": over(s, taken[NAIVE.name])} for name, s in taken.items()}


def memory_of(name: str, rows: int, sizes: Record) -> int:
    """Return peak bytes beyond the inputs. Runs in a new process."""
    candidate, small = _candidate(name), make(64, width=64, vocab=1000, **TIMED)
    candidate.step(small, candidate.old(small))  # libraries allocate in their first call
    w = make(rows, **TIMED, **sizes)
    old = candidate.old(w)
    return peak_bytes(lambda: candidate.step(w, old), CPU)


def main() -> None:
    parser = parser_of("sparsity", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="of --time (default 5)")
    parser.add_argument("--passes", action="store_true", help="matrix passes and gradient errors")
    parser.add_argument("--time", action="store_true", help="time and memory over the naive loss")
    options = parser.parse_args()
    both = not (options.passes or options.time)
    output = destination("sparsity", CPU, options.output, options.tiny)
    rows, timed_rows, rounds, sizes = 2048, 1024, options.rounds, {}
    if options.tiny:
        rows, timed_rows, rounds, sizes = 256, 64, 1, {"width": 64, "vocab": 2000}
    head = {"width": WIDTH, "vocab": VOCAB, **sizes}
    if options.passes or both:
        cases = [record for case in CASES for record in passes(rows, case, sizes)]
        print(save_part("sparsity", CPU, "passes", {**head, "rows": rows, "cases": cases}, output))
    if options.time or both:
        print(save_part("sparsity", CPU, "time", {**head, **times(timed_rows, rounds, sizes)}, output))
