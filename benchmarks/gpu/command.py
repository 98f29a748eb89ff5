"""Time the kernels on the GPU at hand, and rank block shapes.

    python -m gspo_kernels.benchmarks gpu --times             beside a copy, the vendor's products and full logits
    python -m gspo_kernels.benchmarks gpu --times --full      also at 32,768 rows
    python -m gspo_kernels.benchmarks gpu --tune --minutes 8  rank block shapes

The JSON file is written anew after every result; a short table comes last. The exit status is 1 if a measurement
failed, 2 if nothing was measured. This is a dry run without a GPU, with interpreted kernels:
`TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --times --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from gspo_kernels.backends.dispatch import triton_obstacle

from ..measure import destination, save
from ..suites.options import parser_of
from .setting import Setting, tiny
from .times import Record, times
from .tune import KERNELS, shape_text, tune

DRY_RUN = "TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --times --tiny --device cpu"


def main() -> int:
    options = parsed()
    run = Run(options)
    setting = tiny(run.device) if options.tiny else Setting(run.device)
    if options.times:
        for name, measurement in times(setting, options.full):
            if options.only.search(name):
                run.measure(name, measurement)
    if options.tune:
        pairs = [(width, kernel) for width in options.widths for kernel in KERNELS]
        for width, kernel in pairs:
            run.results["tuning"] += tune(setting, kernel, width, options.minutes / len(pairs), print)
            run.save()
    if not (run.results["times"] or run.results["tuning"]):
        print(f"nothing was measured: no measurement's name matches {options.only.pattern!r}", file=sys.stderr)
        return 2
    print_table(run.results)
    print(f"{run.path}: {'complete' if run.passed else 'FAILED'} in {run.results['seconds']:.0f} s")
    return 0 if run.passed else 1


def parsed() -> argparse.Namespace:
    """Return the command line's options; exit with a line on stderr for bad ones."""
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--times", action="store_true", help="time passes, kernels and their ceilings")
    parser.add_argument("--tune", action="store_true", help="rank block shapes")
    parser.add_argument("--full", action="store_true", help="time at 32,768 rows too")
    parser.add_argument("--minutes", type=float, default=8.0, help="for --tune altogether (default 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 896], help="H, for --tune (default 4096 896)")
    parser.add_argument("--only", default="", metavar="REGEX", help="times whose name it matches")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run (default cuda)")
    options = parser.parse_args()
    if not (options.times or options.tune):
        parser.error("nothing to do: give --times or --tune")
    try:
        options.only = re.compile(options.only)
        device = torch.device(options.device)
    except (re.error, RuntimeError) as error:
        option, wanted = ("only", "a regular expression") if isinstance(error, re.error) else ("device", "cuda or cpu")
        parser.error(f"--{option}: expected {wanted}: {error}")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device: expected cpu, cuda or cuda:<number>, got {options.device!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"there is no CUDA device. A dry run: {DRY_RUN}")
    if obstacle := triton_obstacle(device):
        parser.error(obstacle)
    return options


class Run:
    """The results of a run and the file that holds them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.start, self.device, self.passed = time.monotonic(), torch.device(options.device), True
        self.path = destination("gpu", self.device, options.output, options.tiny)
        self.results: Record = {"gpu": properties_of(self.device), "seconds": 0.0, "times": [], "tuning": []}

    def measure(self, name: str, measurement: Callable[[], list[Record]]) -> None:
        """Add a measurement. If it raises, the run fails, and the other measurements follow."""
        start = time.monotonic()
        record: Record = {"name": name, "status": "measured", "results": [], "fault": ""}
        try:
            record["results"] = measurement()
        except Exception as error:  # of any kind; the file gets its message and frames
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            record |= {"status": "failed", "fault": f"{type(error).__name__}: {str(error).strip()[:600]}"}
            record["traceback"] = [f"{Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames]
            self.passed = False
        record["seconds"] = time.monotonic() - start
        self.results["times"].append(record)
        self.save()
        print(f"{record['status']:8}{record['seconds']:6.1f} s  {name}  {record['fault'][:200]}", flush=True)
        gc.collect()
        if self.device.type == "cuda" and not record["fault"]:
            torch.cuda.empty_cache()  # memory outside PyTorch's allocator is needed too

    def save(self) -> None:
        self.results["seconds"] = time.monotonic() - self.start
        save("gpu", self.device, self.results, self.path)


def properties_of(device: torch.device) -> Record:
    """Return what the speed of a GPU depends on."""
    if device.type != "cuda":
        return {"name": "cpu, interpreted"}
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        clocks = None
    return {"name": properties.name, "properties": str(properties), "driver, clocks and power limit": clocks}


def print_table(results: Record) -> None:
    """Print times, rankings and failures."""
    for record in results["times"]:
        print(f"\n{record['name']}")
        for r in record["results"]:
            ms = "does not fit" if r["ms"] is None else f"{r['ms']:10.3f} ms"
            numbers = [f"{r[k]:.4g} {k}" for k in ("TFLOP/s", "TB/s", "vendor share", "peak GiB") if k in r]
            print(f"  {r['what']:34}{ms}  {', '.join(numbers)}")
    for kernel, width in dict.fromkeys((r["kernel"], r["width"]) for r in results["tuning"]):
        records = [r for r in results["tuning"] if (r["kernel"], r["width"]) == (kernel, width)]
        print(f"\n{kernel} H={width}, fastest first")
        for r in [r for r in records if r["fault"] is None][:10]:
            entropy = f", with entropy {r['with entropy'].get('ms', math.nan):.3f} ms" if "with entropy" in r else ""
            print(f"  {shape_text(r['config']):44}{r['ms']:9.3f} ms {r['TFLOP/s']:6.0f} TFLOP/s{entropy}")
        print(f"  {sum(r['fault'] is not None for r in records)} of {len(records)} do not work")
    for record in results["times"]:
        if record["fault"]:
            print(f"\nFAILED {record['name']}: {record['fault'][:300]}")
            print(*(f"    {line[:150]}" for line in record["traceback"][-3:]), sep="\n")
