"""Measure what rows without a gradient and kept exponentials save, and what a gradient budget saves and costs.

    python -m gspo_kernels.benchmarks sparsity --passes    matrix passes and gradient errors (15 minutes on two cores)
    python -m gspo_kernels.benchmarks sparsity --cache     time with cache_mib, relative to the naive loss (25 minutes)

Passes and errors depend on the machine only through the size of its cells (128 x 168 on a CPU). Times are ratios within
one run. Without an option, both parts are measured. With one, only this part of the JSON file is replaced.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss

from .. import peaked, workloads
from ..candidates import ALL, BY_CACHE
from ..measure import Record, destination, save_part
from ..workloads import BUDGETS, MODELS, Head, Spec
from . import bench
from .options import parser_of, say

HEAD, TINY_HEAD = MODELS["qwen2.5-0.5b"], Head(64, 2000)
CPU = torch.device("cpu")
SEQUENCES = 64
RL_LIKE = dict(zero=19, clipped=7)  # of 64 sequences: 59.4 % of the rows have a gradient
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of `workloads.batch` and of `peaked.make`
    "rl-like": (RL_LIKE, {}),
    "heavier tail": (RL_LIKE, {"tail": 1e-3}),
    "no zero rows": (dict(zero=0, clipped=0), {}),
    "KL on": (RL_LIKE | dict(kl=True), {}),
    "flat policy": (RL_LIKE, {"peaked": False}),
}


def passes(rows: int, case: str, head: Head) -> list[Record]:
    """Make the batch of a case in `CASES`. Return the records of `by_budget` for it."""
    roles, policy = CASES[case]
    w = workloads.batch(peaked.make(rows, head.width, head.vocab, **policy), SEQUENCES, **roles)
    old = ALL["ours"].old(w)
    options = dict(old_log_probs=old.log_probs, ref_log_probs=old.ref_log_probs, objective=w.objective)
    records = by_budget(case, w.hidden, w.weight, w.target_ids, w.advantages, **options)
    return [{"case": case, **record} for record in records]


def by_budget(
    name: str, hidden: Tensor, weight: Tensor, target_ids: Tensor, advantages: Tensor, **options: Any
) -> list[Record]:
    """Make a record per budget: dropped share of the L1 mass of d_logits, shares computed, passes and errors.

    There is no cache. Errors are relative to the gradients of budget 0. Tensors and `options` are arguments of
    `gspo_fused_loss`.
    """
    records: list[Record] = []
    exact: tuple[Tensor, ...] = ()
    for budget in BUDGETS:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        out = gspo_fused_loss(*leaves, target_ids, advantages, gradient_budget=budget, cache_mib=0, **options)
        gradients = torch.autograd.grad(out.loss, leaves)
        exact = exact or gradients
        errors = [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, exact, strict=True)]
        names = ("dropped_gradient_mass", "live_row_share", "live_tile_share", "passes")
        record: Record = {"budget": budget, **{k: out.metrics[k].item() for k in names}}
        records.append(record | {"d_hidden error": errors[0], "d_weight error": errors[1]})
        print(name, {k: float(f"{v:.4g}") for k, v in records[-1].items()}, flush=True)
    return records


def main() -> None:
    parser = parser_of("sparsity", __doc__)
    parser.add_argument("--passes", action="store_true", help="matrix passes and gradient errors")
    parser.add_argument("--cache", action="store_true", help="time with cache_mib, relative to the naive loss")
    options = parser.parse_args()
    output = destination("sparsity", CPU, options.output, options.tiny)
    rows, tokens, rounds, head = (256, 64, 1, TINY_HEAD) if options.tiny else (2048, 1024, 5, HEAD)
    if options.passes or not options.cache:
        cases = [record for case in CASES for record in passes(rows, case, head)]
        print(save_part("sparsity", CPU, "passes", {**head._asdict(), "rows": rows, "cases": cases}, output))
    if options.cache or not options.passes:
        specs = [Spec(head, tokens, *kind) for kind in product(("dense", "rl-like"), ("float32", "bfloat16"))]
        chosen = [ALL[bench.NAIVE], ALL["ours"], *BY_CACHE.values()]
        runs = [bench.compare(spec, chosen, rounds, say) for spec in specs]
        print(save_part("sparsity", CPU, "cache", {"runs": runs}, output))
