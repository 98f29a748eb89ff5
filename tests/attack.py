"""Compare many random rows of `helpers.features` with float64: what the array of tests/math/test_array.py samples.

    python -m tests.attack --cases 100000 --seed 1

A run that was interrupted continues where it stopped. Wrong rows are printed with the call that repeats them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does, see pyproject.toml
os.environ.setdefault("GSPO_TEST_DEVICE", "cpu")
os.environ["TRITON_INTERPRET"] = "1"
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"  # see conftest.py

import torch
import triton
from helpers import sharded_ranks
from helpers.array import assert_right
from helpers.features import BANS, FACTORS, OF_TRITON, build, repeatable, row_of
from helpers.interpreter import ignore_nan_in_extremes, patch_language_once
from helpers.pair_cover import Rows
from helpers.ranks import run_ranks

EVERY = 20  # cases between two writes of the file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch", help="triton: interpreted")
    parser.add_argument("--compiled", action="store_true", help="also draw compile=True, which takes seconds per row")
    parser.add_argument("--row", help="check one row, with the settings that a failure printed")
    parser.add_argument("--out", type=Path, help="default: build/attack-BACKEND-SEED.json")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("GSPO_TEST_THREADS", "1")))
    warnings.simplefilter("ignore")
    patch_language_once()
    ignore_nan_in_extremes()
    if options.row is not None:
        check(row_of(options.row), options.seed)
        print("right")
        return 0

    path = options.out or Path("build") / f"attack-{options.backend}-{options.seed}.json"
    path.parent.mkdir(exist_ok=True)
    state = json.loads(path.read_text()) if path.exists() else {"cases": 0, "seconds": 0.0, "wrong": []}
    factors = {**FACTORS, **(OF_TRITON if options.backend == "triton" else {})}
    rows = Rows(factors if options.compiled else {**factors, "compile": (False,)}, BANS)
    while state["cases"] < options.cases:
        begin, seed = time.perf_counter(), options.seed * 10**7 + state["cases"]
        row = rows.any(random.Random(seed))
        try:
            with repeatable(row, seed):
                assert_right(build(row, seed))
        except AssertionError as error:  # the attack goes on
            state["wrong"].append(str(error)[:1000])
            print(f"\n{state['wrong'][-1]}", flush=True)
        state["cases"] += 1
        state["seconds"] += time.perf_counter() - begin
        if state["cases"] % EVERY == 0 or state["cases"] == options.cases:
            path.write_text(json.dumps({**state, **versions(), "seed": options.seed}, indent=1) + "\n")
            rate = state["cases"] / state["seconds"]
            print(f"\r{state['cases']:,} cases, {rate:.1f}/s, {len(state['wrong'])} wrong", end="", flush=True)
    print(f"\n{path}")
    return bool(state["wrong"])


def check(row: dict[str, Any], seed: int) -> None:
    ranks = row["tp"] * row["cp"]
    if ranks == 1:
        return assert_right(build(row, seed))
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(sharded_ranks.main, ranks, Path(folder), ["row"], {"row": (row, seed)})
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("rank-*.json")]
    assert not any(x["errors"] for x in reports), "\n".join(text for x in reports for text in x["errors"].values())


def versions() -> dict[str, str]:
    cpu = Path("/proc/cpuinfo")
    names = [x.split(":")[1].strip() for x in cpu.read_text().splitlines() if "model name" in x] if cpu.exists() else []
    of_packages = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    return {**of_packages, "processor": names[0] if names else platform.processor()}


if __name__ == "__main__":
    sys.exit(main())
