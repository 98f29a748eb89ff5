"""Time of loss and gradients over naive GSPO's, alone and beside another busy process, in one run.

    python -m gspo_kernels.benchmarks busy       (5 minutes on two cores)

Beside a busy process a core's time is shared. Threads that meet after every operation then wait for the slowest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ..candidates import ALL
from ..measure import OUTPUT, Record, destination, interleaved, over, save, spread
from ..workloads import MODELS, Spec, make
from .bench import NAIVE
from .step import positive, say

CANDIDATES = (NAIVE, "ours", "ours, budget 1e-3")
MOST = 1.2  # limit: a ratio to naive GSPO beside one busy process over the same ratio alone


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep some processes computing."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(0.5 if started else 0)  # until they compute
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(spec: Spec, rounds: int) -> list[Record]:
    """Return one record per number of busy processes: each candidate's times, and their ratios to naive GSPO's."""
    w = make(spec)
    runs = {name: partial(ALL[name].step, w, ALL[name].old(w)) for name in CANDIDATES}
    records = []
    for processes in (0, 1):
        say(f"beside {processes} busy processes")
        with busy(processes):
            seconds = interleaved(runs, rounds, torch.device("cpu"))
        timed = {name: spread(taken) | {"over_naive": over(taken, seconds[NAIVE])} for name, taken in seconds.items()}
        records.append({"busy processes": processes, "candidates": timed})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks busy", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each, in turns (default 5)")
    parser.add_argument("--tiny", action="store_true", help="a trial with small shapes")
    parser.add_argument("--output", type=Path, help=OUTPUT)
    options = parser.parse_args()
    head = MODELS["qwen2.5-0.5b"]
    spec, rounds = Spec(head, 1024, "rl-like"), options.rounds
    if options.tiny:
        spec, rounds = spec._replace(head=head._replace(width=64, vocab=9000), tokens=256), 2
    output = destination("busy", torch.device("cpu"), options.output, options.tiny)
    records = measure(spec, rounds)
    on = spec._asdict() | {"head": head._asdict()}
    print(save("busy", torch.device("cpu"), {"on": on, "records": records}, output))
