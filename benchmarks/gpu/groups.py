"""The groups of measurements, and the run of one group in this process."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gspo_kernels.backends.triton.elementary import INTERPRETED

from ..candidates import ALL
from ..measure import Record, about, results_in, save
from . import times, tune
from .times import FULL, SHAPES, SHARES, Measurement, Setting, Shape

UNFINISHED = "did not finish"
RL = ("rl-4k", "rl-8k", "rl-32k")  # groups of RL-like batches
# Estimates assume half of an H200's 989.5 TFLOP/s (bf16, dense, datasheet), and half of its 67 TFLOP/s in float64.
PASS, EXACT_PASS = (SHAPES["A"].operations / (0.5e12 * peak) for peak in (989.5, 67.0))  # seconds
START = 6.0  # seconds to make a batch in a new process, as on an H200 with 16 cores
COMPILE = 1.0  # seconds to compile a kernel, likewise
RUNS = 9  # of `clock`


class Group(NamedTuple):
    what: str
    run: Callable[[Setting], Iterator[Measurement]]
    seconds: float  # estimated

    @property
    def deadline(self) -> float:
        """Seconds after which the group is killed."""
        return 60 + 3 * self.seconds


def seconds(kernels: int = 0, passes: float = 0.0, exact: float = 0.0, more: float = 0.0) -> float:
    """Estimate a group's seconds from the kernels to compile and the passes of shape A, in bf16 and in float64."""
    return START + COMPILE * kernels + PASS * passes + EXACT_PASS * exact + more


def all_groups() -> dict[str, Group]:
    """All groups by name. `DEFAULT` lists the groups that run if none is named, in order of importance."""
    groups = {"ceilings": Group("a copy, the vendor's products", times.ceilings, seconds(passes=15 * RUNS))}
    for name, shape in SHAPES.items():
        size = shape.operations / SHAPES["A"].operations
        what = f"N, H, V = {', '.join(map(str, shape))}: passes, kernels, errors, full logits"
        more = 20 if name == "D" else 0  # TRL and Liger, whose GRPO loss is slow
        groups[name] = Group(what, partial(times.steps, name=name), seconds(8, 26 * RUNS * size, 8 * size, more))
    for name in ("A", "C"):
        what = f"backward of {', '.join(f'{x:g}' for x in SHARES)} of the cells, shape {name}"
        groups[f"cells-{name}"] = Group(what, partial(times.cells, name=name), seconds(6, 16 * RUNS))
    for n, (name, tokens) in enumerate(zip(RL, FULL.tokens, strict=True)):
        size = SHAPES["D"]._replace(rows=tokens).operations / SHAPES["A"].operations
        candidates = 8 if n else len(ALL)
        what = f"RL-like, {tokens} tokens, head of D: " + ("ours, full logits, TRL, Liger" if n else "all packages")
        estimate = seconds(8, 4 * candidates * (times.ROUNDS + 4) * size, 8 * size, more=0 if n else 60)
        groups[name] = Group(what, partial(times.packages, size=n), estimate)
    groups["profile"] = Group("ncu's counters of the forward tile", times.profile, seconds(2, more=20))
    groups["checks"] = Group("pytest -m gpu", times.checks, seconds(more=180))
    for kernel in tune.KERNELS:
        for width in (4096, 896):
            run = partial(tune.tune, kernel=kernel, width=width)
            groups[f"tune-{kernel}-{width}"] = Group("rank block shapes", run, seconds(more=60))
    return groups


GROUPS = all_groups()
DEFAULT = ["D", "rl-8k", "rl-32k", "A", "C", "cells-A", "rl-4k", "ceilings", "B", "cells-C", "profile"]


def missing(name: str) -> str:
    """The reason why a group cannot run on this machine, or ""."""
    tests = {"pytest-xdist": "xdist", "hypothesis": "hypothesis"}  # package and module
    absent = [package for package, module in tests.items() if not importlib.util.find_spec(module)]
    needs = {"profile": [] if shutil.which("ncu") else ["ncu"], "checks": absent}.get(name)
    return f"not installed: {', '.join(needs)}" if needs else ""


