"""How anything here is measured: in turns, with medians, memory in a process of its own, and into one JSON file.

Times of a CPU are worth comparing within one run only, so candidates take turns: each round runs all of them once, and
what a busy machine does to a round it does to all.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import torch

from . import json_text

ROOT = Path(__file__).resolve().parent.parent  # of the checkout
RESULTS = Path(__file__).parent / "results"
TRIALS = Path("runs") / "trials"
OUTPUT = "default benchmarks/results/<suite>-<cpu or GPU>.json, of a trial in runs/trials/"
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "verl", "gspo-kernels")
Record = dict[str, Any]
KIB = 1024


def machine(device: torch.device) -> Record:
    """What a reader needs to know of where this ran."""
    description: Record = {"cpu": _cpu(), "threads": torch.get_num_threads(), "memory GiB": _memory_total() >> 30}
    if device.type == "cuda":
        description["gpu"] = torch.cuda.get_device_name(device)
    return description


def about(device: torch.device) -> Record:
    """Machine, versions, commit: the head of every JSON file."""
    now = _checkout()
    return {
        "date": date.today().isoformat(),
        "commit": now[0],
        "uncommitted changes": now[1] or now != AT_START,  # a change while it ran is one too
        "machine": machine(device),
        "versions": {"python": platform.python_version(), **{p: v for p in PACKAGES if (v := version(p))}},
    }


def load() -> float | None:
    """How many processes wanted to run, over the last minute, per core; None where the system does not say."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None


