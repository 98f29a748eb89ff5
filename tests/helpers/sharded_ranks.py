"""Run cases of tests/distributed on a rank."""

from __future__ import annotations

import datetime
import json
import os
import time
import traceback
from pathlib import Path

import helpers.sharded_agreement
import helpers.sharded_bits
import helpers.sharded_features
import helpers.sharded_metrics
import helpers.sharded_modules  # noqa: F401
import torch.distributed as dist
from helpers.sharded_cases import CASES, Context

DEADLINE = 400.0  # seconds; on two idle cores all cases take 90
TIMEOUT = datetime.timedelta(seconds=DEADLINE)  # also while other ranks run cases of their own


def main(rank: int, folder: Path, names: list[str]) -> None:
    """Run the cases of these names, and write the errors of this rank, by name of the case."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from helpers.interpreter import patch_language_once

        patch_language_once()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    world = dist.get_world_size()
    groups = {str(n): dist.new_group(list(range(n)), timeout=TIMEOUT) for n in (1, 2, 3, 4, 8) if n <= world}
    for i in range(2 if world >= 4 else 0):
        groups[f"row {i}"] = dist.new_group([2 * i, 2 * i + 1], timeout=TIMEOUT)
        groups[f"column {i}"] = dist.new_group([i, i + 2], timeout=TIMEOUT)
    context = Context(rank, groups)
    errors = {}
    seconds = {}
    for name in names:
        ranks, run = CASES[name]
        if rank < ranks:
            start = time.perf_counter()
            try:
                run(context)
            except Exception:
                errors[name] = traceback.format_exc()
            seconds[name] = time.perf_counter() - start
    (folder / f"rank-{rank}.json").write_text(json.dumps({"errors": errors, "seconds": seconds}))
