"""Times of the kernels on the GPU at hand, and the fastest block shapes.

    python -m gspo_kernels.benchmarks gpu --times             beside a copy, the vendor's products and full logits
    python -m gspo_kernels.benchmarks gpu --times --full      at 32,768 rows too
    python -m gspo_kernels.benchmarks gpu --tune --minutes 8  which block shapes are fastest

Everything measured goes to a JSON file, written anew after every result; a short table comes last. The exit code is 1
if a measurement failed, 2 if nothing was asked for. A dry run without a GPU is
`TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --times --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

from gspo_kernels import __version__
from gspo_kernels.backends.dispatch import triton_obstacle

from .setting import Setting, tiny
from .times import Record, times
from .tune import KERNELS, shape_of, tune

RESULTS = Path(__file__).parent.parent / "results"
DRY_RUN = "TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --times --tiny --device cpu"


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    setting = tiny(device) if arguments.tiny else Setting(device)
    run = _Run(arguments, device)
    if arguments.times:
        for name, measure in times(setting, arguments.full):
            run.measure(name, measure)
    if arguments.tune:
        pairs = [(width, kernel) for width in arguments.widths for kernel in KERNELS]
        for width, kernel in pairs:
            run.report["tuning"] += tune(setting, kernel, width, arguments.minutes / len(pairs), print)
            run.save()
    if not (run.report["times"] or run.report["tuning"]):
        print(f"nothing was done: no measurement's name matches {arguments.only!r}", file=sys.stderr)
        return 2
    run.save()
    _print_table(run.report)
    print(f"{run.path}: {'complete' if run.report['passed'] else 'FAILED'} in {run.report['seconds']:.0f} s")
    return 0 if run.report["passed"] else 1


def _arguments() -> argparse.Namespace:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m gspo_kernels.benchmarks gpu", description=description)
    parser.add_argument("--times", action="store_true", help="time passes, kernels and their ceilings")
    parser.add_argument("--tune", action="store_true", help="rank block shapes")
    parser.add_argument("--full", action="store_true", help="times at 32,768 rows too")
    parser.add_argument("--minutes", type=float, default=8.0, help="for --tune altogether (default 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 896], help="H, for --tune (default 4096 896)")
    parser.add_argument("--only", type=_regex, default="", metavar="REGEX", help="times whose name it matches")
    parser.add_argument("--device", type=_device, default="cuda", help="cuda, or cpu for a dry run (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/gpu-<device>.json")
    arguments = parser.parse_args()
    if not (arguments.times or arguments.tune):
        parser.error("nothing to do: give --times or --tune")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"there is no CUDA device. A dry run: {DRY_RUN}")
    if obstacle := triton_obstacle(torch.device(arguments.device)):
        parser.error(obstacle)
    return arguments


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error
    return text


def _device(text: str) -> str:
    try:
        known = torch.device(text).type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:<number>, got {text!r}")
    return text


class _Run:
    """The report, and how results enter it."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.start, self.device, self.only = time.monotonic(), device, re.compile(arguments.only)
        machine = _machine(device)
        name = re.sub(r"\W+", "-", machine["device"].lower()).strip("-")
        self.path = arguments.output or RESULTS / f"gpu-{name}.json"
        self.report: Record = {
            "asked": {k: v for k, v in vars(arguments).items() if k != "output"},
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": _output("git", "rev-parse", "HEAD"),
            "uncommitted changes": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
            "machine": machine,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "triton": triton.__version__,
                "gspo_kernels": __version__,
            },
            "passed": True,
            "seconds": 0.0,
            "times": [],
            "tuning": [],
        }

    def measure(self, name: str, measure: Callable[[], list[Record]]) -> None:
        """Add a measurement. One that raises makes the run fail, and the others go on."""
        if not self.only.search(name):
            return
        start = time.monotonic()
        try:
            record: Record = {"status": "measured", "results": measure(), "fault": ""}
        except Exception as error:  # of any kind: the report names it, and its frames
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            record = {
                "status": "failed",
                "results": [],
                "fault": f"{type(error).__name__}: {str(error).strip()[:600]}",
                "traceback": [f"{Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames],
            }
        record = {"name": name, "seconds": round(time.monotonic() - start, 2), **record}
        self.report["times"].append(record)
        self.save()
        print(f"{record['status']:8}{record['seconds']:6.1f} s  {name}  {record['fault'][:200]}", flush=True)
        gc.collect()
        if self.device.type == "cuda" and record["status"] == "measured":
            torch.cuda.empty_cache()  # allocations outside PyTorch need memory too

    def save(self) -> None:
        self.report["passed"] = all(x["status"] == "measured" for x in self.report["times"])
        self.report["seconds"] = round(time.monotonic() - self.start, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(_plain(self.report), indent=1, allow_nan=False) + "\n")


def _machine(device: torch.device) -> Record:
    if device.type != "cuda":
        return {"device": "cpu, interpreted"}
    properties = torch.cuda.get_device_properties(device)
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
    return {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": properties.total_memory / 2**30,
        "L2 MiB": properties.L2_cache_size / 2**20,
        "driver, clocks and power limit as found": _output("nvidia-smi", query, "--format=csv,noheader"),
    }


def _output(*command: str) -> str | None:
    """Return what a program prints, None if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _plain(x: Any) -> Any:
    """Return the same for JSON, with non-finite floats as strings."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return x if not isinstance(x, float) or math.isfinite(x) else str(x)


def _print_table(report: Record) -> None:
    """Print times, rankings and failures."""
    for record in report["times"]:
        print(f"\n{record['name']}")
        for r in record["results"]:
            ms = "does not fit" if r["ms"] is None else f"{r['ms']:10.3f} ms"
            more = [f"{r[k]:.4g} {k}" for k in ("TFLOP/s", "TB/s", "vendor share", "peak GiB") if k in r]
            print(f"  {r['what']:34}{ms}  {', '.join(more)}")
    for kernel, width in dict.fromkeys((r["kernel"], r["width"]) for r in report["tuning"]):
        print(f"\n{kernel} H={width}, fastest first")
        same = [r for r in report["tuning"] if (r["kernel"], r["width"]) == (kernel, width)]
        for r in [r for r in same if r["fault"] is None][:10]:
            entropy = f", with entropy {r['with entropy'].get('ms', math.nan):.3f} ms" if "with entropy" in r else ""
            print(f"  {shape_of(r['config']):44}{r['ms']:9.3f} ms {r['TFLOP/s']:6.0f} TFLOP/s{entropy}")
        print(f"  {sum(r['fault'] is not None for r in same)} of {len(same)} do not work")
    print()
    for record in report["times"]:
        if record["status"] == "failed":
            print(f"FAILED {record['name']}: {record['fault'][:300]}")
            print("".join(f"    {line[:150]}\n" for line in record["traceback"][-3:]), end="")
