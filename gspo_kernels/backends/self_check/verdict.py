"""Decide whether this machine may use the Triton kernels, by a check before their first use in a dtype.

The check (`kernel_check.py`) runs once per machine: the result is stored on disk, and a file lock keeps several
processes from running it at the same time. There are no collectives. While a CUDA graph is captured, under
torch.compile and with fake tensors, no check runs and nothing waits: only a stored result counts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
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


class Result(NamedTuple):
    """The result of a check that has run. Functions return None if none has."""

    failure: str | None  # the wrong kernels and their errors; None if all are right


Key = tuple[torch.device, torch.dtype, str]  # the arguments of `run_check`
_results: dict[Key, Result] = {}  # known to this process
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
    if not is_enabled():
        return None
    key = (device, dtype, subject)
    result = _results.get(key) or _result(key, may_run=not is_compiling and _can_run(device))
    if result is None and backend == "auto":
        reason = (
            f"the Triton kernels have not been checked in {dtype_name(dtype)} on this machine, and the check does not "
            "run under torch.compile, with fake tensors, or while a CUDA graph is captured. Call the function once "
            "outside, with the same dtype, or pass backend='triton'."
        )
    elif result is not None and result.failure is not None:
        file = result_file(_facts(*key))
        again = f"to repeat the check, delete {file}" if file and file.exists() else "each process repeats the check"
        reason = (
            f"the self-check of the Triton kernels in {dtype_name(dtype)} failed: {result.failure} ({again}; with "
            "GSPO_BACKEND=torch, there is no check)"
        )
    else:
        return None
    if backend == "auto":
        warn_once(f"backend='auto' uses PyTorch on {device}, because {reason}", 2, kind=f"self-check {key} {result}")
    return reason


# torch.compile treats the result as a constant, see `dispatch.triton_obstacle`.
obstacle._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def state(device: torch.device, dtype: torch.dtype) -> str:
    """Say for `gspo doctor` whether the head's check has run and passed, without running it."""
    if not is_enabled():
        return "off (GSPO_SELF_CHECK=0)"
    result = _result((device, dtype, "head"), may_run=False)
    if result is None:
        return "not run"
    return "passed" if result.failure is None else f"failed: {result.failure}"


def _can_run(device: torch.device) -> bool:
    return not is_captured(device) and detect_fake_mode() is None


def _result(key: Key, may_run: bool) -> Result | None:
    """This process's result, or the stored one. If there is neither, run the check, or return None unless `may_run`."""
    facts = _facts(*key)
    file = result_file(facts)
    result = _results.get(key) or _read(file)
    if result is None and may_run:
        with _one_check, _locked(file):  # another thread or process may have run it in the meantime
            result = _results[key] = _results.get(key) or _read(file) or _run(key, file, facts)
    if result is not None:
        _results[key] = result
    return result


def _run(key: Key, file: Path | None, facts: dict[str, str]) -> Result:
    """Run the check and store its result."""
    from .kernel_check import run_check

    start = time.monotonic()
    result = Result(run_check(*key))
    if result.failure is None:
        seconds = time.monotonic() - start
        what = f"{facts['subject']} in {facts['dtype']} on {facts['device']}"
        _logger.info("the Triton kernels passed their self-check: %s, %.1f s (%s)", what, seconds, file)
        device, dtype, subject = key
        if subject == "head":  # which also checks the loss
            of_loss = _facts(device, accumulator(dtype), "loss")
            _store(result_file(of_loss), of_loss, result)
    elif "OutOfMemoryError" in result.failure:  # says nothing about the kernels
        return result
    _store(file, facts, result)
    return result


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


# -- results on disk, in the user's cache folder. A crash leaves no result, so the next process checks again.


def result_file(facts: dict[str, str]) -> Path | None:
    """Path of the file that stores a result; None without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        return None
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return Path(base, "gspo_kernels", f"self_check-{name}.json")


def _read(file: Path | None) -> Result | None:
    """Read a stored result; None if the file is missing or damaged."""
    if file is None:
        return None
    try:
        failure = json.loads(file.read_text())["failure"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Result(failure) if failure is None or isinstance(failure, str) else None


def _store(file: Path | None, facts: dict[str, str], result: Result) -> None:
    with contextlib.suppress(OSError):  # without the file, each process checks
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"failure": result.failure, "facts": facts}, indent=2))


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of the folder of `file`; continue without it if files cannot be locked.

    The system releases the lock if the process ends, and forked processes do not inherit it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # Windows has no fcntl
            import fcntl

            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                fcntl.lockf(stack.enter_context(file.with_name("self_check.lock").open("a")), fcntl.LOCK_EX)
        yield
