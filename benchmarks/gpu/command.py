"""Measure the Triton kernels on this machine's GPU.

    python -m gspo_kernels.benchmarks gpu            all groups of measurements but tune: four minutes on an H200
    python -m gspo_kernels.benchmarks gpu A rl       only these groups; rl stands for rl-4k and rl-32k
    python -m gspo_kernels.benchmarks gpu tune       rank block shapes, for example on a new kind of GPU

The versions in use, and the packages that are not installed, are printed first. Each group runs in a process of its
own until a deadline, so that a crash ends one group only. Results are written to runs/gpu.json after each measurement,
and all that a group prints to runs/gpu.log. A later run replaces the groups that it measures.

The largest group, rl-32k, needs about 65 GiB of GPU memory. A group that does not fit fails, and the others run.

A dry run: `TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch

from gspo_kernels.backends.dispatch import triton_obstacle
from gspo_kernels.backends.triton.elementary import INTERPRETED

from ..candidates import ALL
from ..measure import ROOT, Record, about, destination, results_in, save, version
from ..suites.options import parser_of, positive
from .groups import DEFAULT, GROUPS, UNFINISHED, run_group
from .times import FULL, TINY
from .tune import ranked, shape_text

CPU = torch.device("cpu")
DEADLINE = 300.0  # seconds after which a group is killed; on an H200 the longest takes 76
OUTPUT = "JSON file (default runs/gpu.json, for a dry run runs/trials/gpu-cpu.json); the log is next to it"
# Lines of a group's log that are also printed
PROGRESS = ": done after "


def main() -> int:
    options = parsed()
    if options.in_process:
        place = torch.device(options.device)
        setting = (TINY if options.tiny else FULL)._replace(device=place, minutes=options.minutes)
        return max(run_group(name, setting, options.output) for name in options.groups)
    kernels = ["interpreted kernels" + " on a CPU" * (options.device == "cpu")] * INTERPRETED
    dry = ", ".join(kernels + ["small shapes"] * options.tiny)
    if dry:
        print(f"Dry run: {dry}. The times mean nothing.")
    print(installed(), flush=True)
    for name in options.groups:
        limit = 60.0 * options.minutes if name.startswith("tune") else DEADLINE
        print(f"{name}: {run_apart(name, options, limit) or 'complete'}", flush=True)
    results = results_in(options.output)
    print_results({name: results[name] for name in options.groups})
    faulty = [name for name in options.groups if results[name]["fault"]]
    end = f"FAILED: {', '.join(faulty)}" if faulty else "no faults"
    print(f"\n{options.output}: {end}{'. This was a dry run: the times mean nothing.' if dry else ''}")
    return int(bool(faulty))


def parsed() -> argparse.Namespace:
    """Parse the command line, or exit with a line on stderr. This makes no CUDA context."""
    parser = parser_of("gpu", None, OUTPUT)
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = textwrap.fill(f"groups: {', '.join(GROUPS)}", 100, break_on_hyphens=False)
    parser.add_argument("groups", nargs="*", help="groups to measure (default: all but tune)")
    parser.add_argument("--minutes", type=positive, default=1, help="for each group of tune (default 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run (default cuda)")
    parser.add_argument("--in-process", action="store_true", help="run the groups in this process, for a debugger")
    options = parser.parse_args()
    chosen = {word: [name for name in GROUPS if f"{name}-".startswith(f"{word}-")] for word in options.groups}
    if unknown := [word for word, names in chosen.items() if not names]:
        parser.error(f"groups: expected names such as {', '.join(GROUPS)}, got {unknown[0]!r}")
    options.groups = [name for names in chosen.values() for name in names] or DEFAULT
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: PyTorch sees no GPU; give --device cpu for a dry run")
    if options.device == "cpu" and (obstacle := triton_obstacle(CPU)):
        parser.error(f"--device: {obstacle}")
    dry = options.tiny or INTERPRETED
    output = options.output or (None if dry else Path("runs") / "gpu.json")
    options.output = destination("gpu", CPU, output, dry).resolve()
    return options


def installed() -> str:
    """The versions in use, the absent packages that groups need, and the GPU as its driver describes it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines() if shutil.which(query[0]) else []
    versions = ", ".join(f"{name} {number}" for name, number in about(CPU)["versions"].items())
    absent = ", ".join(name for name in dict.fromkeys(c.package for c in ALL.values()) if version(name) is None)
    return "\n".join([*gpus, versions, *([f"not installed, so not measured: {absent}"] if absent else [])])


def run_apart(name: str, options: argparse.Namespace, seconds: float) -> str:
    """Run a group in a new process, and kill it after `seconds`. Return the fault of its record, or ""."""
    unfinished: Record = {"measured": about(CPU), "fault": UNFINISHED, "results": []}
    save("gpu", CPU, results_in(options.output) | {name: unfinished}, options.output)
    with options.output.with_suffix(".log").open("a+", errors="replace") as log:
        begin = log.seek(0, os.SEEK_END)
        command = command_of(name, options)
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, preexec_fn=os.setpgrp)
        try:
            reason = followed(process, log.name, begin, seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
            process.wait()
        log.seek(begin)
        printed = log.read()
    results = results_in(options.output)
    if results[name]["fault"] == UNFINISHED:
        results[name]["fault"] = f"{reason}: {printed[-600:].strip()}"
        save("gpu", CPU, results, options.output)
    return results[name]["fault"]


def followed(process: subprocess.Popen[bytes], path: str, begin: int, seconds: float) -> str:
    """Print progress from the log as it comes. Return how the process ended, or its timeout."""
    end = time.monotonic() + seconds
    status = None
    with open(path, errors="replace") as log:
        log.seek(begin)
        while status is None and time.monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(min(1.0, max(end - time.monotonic(), 0)))
            for line in islice(log, 10_000):  # a group may print without pause
                if PROGRESS in line:
                    print(f"  {line.rstrip()}", flush=True)
    return f"killed after {seconds:.0f} s" if status is None else f"exit status {status}"


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    """The command line of a process that runs one group."""
    command = [sys.executable, "-m", "gspo_kernels.benchmarks", "gpu", name, "--in-process"]
    command += ["--minutes", str(options.minutes), "--device", options.device, "--output", str(options.output)]
    return command + ["--tiny"] * options.tiny


def print_results(results: Record) -> None:
    """Print every group's records, and the ten fastest block shapes of each kernel."""
    for name, group in results.items():
        works = ranked(group["results"])
        tried = sum("config" in r for r in group["results"])
        shapes = f", {len(works)} of {tried} block shapes work, the fastest:" if tried else ""
        print(f"\n{name}: {GROUPS[name].what}{', FAILED' if group['fault'] else ''}{shapes}")
        for r in works[:10] + [r for r in group["results"] if "config" not in r]:
            notes = [f"{1e3 * r['seconds']:10.3f} ms"] if "seconds" in r else []
            notes += [f"{r['TFLOP/s']:.4g} TFLOP/s"] if "TFLOP/s" in r else []
            notes += [f"gradient error {r['error']['worst']:.1e}"] if "error" in r else []
            notes += [r[k] for k in ("absent", "does_not_fit", "failed", "fault") if r.get(k)]
            label = " ".join(filter(None, (r.get("shape"), r.get("batch"))))
            what = shape_text(r["config"]) if "config" in r else f"{r['what']:44}"
            print(f"  {label:26} {what}", ", ".join(notes))
