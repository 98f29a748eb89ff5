"""The groups of measurements, and the run of one group in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..measure import about, results_in, save
from . import times, tune
from .times import FULL, SHAPES, Measurement, Setting

UNFINISHED = "did not finish"


class Group(NamedTuple):
    what: str
    run: Callable[[Setting], Iterator[Measurement]]


def all_groups() -> dict[str, Group]:
    """All groups by name, in order of importance."""
    groups = {}
    for name in ("D", "A", "C"):
        what = f"N, H, V = {', '.join(map(str, SHAPES[name]))}: passes, kernels, errors, full logits"
        groups[name] = Group(what, partial(times.steps, name=name))
    for n, (name, which) in enumerate((("rl-4k", "all packages"), ("rl-32k", "ours, full logits, TRL, Liger"))):
        what = f"RL-like, {FULL.tokens[n]} tokens, head of D: {which}"
        groups[name] = Group(what, partial(times.packages, size=n))
    groups["ceilings"] = Group("the vendor's products", times.ceilings)
    for kernel in tune.KERNELS:
        for width in (4096, 896):
            run = partial(tune.tune, kernel=kernel, width=width)
            groups[f"tune-{kernel}-{width}"] = Group("rank block shapes", run)
    return groups


GROUPS = all_groups()
DEFAULT = [name for name in GROUPS if not name.startswith("tune")]


def run_group(name: str, setting: Setting, path: Path) -> int:
    """Run a group in this process. Save its record after each measurement. Return 1 if a measurement failed."""
    start = time.monotonic()
    head = about(setting.device)
    records = []

    def store(fault: str) -> int:
        group = {"measured": head, "seconds": time.monotonic() - start, "fault": fault, "results": records}
        save("gpu", torch.device("cpu"), results_in(path) | {name: group}, path)
        return int(fault != "")

    store(UNFINISHED)
    for what, measurement in GROUPS[name].run(setting):
        try:
            records += measurement()
        except Exception:  # any error: later measurements still run
            traceback.print_exc()
            records.append({"what": what, "fault": traceback.format_exc(limit=-6)})
        print(f"{what}: done after {time.monotonic() - start:.1f} s", flush=True)
        store(UNFINISHED)
    return store(next((r["fault"] for r in records if r.get("fault")), ""))
