"""Measure times in interleaved rounds, measure peak memory in a new process, and write results to a JSON file.

Times on a CPU are comparable only within one run. So each round runs every candidate once: if something slows the
machine for a whole round, it slows all candidates alike.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent  # root of the repository
RESULTS = Path(__file__).parent / "results"
OUTPUT = "JSON file (default benchmarks/results/<suite>-<cpu or GPU>.json, and for a trial runs/trials/ with that name)"
PACKAGES = (
    "torch", "triton", "transformers", "trl", "liger-kernel", "nvidia-cutlass-dsl", "cut-cross-entropy", "verl",
    "gspo-kernels",
)  # fmt: skip  # names
Record = dict[str, Any]
Tick = Callable[[str], object]  # called before each measurement with a description of it
KIB = 1024
LONGEST_RECORD = 800  # most characters of a nested container on one line


def about(device: torch.device) -> Record:
    """The header of a JSON file: date, commit, machine and versions."""
    now = _checkout()
    memory = _kib(Path("/proc/meminfo"), "MemTotal") * KIB if sys.platform == "linux" else 0
    machine: Record = {"cpu": _cpu(), "threads": torch.get_num_threads(), "memory GiB": memory >> 30}
    machine |= {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "date": date.today().isoformat(),
        "commit": now[0],
        "uncommitted changes": now[1] or now != AT_START,  # a source may change during the run
        "machine": machine,
        "versions": {"python": platform.python_version(), **{p: v for p in PACKAGES if (v := version(p))}},
    }


def version(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def destination(suite: str, device: torch.device, path: Path | None, trial: bool = False) -> Path:
    """`path` or, if it is None, the file <suite>-<cpu or GPU>.json in benchmarks/results/ (for a trial, runs/trials/).

    Exit with a line on stderr if the folder is not writable, or if the file exists and holds no results.
    """
    where = "cpu" if device.type != "cuda" else re.sub(r"\W+", "-", torch.cuda.get_device_name(device).lower())
    path = path or (Path("runs/trials") if trial else RESULTS) / f"{suite}-{where}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results_in(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--output: expected a new file, or results of an earlier run, got {path}: {error!r}")
    if not os.access(path.parent, os.W_OK):
        sys.exit(f"--output: expected a writable folder, got {path.parent}")
    return path


def results_in(path: Path) -> Record:
    """Read the results that an earlier run wrote to the file; {} if there is no file."""
    return json.loads(path.read_text())["results"] if path.exists() else {}


def save_part(suite: str, device: torch.device, part: str, results: Record, path: Path) -> Path:
    """Write one part of a suite's results, with a header as its entry "measured". Keep the other parts of the file."""
    return save(suite, device, results_in(path) | {part: {"measured": about(device), **results}}, path)


def save(suite: str, device: torch.device, results: Any, path: Path) -> Path:
    """Write the header and `results`: one record per line, floats rounded to 6 significant digits.

    If `results` cannot be written as JSON, an existing file does not change.
    """
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(formatted(jsonable({"suite": suite, **about(device), "results": results}, digits=6)) + "\n")
    return temporary.replace(path)


def jsonable(value: Any, digits: int = 17) -> Any:
    """Prepare a value for JSON: round floats to `digits` significant digits, and replace NaN and infinity by None."""
    rounded: Callable[[str], float] = lambda text: float(f"{float(text):.{digits}g}")  # noqa: E731
    return json.loads(json.dumps(value), parse_float=rounded, parse_constant=lambda _: None)


def formatted(value: Any, indent: str = "") -> str:
    """Format JSON. Lists of records, and nested containers longer than `LONGEST_RECORD`, get a line per entry."""
    flat = json.dumps(value)
    entries = value if isinstance(value, list) else []
    if isinstance(value, dict):
        entries = list(value.values())
    if not any(isinstance(x, dict | list) for x in entries) or ("[{" not in flat and len(flat) <= LONGEST_RECORD):
        return flat
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(entries)
    lines = [f"{indent} {name}{formatted(x, indent + ' ')}" for name, x in zip(names, entries, strict=True)]
    return "\n".join([flat[0], ",\n".join(lines), indent + flat[-1]])


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    tick: Tick = lambda what: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time runs in interleaved rounds: seconds by name. Before each run, call `tick` with the run's name and round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn, name in turns(list(runs), rounds):
        tick(f"{name}, {f'round {turn} of {rounds}' if turn else 'warm-up'}")
        taken = timed(runs[name], device, clock)
        if turn:
            seconds[name].append(taken)
    return seconds