def version(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def place(suite: str, device: torch.device, trial: bool = False) -> Path:
    """benchmarks/results/<suite>-<cpu or GPU>.json, which the report tells of; of a trial runs/trials/."""
    where = "cpu" if device.type != "cuda" else re.sub(r"\W+", "-", torch.cuda.get_device_name(device).lower())
    return (TRIALS if trial else RESULTS) / f"{suite}-{where}.json"


def destination(suite: str, device: torch.device, path: Path | None, trial: bool = False) -> Path:
    """`path`, or `place`. Stops with a line where nothing can be written there, before anything is measured."""
    path = path or place(suite, device, trial)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results_in(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--output: expected a file to make, or results of an earlier run, got {path}: {error!r}")
    if not os.access(path.parent, os.W_OK):
        sys.exit(f"--output: nothing can be written in {path.parent}")
    return path


def results_in(path: Path) -> Record:
    """Return the results of an earlier run; {} if there is no file."""
    return json.loads(path.read_text())["results"] if path.exists() else {}


def save_part(suite: str, device: torch.device, part: str, results: Record, path: Path) -> Path:
    """Write one part of a suite's results with a "measured" head of its own; keep the file's other parts."""
    return save(suite, device, results_in(path) | {part: {"measured": about(device), **results}}, path)


def save(suite: str, device: torch.device, results: Any, path: Path) -> Path:
    """Write `results` with machine, versions and commit: one record per line, floats rounded to 6 significant digits.

    A file that is there is replaced as a whole, or not at all if `results` cannot be written as JSON.
    """
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json_text.pretty({"suite": suite, **about(device), "results": results}))
    return beside.replace(path)


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    tick: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of every run of each in `turns`, without those of the warm-up; `tick` hears of each run."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn, name in turns(list(runs), rounds):
        tick(name)
        seconds = _seconds(runs[name], device)
        if turn:
            taken[name].append(seconds)
    return taken


def turns(those: list[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """All of them in every round, each round beginning with another one. Round 0 warms up."""
    for turn in range(rounds + 1):
        first = turn % max(len(those), 1)
        for x in those[first:] + those[:first]:
            yield turn, x


def over(seconds: list[float], base: list[float]) -> Record:
    """Of the ratios to another candidate's times, round by round: median, and 20th and 80th percentile."""
    ratios = spread([a / b for a, b in zip(seconds, base, strict=True)])
    return {"ratio": ratios["seconds"], "p20": ratios["p20"], "p80": ratios["p80"]}


def spread(seconds: list[float]) -> Record:
    """Median and 20th and 80th percentile, by linear interpolation; few runs are not hidden."""
    if len(seconds) == 1:
        return {"seconds": seconds[0], "p20": seconds[0], "p80": seconds[0], "runs": 1}
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return {"seconds": statistics.median(seconds), "p20": fifths[0], "p80": fifths[-1], "runs": len(seconds)}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def memory_is_known(device: torch.device) -> bool:
    """Whether `peak_bytes` works: of a CPU it reads /proc, which only Linux has."""
    return device.type == "cuda" or sys.platform == "linux"


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most memory a run takes beyond what is there before it. For a process of its own: see `fresh`.

    On CUDA what torch's allocator handed out, on a CPU resident memory.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _of_this_process("VmRSS")
    run()
    return _of_this_process("VmHWM") - before


def fresh(module: str, function: str, **arguments: Any) -> Any:
    """`function(**arguments)` of a module of this package, in a new process; None where it ran out of memory.

    Arguments and result travel as JSON.
    """
    if torch.cuda.is_initialized():  # what this process only keeps for later would be missing there
        gc.collect()
        torch.cuda.empty_cache()
    # The same places to import from: `-m` would put the working directory before them.
    start = (
        f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); from {__package__}.measure import child; "
    )
    command = [sys.executable, "-c", f"{start}sys.exit(child(*sys.argv[1:]))", os.pathsep.join(sys.path)]
    command += [module, function, json.dumps(arguments)]
    # glibc then hands every large block back as soon as it is free: resident memory is live memory.
    env = os.environ | {"PYTHONWARNINGS": "ignore", "MALLOC_MMAP_THRESHOLD_": str(64 * KIB)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode in (-9, _OUT_OF_MEMORY):
        return None
    if done.returncode:
        raise RuntimeError(
            f"{_error_in(done.stderr)}\nin a process of its own: {module}.{function}\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


_OUT_OF_MEMORY = 77  # exit status


def no_room(error: Exception) -> bool:
    """Whether it says that memory ran out; torch's allocators say so in different words."""
    said = "out of memory|not enough memory|can't allocate memory"
    return isinstance(error, MemoryError) or bool(re.search(said, str(error), re.IGNORECASE))


def _error_in(stderr: str) -> str:
    """The line of a traceback that says what happened; some packages print advice after it."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def child(module: str, function: str, arguments: str) -> int:
    """What `fresh` starts."""
    stop_before_swapping()
    run = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    try:
        result = run(**json.loads(arguments))
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if no_room(error):
            return _OUT_OF_MEMORY
        raise
    print(json_text.dumps(result))
    return 0


def stop_before_swapping() -> None:
    """Allocations beyond what is free fail at once, instead of taking the machine down."""
    if sys.platform == "linux":
        import resource

        free = _kib(Path("/proc/meminfo"), "MemAvailable") * KIB
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (free if hard == resource.RLIM_INFINITY else min(free, hard), hard))


def _of_this_process(name: str) -> int:
    return _kib(Path("/proc/self/status"), name) * KIB


def _memory_total() -> int:
    return _kib(Path("/proc/meminfo"), "MemTotal") * KIB if sys.platform == "linux" else 0


def _kib(path: Path, name: str) -> int:
    """An entry of one of Linux's tables."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name}:"))


def _cpu() -> str:
    """Its name and whether it multiplies bf16 itself."""
    name, flags = platform.processor() or platform.machine(), ""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
        flags = next((line for line in lines if line.startswith("flags")), "")
    return name + (" (bf16)" if re.search("avx512_bf16|amx_bf16", flags) else "")


def _checkout() -> tuple[str, bool]:
    """The commit of this file's own repository, and whether sources differ from it. ("", False) outside of one."""
    if Path(_git("rev-parse", "--show-toplevel") or "/") != ROOT:  # installed, perhaps inside somebody else's checkout
        return "", False
    return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "*.py", "*.toml", "Makefile"))


def _git(*arguments: str) -> str:
    """What git says of this checkout; nothing where there is none."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


AT_START = _checkout()
