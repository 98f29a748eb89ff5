"""Compare many random rows of `helpers.features` with float64: what the array of tests/math/test_array.py samples.

    python -m tests.attack --cases 100000 --seed 1
    python -m tests.attack --bits --cases 1000000 --seed 1

The second command compares the bits of log-probs over batches, padding, numbers of threads and processes. A run that
was interrupted continues where it stopped, after it has checked the wrong rows again. Wrong rows are printed with the
call that repeats them. After a change of the table, a seed draws other rows, so start again with another --out.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
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
from helpers.interpreter import prepare_interpreter
from helpers.pair_cover import Rows
from helpers.ranks import run_ranks
from torch import Tensor

from gspo_kernels import linear_log_probs

EVERY = 20  # rows of each process between two writes of the file
RECORD = Path(__file__).with_name("attack.json")  # the last runs with --record
TOKENS = {"torch": 16384, "triton": 128}  # of a batch of --bits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch", help="triton: interpreted")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; --bits uses two")
    parser.add_argument("--compiled", action="store_true", help="also draw compile=True, which takes seconds per row")
    parser.add_argument("--row", help="check one row, with the settings that a failure printed")
    parser.add_argument("--bits", action="store_true", help="compare bits; cases are log-probs")
    parser.add_argument("--record", action="store_true", help=f"add the result to tests/{RECORD.name}")
    parser.add_argument("--out", type=Path, help="default: build/attack-BACKEND-SEED.json or bits-BACKEND-SEED.json")
    options = parser.parse_args()
    if options.row is not None:
        prepare_process()
        check(row_of(options.row), options.seed)
        print("right")
        return 0

    kind = "bits" if options.bits else "attack"
    path = options.out or Path("build") / f"{kind}-{options.backend}-{options.seed}.json"
    path.parent.mkdir(exist_ok=True)
    state = json.loads(path.read_text()) if path.exists() else {"cases": 0, "seconds": 0.0, "wrong": []}
    step = TOKENS[options.backend] if options.bits else 1
    is_right = same_bits if options.bits else functools.partial(right_row, compiled=options.compiled)
    is_right = functools.partial(is_right, backend=options.backend)
    workers = 1 if options.bits else options.workers
    prepare_process()
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), prepare_process) as pool:

        def wrong_of(seeds: Iterable[int]) -> list[int]:
            results = map(is_right, seeds) if options.bits else pool.map(is_right, seeds)
            return [seed for seed, right in zip(seeds, results, strict=True) if not right]

        def save() -> None:
            path.write_text(json.dumps({**state, **versions(), "seed": options.seed}, indent=1) + "\n")

        state["wrong"] = wrong_of(state["wrong"])
        save()
        while state["cases"] < options.cases:
            begin, first = time.perf_counter(), options.seed * 10**7 + state["cases"]
            rows = 1 if options.bits else min(EVERY * workers, options.cases - state["cases"])
            state["wrong"] += wrong_of(range(first, first + rows * step, step))
            state["cases"] += rows * step
            state["seconds"] += time.perf_counter() - begin
            save()
            rate = state["cases"] / state["seconds"]
            print(f"\r{state['cases']:,} cases, {rate:.1f}/s, {len(state['wrong'])} wrong", end="", flush=True)
    if options.bits:
        other_process().shutdown()
    if options.record:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record[f"{kind}, {options.backend}"] = json.loads(path.read_text())
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{path}")
    return bool(state["wrong"])


def prepare_process() -> None:
    torch.set_num_threads(int(os.environ.get("GSPO_TEST_THREADS", "1")))
    warnings.simplefilter("ignore")
    prepare_interpreter()


@functools.cache
def rows_of(backend: str, compiled: bool) -> Rows:
    factors = {**FACTORS, **(OF_TRITON if backend == "triton" else {})}
    return Rows(factors if compiled else {**factors, "compile": (False,)}, BANS)


def right_row(seed: int, backend: str, compiled: bool) -> bool:
    row = rows_of(backend, compiled).any(random.Random(seed))
    try:
        with repeatable(row, seed):
            assert_right(build(row, seed))
    except AssertionError as error:  # the attack goes on
        print(f"\n{str(error)[:1000]}", flush=True)
        return False
    return True


def tokens_of(seed: int, backend: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments of `linear_log_probs` that have a value for each token, and the others."""
    rng, n = torch.Generator().manual_seed(seed), TOKENS[backend]
    vocab, width = (int(torch.randint(least, most, (), generator=rng)) for least, most in ((2, 300), (1, 90)))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed // n % 3]
    hidden, temperature = torch.randn(n, width, generator=rng), 0.5 + torch.rand(n, generator=rng)
    ids = torch.randint(vocab, (n,), generator=rng)
    weight = (3 * torch.randn(vocab, width, generator=rng) / width**0.5).to(dtype)
    others = {"lm_head": weight, "logit_softcap": random.Random(seed).choice((None, 5.0)), "backend": backend}
    return {"hidden": hidden.to(dtype), "target_ids": ids, "temperature": temperature}, others


def log_probs_of(seed: int, backend: str, threads: int) -> Tensor:
    torch.set_num_threads(threads)
    tokens, others = tokens_of(seed, backend)
    return linear_log_probs(**tokens, **others).log_probs


@functools.cache
def other_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def same_bits(seed: int, backend: str) -> bool:
    """Split the tokens into five padded batches. Another process must compute the same log-probs for them."""
    rng, n = random.Random(seed), TOKENS[backend]
    whole = log_probs_of(seed, backend, rng.choice((1, 2, 3)))
    parts = other_process().submit(log_probs_of_parts, seed, backend, rng.choice((1, 2, 3))).result()
    wrong = int((whole != parts).sum())
    if wrong:
        print(f"\nbatch {seed} of tokens_of: {wrong} of {n} log-probs have other bits", flush=True)
    return not wrong


def log_probs_of_parts(seed: int, backend: str, threads: int) -> Tensor:
    torch.set_num_threads(threads)
    rng, (tokens, others) = torch.Generator().manual_seed(seed), tokens_of(seed, backend)
    n = TOKENS[backend]
    out = torch.full((n,), torch.nan)
    cuts = torch.randint(n, (4,), generator=rng).sort().values
    for rows in torch.randperm(n, generator=rng).tensor_split(cuts):
        batch = int(torch.randint(1, 5, (), generator=rng))
        places = torch.randperm(batch * (len(rows) + 3), generator=rng)[: len(rows)]
        mask = torch.zeros(batch * (len(rows) + 3), dtype=torch.bool)
        mask[places] = True
        padded = {name: x.new_full((len(mask), *x.shape[1:]), -100) for name, x in tokens.items()}
        for name, x in tokens.items():
            padded[name][places] = x[rows]
        padded = {name: x.view(batch, -1, *x.shape[1:]) for name, x in padded.items()}
        log_probs = linear_log_probs(**padded, mask=mask.view(batch, -1), **others).log_probs
        out[rows] = log_probs.view(-1)[places]
    return out


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