def gibibytes(names: list[str]) -> tuple[str, int]:
    """Find the group that needs the most GPU memory, and its GiB, counted for naive GSPO. ("", 0): no group runs it.

    In naive GSPO's backward, three fp32 tensors have the size of the logits. Hidden states, head and their gradients
    are in bf16. They are compared with gradients in float64.
    """
    batches = SHAPES | {name: SHAPES["D"]._replace(rows=n) for name, n in zip(RL, FULL.tokens, strict=True)}

    def needed(x: Shape) -> float:
        return 3 * 4 * x.rows * x.vocab + (2 + 2 + 8) * (x.rows + x.vocab) * x.width

    sizes = {name: math.ceil(needed(x) / 2**30) for name, x in batches.items() if name in names}
    return max(sizes.items(), key=lambda item: item[1], default=("", 0))


def conditions(device: str, tiny: bool) -> Record:
    """The conditions under which a record stays valid for a later run. `device`: the GPU's name, or "cpu"."""
    now = about(torch.device("cpu"))
    return {
        "commit": now["commit"],
        "state of the sources": "uncommitted changes" if now["uncommitted changes"] else "as committed",
        "device": device,
        "set of shapes": "tiny" if tiny else "full",
        "kind of kernels": "interpreted" if INTERPRETED else "compiled",
        **{f"{name} version": now["versions"].get(name) for name in ("torch", "triton")},
    }


def unlike(record: Record, now: Record) -> list[str]:
    """Describe each difference between a record's conditions and this run's."""
    then = record["measured"].get("conditions", {})
    return [f"another {name}" for name, value in now.items() if then.get(name) != value]


def run_group(name: str, setting: Setting, path: Path) -> int:
    """Run a group in this process. Save its record after each measurement. Return 1 if a measurement failed."""
    start = time.monotonic()
    head = about(setting.device)
    records = []
    head["conditions"] = conditions(head["machine"].get("gpu", "cpu"), setting.shapes != SHAPES)

    def store(fault: str) -> int:
        group = {"measured": head, "seconds": time.monotonic() - start, "fault": fault, "results": records}
        save("gpu", torch.device("cpu"), results_in(path) | {name: group}, path)
        return int(fault != "")

    store(UNFINISHED)
    with watched(setting) as state:
        for what, measurement in GROUPS[name].run(setting):
            try:
                records += measurement()
            except Exception:  # any error: later measurements still run
                traceback.print_exc()
                records.append({"what": what, "fault": traceback.format_exc(limit=-6)})
            print(f"{what}: done after {time.monotonic() - start:.1f} s", flush=True)
            store(UNFINISHED)
    head |= state
    return store(next((r["fault"] for r in records if r.get("fault")), ""))


@contextmanager
def watched(setting: Setting) -> Iterator[Record]:
    """Sample the GPU's clock, power and reasons to slow down, twice a second. At the end, fill the record."""
    state: Record = {}
    if not (setting.on_gpu and shutil.which("nvidia-smi")):
        yield state
        return
    names = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active", "utilization.gpu")
    uuid = str(torch.cuda.get_device_properties(setting.device).uuid)
    query = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={','.join(names)}"]
    query += ["--format=csv,noheader,nounits", "-lms", "500"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(query, stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield state
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        rows = [line.strip().split(", ") for line in out if line.count(", ") == len(names) - 1]
    number = re.compile(r"\d+(\.\d+)?").fullmatch  # a card may report [N/A]
    busy = [row for row in rows if all(map(number, row[:3])) and row[4].isdigit() and int(row[4]) > 50]
    if busy:
        clocks, power, heat = ([float(row[i]) for row in busy] for i in range(3))
        state["gpu state"] = {
            "samples": len(busy),
            "SM MHz": {"least": min(clocks), "median": statistics.median(clocks), "most": max(clocks)},
            "W": {"median": statistics.median(power), "most": max(power)},
            "most degrees C": max(heat),
            "reasons to slow down": sorted({row[3] for row in busy}),
        }
