"""One command that says whether the kernels are right and fast on the GPU at hand.

    python -m gspo_kernels.benchmarks gpu --check             correctness, and first times: under three minutes
    python -m gspo_kernels.benchmarks gpu --check --full      more times
    python -m gspo_kernels.benchmarks gpu --tune --minutes 8  which block shapes are fastest

Everything measured goes to a JSON file, written anew after every result; a short table comes last. The exit code is 1
if a check failed, 2 if nothing was asked for. A dry run without a GPU is
`TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --check --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
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

import gspo_kernels
from gspo_kernels.backends import dispatch as backends

from . import cells, checks, limits, times
from .checks import FULL, TINY, Setting
from .compile import META, compile_all, needed
from .heads import Found, NotHereError
from .tune import KERNELS, tune

RESULTS = Path(__file__).parent.parent / "results"
DRY_RUN = "TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --check --tiny --device cpu"
Record = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    setting = Setting(device, TINY if arguments.tiny else FULL)
    run = _Run(arguments, device)
    if arguments.check:
        _check(run, setting, arguments.full)
    if arguments.tune:
        _tune(run, setting, arguments)
    if not any(run.report[kind] for kind in ("checks", "times", "tuning")):
        print(f"nothing was done: no check's name matches {arguments.only!r}", file=sys.stderr)
        return 2
    run.save()
    _table(run.report)
    print(f"{run.path}: {'passed' if run.report['passed'] else 'FAILED'} in {run.report['seconds']:.0f} s")
    return 0 if run.report["passed"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks gpu", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="correctness and first times")
    parser.add_argument("--tune", action="store_true", help="rank block shapes")
    parser.add_argument("--full", action="store_true", help="times at 32,768 rows too")
    parser.add_argument("--minutes", type=float, default=8.0, help="for --tune altogether (default 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 896], help="H, for --tune (default 4096 896)")
    parser.add_argument(
        "--only", type=_regex, default="", metavar="REGEX", help="checks and times whose name it matches"
    )
    parser.add_argument("--device", type=_device, default="cuda", help="cuda, or cpu for a dry run (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a dry run")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/gpu-<device>.json")
    arguments = parser.parse_args()
    if not (arguments.check or arguments.tune):
        parser.error("nothing to do: give --check or --tune")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"there is no CUDA device. A dry run: {DRY_RUN}")
    if obstacle := backends.triton_obstacle(torch.device(arguments.device)):
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
                "gspo_kernels": gspo_kernels.__version__,
            },
            "passed": True, "seconds": 0.0, "compilation": None, "checks": [], "times": [], "tuning": [],
        }  # fmt: skip

    def check(self, name: str, check: Callable[[], Found]) -> None:
        """One more check, whatever became of those before it."""
        if not self.only.search(name):
            return

        def outcome() -> Record:
            found = check()
            faults = found.faults()
            status = "failed" if faults else "passed"
            return {"status": status, "measured": found.measured, "limit": found.limit, "faults": faults}

        record = self.guarded(name, outcome)
        self.report["checks"].append(record)
        self.save()
        faults = record["faults"] or [""]
        print(f"{record['status']:8}{record['seconds']:6.1f} s  {name}  {faults[0][:200]}", flush=True)

    def measure(self, name: str, measure: Callable[[], list[Record]]) -> None:
        """One more measurement of times. One that raises counts as a failed check."""
        if not self.only.search(name):
            return
        record = self.guarded(name, lambda: {"status": "measured", "results": measure(), "faults": []})
        self.report["checks" if record["status"] == "failed" else "times"].append(record)
        self.save()
        print(f"{record['status']:8}{record['seconds']:6.1f} s  {name}  {''.join(record['faults'])[:200]}", flush=True)

    def guarded(self, name: str, outcome: Callable[[], Record]) -> Record:
        """What became of it: an exception is one of the outcomes."""
        start = time.monotonic()
        try:
            found = outcome()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except NotHereError as reason:
            found = {"status": "skipped", "faults": [str(reason)]}
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            found = {
                "status": "failed",
                "faults": [f"{type(error).__name__}: {str(error).strip()[:600]}"],
                "traceback": [f"{Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames],
            }
        gc.collect()
        with contextlib.suppress(RuntimeError):  # which everything raises once a kernel has gone astray
            if self.device.type == "cuda" and 2 * torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1]:
                torch.cuda.empty_cache()  # who allocates past torch needs room too
        return {"name": name, "seconds": round(time.monotonic() - start, 2), **found}

    def save(self) -> None:
        self.report["passed"] = all(c["status"] != "failed" for c in self.report["checks"])
        self.report["seconds"] = round(time.monotonic() - self.start, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(_plain(self.report), indent=1, allow_nan=False) + "\n")


def _check(run: _Run, setting: Setting, full: bool) -> None:
    if setting.device.type == "cuda":
        _compile(run, setting)
    for name, check in itertools.chain(*(source.checks(setting) for source in (checks, cells, limits))):
        run.check(name, check)
    for name, measure in times.times(setting, full):
        run.measure(name, measure)


def _compile(run: _Run, setting: Setting) -> None:
    """What the heads of this run need, on all cores; what is left to compile takes less than a second each."""

    def outcome() -> Record:
        sources = (checks, cells, limits, times)
        heads = [make for source in sources for name, make in source.heads(setting) if run.only.search(name)]
        failed = compile_all(one for make in heads for one in needed(setting.device, make(device=META)))
        return {"status": "done", "faults": [f"{one.kernel.__name__} {one.config}: {why}" for one, why in failed]}

    record = run.report["compilation"] = run.guarded("compilation", outcome)
    print(f"{record['status']:8}{record['seconds']:6.1f} s  compilation, {len(record['faults'])} faults", flush=True)


def _tune(run: _Run, setting: Setting, arguments: argparse.Namespace) -> None:
    pairs = [(width, kernel) for width in arguments.widths for kernel in KERNELS]
    for width, kernel in pairs:
        run.report["tuning"] += tune(setting, kernel, width, arguments.minutes / len(pairs), print)
        run.save()


def _machine(device: torch.device) -> Record:
    if device.type != "cuda":
        return {"device": "cpu, interpreted"}
    about = torch.cuda.get_device_properties(device)
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
    return {
        "device": about.name,
        "capability": [about.major, about.minor],
        "multiprocessors": about.multi_processor_count,
        "memory GiB": about.total_memory / 2**30,
        "L2 MiB": about.L2_cache_size / 2**20,
        "driver, clocks and power limit as found": _output("nvidia-smi", query, "--format=csv,noheader"),
    }


def _output(*command: str) -> str | None:
    """What a program prints, None if it cannot."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _plain(x: Any) -> Any:
    """As JSON has it, where a float that is no number becomes a word."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return x if not isinstance(x, float) or math.isfinite(x) else str(x)


def _table(report: Record) -> None:
    """The end of the output: times, then every check that matters to read."""
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
            c = r["config"]
            shape = f"{c['block_n']}x{c['block_v']}x{c['block_h']} {c['warps']}w {c['stages']}s group {c['group']}"
            entropy = f", with entropy {r['with entropy'].get('ms', math.nan):.3f} ms" if "with entropy" in r else ""
            by = "descriptors" if c["descriptors"] else "pointers"
            print(f"  {shape:32}{by:12}{r['ms']:9.3f} ms {r['TFLOP/s']:6.0f} TFLOP/s{entropy}")
        print(f"  {sum(r['fault'] is not None for r in same)} of {len(same)} do not work")
    print()
    _worst(report["checks"])


def _worst(checks: list[Record]) -> None:
    """Of each kind of check how many passed, and the measurement that came nearest to its limit; then the failures."""
    kinds: dict[str, list[Record]] = {}
    for record in checks:
        kinds.setdefault(record["name"].split(" ")[0], []).append(record)
    for kind, same in kinds.items():
        count = {s: sum(r["status"] == s for r in same) for s in ("passed", "failed", "skipped")}
        ratios = [
            (r["measured"][k] / limit, f"{k} {r['measured'][k]:.3g} of {limit:.3g} ({r['name']})")
            for r in same
            for k, limit in r.get("limit", {}).items()
            if limit
        ]
        near = max(ratios, default=(0, ""))[1]
        print(f"{kind:18}{', '.join(f'{n} {s}' for s, n in count.items() if n):24} {near}")
    for record in checks:
        if record["status"] == "failed":
            print(f"FAILED {record['name']}: {'; '.join(record['faults'])[:300]}")
            print("".join(f"    {line[:150]}\n" for line in record.get("traceback", [])[-3:]), end="")