def turns(names: list[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """Yield (round, name) for every name in every round. Each round starts one name later. Round 0 is a warm-up."""
    for turn in range(rounds + 1):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            yield turn, name


def over(seconds: list[float], base: list[float]) -> Record:
    """Median, 20th and 80th percentile of seconds / base. Each ratio compares two runs of the same round."""
    ratios = spread([a / b for a, b in zip(seconds, base, strict=True)])
    return {"ratio": ratios["seconds"], "p20": ratios["p20"], "p80": ratios["p80"]}


def spread(seconds: list[float]) -> Record:
    """Median, 20th and 80th percentile (by linear interpolation), and the number of runs."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds
    return {"seconds": statistics.median(seconds), "p20": fifths[0], "p80": fifths[-1], "runs": len(seconds)}


def timed(run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a run by `clock`."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = clock()
    run()
    wait()
    return clock() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Measure the peak memory of a run minus the memory in use before it. Call this in a new process.

    On CUDA, count the memory of torch's allocator; on a CPU, count resident memory.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    # Free memory that is still resident would hide allocations of the run, of up to a few MiB. Only glibc keeps it.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = _kib(status, "VmRSS")
    run()
    return (_kib(status, "VmHWM") - before) * KIB


def fresh(module: str, function: str, **arguments: Any) -> Any:
    """Run `function(**arguments)` of a module of this package in a new process. Return None if memory ran out.

    Arguments and result are sent as JSON.
    """
    if torch.cuda.is_initialized():  # free this process's cached memory for the new process
        gc.collect()
        torch.cuda.empty_cache()
    # The new process must have the same sys.path. With `-m`, Python would add the working directory in front.
    start = f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); "
    start += f"from {__package__}.measure import child; sys.exit(child(*sys.argv[1:]))"
    command = [sys.executable, "-c", start, os.pathsep.join(sys.path), module, function, json.dumps(arguments)]
    # With this threshold glibc returns large freed blocks to the system at once, so resident memory is memory in use.
    env = os.environ | {"PYTHONWARNINGS": "ignore", "MALLOC_MMAP_THRESHOLD_": str(64 * KIB)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode in (-9, _OUT_OF_MEMORY):
        return None
    if done.returncode:
        raise RuntimeError(f"{_error_in(done.stderr)}\nin a new process: {module}.{function}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


_OUT_OF_MEMORY = 77  # exit status


def no_room(error: Exception) -> bool:
    """True if an error means that memory ran out. Each of torch's allocators has its own message."""
    pattern = "out of memory|not enough memory|can't allocate memory"
    return isinstance(error, MemoryError) or bool(re.search(pattern, str(error), re.IGNORECASE))


def _error_in(stderr: str) -> str:
    """Find the line of a traceback that names the error. Some packages print advice after it."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no error message"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def child(module: str, function: str, arguments: str) -> int:
    """Run the function in the process that `fresh` has started. Print its result, and return the exit status."""
    stop_before_swapping()
    try:
        result = getattr(importlib.import_module(f"{__package__}.{module}"), function)(**json.loads(arguments))
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if no_room(error):
            return _OUT_OF_MEMORY
        raise
    print(json.dumps(result))
    return 0


def stop_before_swapping() -> None:
    """Limit this process to the memory that is free now, so that allocations fail and Linux does not swap."""
    if sys.platform == "linux":
        import resource

        free = _kib(Path("/proc/meminfo"), "MemAvailable") * KIB
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (free if hard == resource.RLIM_INFINITY else min(free, hard), hard))


def _kib(path: Path, name: str) -> int:
    """An entry of a file such as /proc/meminfo, in KiB."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name}:"))


def _cpu() -> str:
    """The processor's name, with "(bf16)" if it multiplies bf16 natively."""
    name = platform.processor() or platform.machine()
    flags = ""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
        flags = next((line for line in lines if line.startswith("flags")), "")
    return name + (" (bf16)" if re.search("avx512_bf16|amx_bf16", flags) else "")


def _checkout() -> tuple[str, bool]:
    """The clone's commit, and whether sources differ from it; ("", False) outside of a clone."""
    if Path(_git("rev-parse", "--show-toplevel") or "/") != ROOT:  # an installed package, or another repository
        return "", False
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "*.py", "*.toml", "Makefile"))


def _git(*arguments: str) -> str:
    """Run git and return its output; "" if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


AT_START = _checkout()
