"""Measure the Triton kernels on this machine's GPU.

    python -m gspo_kernels.benchmarks gpu            the groups of measurements for ten minutes of a GPU
    python -m gspo_kernels.benchmarks gpu --plan     list the groups with estimated seconds; needs no GPU
    python -m gspo_kernels.benchmarks gpu checks     the tests that need a GPU; run them first
    python -m gspo_kernels.benchmarks gpu A rl       only these groups; rl stands for rl-4k, rl-8k and rl-32k
    python -m gspo_kernels.benchmarks gpu tune       rank block shapes

The versions in use, and the packages that are not installed, are printed first. Each group runs in a process of its
own until a deadline, so that a crash ends one group only. Results are written to runs/gpu.json after each measurement,
and all that a group prints to runs/gpu.log.

A second run keeps a group's record if it has no fault and is of the same commit, GPU, shapes, and versions of torch and
triton. Another record is replaced; give another --output to keep it.

A dry run: `TRITON_INTERPRET=1 python -m gspo_kernels.benchmarks gpu --tiny --device cpu`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
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
from ..suites.options import BadOption, parser_of
from .groups import DEFAULT, GROUPS, UNFINISHED, conditions, gibibytes, missing, run_group, unlike
from .times import FULL, TINY
from .tune import ranked, shape_text

CPU = torch.device("cpu")
SHORTEST = 20.0  # seconds; no group is started if less time is left, or less than half of its estimate
OUTPUT = "JSON file (default runs/gpu.json, for a dry run runs/trials/gpu-cpu.json); the log is next to it"
WORDS = """\
dense    every token has a gradient
rl-like  about 3 of 10 answers have advantage 0, and 15 % of the others are clipped: they have no gradient
cells    blocks of the logits; the backward computes this share of them
slab     columns of the logits' gradient that the backward holds at a time; its two products, timed alone
vendor   products of whole operands by the vendor's library, such as cuBLAS, as torch.mm calls it"""
# Lines of a group's log that are also printed: finished measurements, and tests that failed.
PROGRESS = re.compile(r": done after |\b(FAILED|ERROR)\b")


def main() -> int:
    options = parsed()
    if options.plan:
        print(planned(options.groups, options.minutes))
        return 0
    if options.in_process:
        place = torch.device(options.device)
        setting = (TINY if options.tiny else FULL)._replace(device=place, minutes=options.minutes)
        return max(run_group(name, setting, options.output) for name in options.groups)
    kernels = ["interpreted kernels" + " on a CPU" * (options.device == "cpu")] * INTERPRETED
    dry = ", ".join(kernels + ["small shapes"] * options.tiny)
    if dry:
        print(f"Dry run: {dry}. The times mean nothing.")
    print(installed(), flush=True)
    waiting = measure(options)
    results = results_in(options.output)
    print_results(results)
    faulty = [name for name in options.groups if results.get(name, {}).get("fault")]
    lists = {"FAILED": faulty, "not started": waiting}
    end = "; ".join(f"{what}: {', '.join(names)}" for what, names in lists.items() if names) or "no faults"
    print(f"\n{options.output}: {end}{'. This was a dry run: the times mean nothing.' if dry else ''}")
    return int(bool(faulty))


def measure(options: argparse.Namespace) -> list[str]:
    """Measure the groups that have no record of the same conditions.

    Returns:
        The groups that were not started for lack of time.
    """
    end = time.monotonic() + 60 * options.minutes
    waiting = []
    finished = {name: x for name, x in results_in(options.output).items() if not (x["fault"] or options.again)}
    now = conditions(device_name(options.device), options.tiny) if finished else {}
    for i, name in enumerate(options.groups):
        left = end - time.monotonic()
        kept = finished.get(name)
        others = unlike(kept, now) if kept else []
        if kept and not others:
            print(f"{name}: kept, measured at commit {kept['measured']['commit'][:7]}")
        elif why := missing(name):
            print(f"{name}: skipped, because {why}")
        elif left < max(SHORTEST, GROUPS[name].seconds / 2):
            print(f"{name}: not started, because {left:.0f} s are left; start the command again to continue")
            waiting.append(name)
        else:
            if others:
                print(f"{name}: measured again, because its record is of {', '.join(others)}", flush=True)
            limit = left / (len(options.groups) - i) if name.startswith("tune") else min(left, GROUPS[name].deadline)
            print(f"{name}: {run_apart(name, options, limit) or 'complete'}", flush=True)
    return waiting


def parsed() -> argparse.Namespace:
    """Parse the command line, or exit with a line on stderr. This makes no CUDA context."""
    parser = parser_of("gpu", None, OUTPUT)
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = textwrap.fill(f"groups: {', '.join(GROUPS)}", 100, break_on_hyphens=False)
    parser.add_argument("groups", nargs="*", help="groups to measure (default: all but checks and tune)")
    parser.add_argument("--plan", action="store_true", help="list the groups with estimated seconds, measure nothing")
    parser.add_argument("--again", action="store_true", help="repeat groups whose record would be kept")
    parser.add_argument("--minutes", type=positive_minutes, default=9.5, help="stop after this time (default 9.5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run (default cuda)")
    parser.add_argument("--in-process", action="store_true", help="run the groups in this process, for a debugger")
    options = parser.parse_args()
    chosen = {word: [name for name in GROUPS if f"{name}-".startswith(f"{word}-")] for word in options.groups}
    if unknown := [word for word, names in chosen.items() if not names]:
        parser.error(f"groups: expected names such as {', '.join(GROUPS)}, got {unknown[0]!r}")
    options.groups = [name for names in chosen.values() for name in names] or DEFAULT
    if not options.plan:
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device: PyTorch sees no GPU; see --plan, or give --device cpu for a dry run")
        if options.device == "cpu" and (obstacle := triton_obstacle(CPU)):
            parser.error(f"--device: {obstacle}")
        dry = options.tiny or INTERPRETED
        output = options.output or (None if dry else Path("runs") / "gpu.json")
        options.output = destination("gpu", CPU, output, dry).resolve()
    return options


