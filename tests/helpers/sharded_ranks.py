"""Run cases of tests/distributed on a rank."""

from __future__ import annotations

import datetime
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.sharded_agreement
import helpers.sharded_bits
import helpers.sharded_features
import helpers.sharded_metrics
import helpers.sharded_modules  # noqa: F401
import torch.distributed as dist
from helpers.sharded_cases import CASES, Context, add_row

DEADLINE = 900.0  # seconds; on two idle cores all cases take 200
TIMEOUT = datetime.timedelta(seconds=DEADLINE)  # also while other ranks run cases of their own


def main(rank: int, folder: Path, names: list[str], rows: dict[str, Any]) -> None:
    """Run the cases of these names, and write the errors of this rank, by name of the case.

    `rows` are the cases that are rows, by name, and their seeds.
    """
    for name, row_and_seed in rows.items():
        add_row(name, *row_and_seed)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from helpers.interpreter import prepare_interpreter

        prepare_interpreter()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    world = dist.get_world_size()
    groups = {str(n): dist.new_group(list(range(n)), timeout=TIMEOUT) for n in (1, 2, 3, 4, 8) if n <= world}
    for i in range(2 if world >= 4 else 0):
        groups[f"row {i}"] = dist.new_group([2 * i, 2 * i + 1], timeout=TIMEOUT)
        groups[f"column {i}"] = dist.new_group([i, i + 2], timeout=TIMEOUT)
    context = Context(rank, groups)
    errors: dict[str, str] = {}
    seconds: dict[str, float] = {}
    comparisons: dict[str, Any] = {}

    def timed(name: str, run: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*args)
        except Exception:
            errors[name] = traceback.format_exc()
        finally:
            seconds[name] = seconds.get(name, 0) + time.perf_counter() - start

    for name in names:
        if rank < CASES[name].ranks:
            comparisons[name] = timed(name, CASES[name].run, context)
    for name, compare in comparisons.items():
        if compare is not None:
            timed(name, compare)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"errors": errors, "seconds": seconds}))
