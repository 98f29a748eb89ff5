"""Decide whether this machine may use the Triton kernels: by the list of measured machines, or by a check.

The check (`kernel_check.py`) runs before the first use of the kernels in a dtype. It runs once per machine: the result
is stored on disk, and a file lock keeps several processes from running it at the same time. There are no collectives.
While a CUDA graph is captured, under torch.compile and with fake tensors, no check runs, and only a stored result
counts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch._guards import detect_fake_mode

from ...layout import accumulator
from ...validation import dtype_name, warn_once
from ..live_tiles import is_captured
from ..precision import refuses_mixed_products

_logger = logging.getLogger(__name__)

LOCK_SECONDS = 120.0  # how long a process waits for another process's check before it runs its own
FAILURE_SECONDS = 3600.0  # a failure expires after this time, because its cause may be fixed (a broken installation)


class Measured(NamedTuple):
    """A combination that needs no check, because the GPU tests passed on it."""

    architecture: str  # as in `tuning.architecture`
    triton: str  # version
    torch: str  # version, without its local part such as "+cu130"


# Add an entry only together with the JSON of a GPU run of this commit's kernels in benchmarks/results/.
MEASURED: tuple[Measured, ...] = ()

Key = tuple[torch.device, torch.dtype, str]
_failures: dict[Key, str] = {}  # why a check failed; "" if it passed or is not needed
_one_check = threading.Lock()


def is_enabled() -> bool:
    """False if GSPO_SELF_CHECK=0."""
    text = os.environ.get("GSPO_SELF_CHECK", "1")
    if text not in ("", "0", "1"):
        raise ValueError(f"environment variable GSPO_SELF_CHECK must be 0 or 1, got {text!r}")
    return text != "0"


def obstacle(backend: str, device: torch.device, dtype: torch.dtype, subject: str, is_compiling: bool) -> str | None:
    """The reason why `backend` must not run the Triton kernels on `device`, or None. The first call checks them.

    If the check cannot run now and no result is stored, "auto" must not run the kernels, but "triton" may.

    Args:
        backend: "auto", which warns once if the kernels must not run, or "triton".
        device: the accelerator.
        dtype: of hidden states and head or, for "loss", of log-probs.
        subject: "head", or "loss" for the kernels of `policy_loss`.
        is_compiling: whether torch.compile is tracing the caller.
    """
    key = (device, dtype, subject)
    failure = _failures.get(key)
    if failure is None:
        failure = _check_once(key, is_compiling)
    if not failure:
        unchecked = failure is None and backend == "auto"
        return _warn_unchecked(device, dtype) if unchecked else None
    reason = f"the self-check of the Triton kernels in {dtype_name(dtype)} failed: {failure}"
    if backend == "auto":
        file = result_file(_facts(*key))
        again = f"a process repeats it after an hour, or once you delete {file}" if file else "each process repeats it"
        again += "; with GSPO_BACKEND=torch, there is no check"
        text = f"backend='auto' uses PyTorch on {device}, because {reason} ({again})"
        warn_once(text, 2, kind=f"self-check failed {key}")
    return reason


# torch.compile treats the result as a constant, see `dispatch.triton_obstacle`.
obstacle._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def state(device: torch.device, dtype: torch.dtype, subject: str = "head") -> str:
    """Describe the state of the check for `gspo doctor`, without running it."""
    if not is_enabled():
        return "off (GSPO_SELF_CHECK=0)"
    facts = _facts(device, dtype, subject)
    if is_measured(facts):
        return "not needed (measured)"
    failure = _failures.get((device, dtype, subject))
    if failure is None:
        failure = _remembered(result_file(facts), facts)
    return "not run" if failure is None else f"failed: {failure}" if failure else "passed"


def is_measured(facts: dict[str, str]) -> bool:
    """True if MEASURED lists the architecture and versions in `facts`."""
    return Measured(facts["architecture"], facts["triton"], facts["torch"].partition("+")[0]) in MEASURED


def _warn_unchecked(device: torch.device, dtype: torch.dtype) -> str:
    reason = f"the Triton kernels have not been checked in {dtype_name(dtype)} on this machine"
    warn_once(
        f"backend='auto' uses PyTorch on {device} here, because {reason}, and the check does not run under "
        "torch.compile, with fake tensors, or while a CUDA graph is captured. Call the function once outside, with the "
        "same dtype, or pass backend='triton'.",
        2,
        kind=f"no self-check {(device, dtype)}",
    )
    return reason


# -- one check per process


def _check_once(key: Key, is_compiling: bool) -> str | None:
    """The failure, "" if the check passed, or None if there is no result and the check cannot run now."""
    with _one_check:
        if key not in _failures:
            facts = _facts(*key) if is_enabled() else None
            if facts is None or is_measured(facts):
                _failures[key] = ""
                return ""
            file = result_file(facts)
            failure = _remembered(file, facts)
            if failure is None and not _can_run(key[0], is_compiling):
                return None
            _failures[key] = _shared_check(key, file, facts) if failure is None else failure
        return _failures[key]


def _can_run(device: torch.device, is_compiling: bool) -> bool:
    return not (is_compiling or is_captured(device) or detect_fake_mode() is not None)


def _run(device: torch.device, dtype: torch.dtype, subject: str) -> str:
    """Run the check. Return the failure, or "" if it passed."""
    try:
        from .kernel_check import run_check

        return run_check(device, dtype, subject) or ""
    except Exception as error:  # importing a kernel may raise any exception
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# -- one check per machine


def _shared_check(key: Key, file: Path | None, facts: dict[str, str]) -> str:
    """Run the check, unless another process has just done so. Return the failure, or "" if it passed."""
    with _locked(file):
        failure = _remembered(file, facts)
        if failure is not None:
            return failure
        start = time.monotonic()
        failure = _run(*key)
        # Running out of memory says nothing about the kernels.
        written = "OutOfMemoryError" not in failure and _remember(file, facts, failure)
        if not failure:
            device, dtype, subject = key
            if subject == "head":  # which also checks the loss
                of_loss = _facts(device, accumulator(dtype), "loss")
                _remember(result_file(of_loss), of_loss, failure)
            where = f"remembered in {file}" if written else "not remembered, because no cache folder can be written"
            seconds = time.monotonic() - start
            what = f"{facts['subject']} in {facts['dtype']} on {facts['device']}"
            _logger.info("the Triton kernels passed their self-check: %s, %.1f s; %s", what, seconds, where)
        return failure


def _facts(device: torch.device, dtype: torch.dtype, subject: str) -> dict[str, str]:
    """Collect the facts that the result of a check depends on."""
    import triton

    from ..triton import logit_tile
    from ..triton.tuning import architecture

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "architecture": architecture(device) or "",
        "dtype": dtype_name(dtype),
        "subject": subject,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "mixed products": "copied" if refuses_mixed_products() else "direct",
        "kernels": ("interpreted " if logit_tile.INTERPRETED else "") + _hash_of_sources(),
    }


@functools.cache
def _hash_of_sources() -> str:
    """Hash the source files of both backends and of the check."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(x for x in folder.rglob("*.py") if not x.name.startswith(".")):  # skip an editor's hidden files
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def result_file(facts: dict[str, str]) -> Path | None:
    """Path of the file that stores a result, in the user's cache folder; None if there is no such folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        return None
    if not base.is_absolute():
        return None
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return base / "gspo_kernels" / f"self_check-{name}.json"


def _remembered(file: Path | None, facts: dict[str, str]) -> str | None:
    """Read a stored failure: "" if the check passed, None if the file is missing or damaged, or the failure expired."""
    try:
        entry = json.loads(file.read_text()) if file else {}
        if entry["facts"] != facts or not isinstance(entry["failure"], str):
            return None
        is_old = not 0 <= time.time() - entry["time"] <= FAILURE_SECONDS
        return None if entry["failure"] and is_old else entry["failure"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remember(file: Path | None, facts: dict[str, str], failure: str) -> bool:
    """Store a result atomically. Return False if that is not possible."""
    if file is None:
        return False
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f"{file.stem}-")
        with os.fdopen(handle, "w") as opened:
            json.dump({"facts": facts, "failure": failure, "time": time.time()}, opened, indent=2)
        os.replace(temporary, file)
        return True
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of a result file. Continue without it after LOCK_SECONDS, or if the file cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # Windows has no fcntl
            import fcntl

            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                stack.callback(os.close, handle)
                deadline = time.monotonic() + LOCK_SECONDS
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)  # closing does not unlock it after a fork
                        break
                    except BlockingIOError:
                        time.sleep(0.05)
        yield