def positive_minutes(text: str) -> float:
    """Parse --minutes, a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise BadOption(f"expected a number of minutes above 0, got {text!r}")
    return number


def planned(names: list[str], minutes: float) -> str:
    """Text of --plan: a table of the groups with estimated seconds, and advice for the first run."""
    this = "python -m gspo_kernels.benchmarks gpu"
    chosen = {name: GROUPS[name] for name in names}
    lines = [f"{name:27}{x.seconds:5.0f} s, at most {x.deadline:4.0f} s: {x.what}" for name, x in chosen.items()]
    total = sum(group.seconds for group in chosen.values())
    lines += [f"{'':27}{total:5.0f} s, estimated from counted operations for an H200", ""]
    if total > 60 * minutes:
        lines.append(f"This is more than --minutes {minutes:g}: start the command again, or give more minutes.")
    lines.append(f"It stops after --minutes {minutes:g}. Start it again to continue: finished groups are kept.")
    lines.append("It writes runs/gpu.json and runs/gpu.log, or the file that --output names and a log next to it.")
    lines.append(
        "Install first: pip install '.[bench,test]'. ncu is optional: without it, the group profile is skipped."
    )
    if "checks" not in names:
        lines.append(f"checks is not in the list and takes about 3 minutes. Run it first: {this} checks")
    name, needed = gibibytes(names)
    if needed:
        lines.append(f"{name} needs the most GPU memory: about {needed} GiB for naive GSPO, computed, not measured.")
        lines.append("A group that does not fit fails, and the others run.")
    return "\n".join([*lines, "", WORDS])


def device_name(device: str) -> str:
    """The GPU's name, "" if unknown, or "cpu". A child process asks PyTorch, so that this one makes no CUDA context."""
    code = "import torch; print(torch.cuda.get_device_name())"
    return "cpu" if device == "cpu" else "".join(asked(sys.executable, "-c", code, seconds=120)[0][-1:])


def asked(*command: str, seconds: int) -> tuple[list[str], str]:
    """Run a program. Return the lines that it prints, and the reason if it failed, else ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return [], f"no answer in {seconds} s"
    except OSError as error:
        return [], str(error)
    if done.returncode:
        return [], f"exit status {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"
    return done.stdout.splitlines(), ""


def installed() -> str:
    """The versions in use, the absent packages that groups need, and the GPU as its driver describes it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv"]
    gpus, fault = asked(*query, seconds=20) if shutil.which(query[0]) else ([], "")
    versions = ", ".join(f"{name} {number}" for name, number in about(CPU)["versions"].items())
    packages = dict.fromkeys(c.package for c in ALL.values())
    absent = ", ".join(name for name in packages if version(name) is None)
    lines = [*gpus, f"nvidia-smi failed: {fault}" if fault else "", versions]
    return "\n".join(filter(None, [*lines, f"not installed, so not measured: {absent}" if absent else ""]))


def run_apart(name: str, options: argparse.Namespace, seconds: float) -> str:
    """Run a group in a new process, and kill it after `seconds`. Return the fault of its record, or ""."""
    unfinished: Record = {"measured": about(CPU), "fault": UNFINISHED, "results": []}
    save("gpu", CPU, results_in(options.output) | {name: unfinished}, options.output)
    with options.output.with_suffix(".log").open("a+", errors="replace") as log:
        begin = log.seek(0, os.SEEK_END)
        command = command_of(name, options, seconds)
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
    """Print progress and failed tests from the log as they come. Return how the process ended, or its timeout."""
    end = time.monotonic() + seconds
    status = None
    with open(path, errors="replace") as log:
        log.seek(begin)
        while status is None and time.monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(min(1.0, max(end - time.monotonic(), 0)))
            for line in islice(log, 10_000):  # a group may print without pause
                if PROGRESS.search(line):
                    print(f"  {line.rstrip()}", flush=True)
    return f"killed after {seconds:.0f} s" if status is None else f"exit status {status}"


def command_of(name: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """The command line of a process that runs one group."""
    command = [sys.executable, "-m", "gspo_kernels.benchmarks", "gpu", name, "--in-process"]
    command += ["--minutes", f"{seconds / 60}", "--device", options.device, "--output", str(options.output)]
    return command + ["--tiny"] * options.tiny


def print_results(results: Record) -> None:
    """Print every group's records, and the ten fastest block shapes of each kernel."""
    for name, group in results.items():
        works = ranked(group["results"])
        tried = sum("config" in r for r in group["results"])
        shapes = f", {len(works)} of {tried} block shapes work, the fastest:" if tried else ""
        print(f"\n{name}: {GROUPS[name.partition(',')[0]].what}{', FAILED' if group['fault'] else ''}{shapes}")
        for r in works[:10] + [r for r in group["results"] if "config" not in r]:
            notes = [f"{1e3 * r['seconds']:10.3f} ms"] if "seconds" in r else []
            notes += [f"{r[k]:.4g} {k}" for k in ("TFLOP/s", "TB/s") if k in r]
            notes += [f"gradient error {r['error']['worst']:.1e}"] if "error" in r else []
            notes += [r[k] for k in ("absent", "does_not_fit", "failed", "fault") if r.get(k)]
            label = " ".join(filter(None, (r.get("shape"), r.get("batch"))))
            what = shape_text(r["config"]) if "config" in r else f"{r['what']:44}"
            print(f"  {label:26} {what}", ", ".join(notes))
