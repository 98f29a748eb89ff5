"""The memory limits of a call, from arguments and environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..validation import Checks

DEFAULT_WORKSPACE = 256 * 2**20  # bytes
LARGEST_MIB = 2**40  # so that the number of bytes fits int64
CACHE_DIVISOR = 64  # the default cache is a GPU's memory divided by it


def check_cache(check: Checks, cache_mib: float | None) -> None:
    """Check `cache_mib`, or GSPO_CACHE_MIB if it is None."""
    if cache_mib is None:
        cache_variable()
    else:
        expected = f"a number of MiB from 0 to {LARGEST_MIB}, or None for the default"
        check.number("cache_mib", cache_mib, expected, lambda x: 0 <= x <= LARGEST_MIB)


def cache_limit(
    check: Checks,
    cache_mib: float | None,
    device: torch.device,
    has_backward: bool = True,
    largest_default: Callable[[], int] | None = None,
) -> int:
    """Check `cache_mib` (None: the default on `device`). Return it in bytes, or 0 without a backward.

    `largest_default` (see `memory.largest_default_cache`) bounds neither GSPO_CACHE_MIB nor an argument.
    """
    if cache_mib is None:
        size: Any = cache_bytes(device)
        if size and has_backward and largest_default is not None and cache_variable() is None:
            # Under torch.compile, the size depends on the symbol for the number of tokens.
            size = torch.sym_min(size, largest_default())
    else:
        check_cache(check, cache_mib)
        size = int(float(cache_mib) * 2**20)
    return size if has_backward else 0


def workspace_bytes() -> int:
    """Memory limit for tiles of logits and their gradients, in bytes: GSPO_WORKSPACE_MIB, by default 256 MiB."""
    return _mebibytes("GSPO_WORKSPACE_MIB", str(DEFAULT_WORKSPACE // 2**20), least=1) * 2**20


def cache_bytes(device: torch.device) -> int:
    """The default cache in bytes: GSPO_CACHE_MIB if it is set, else `cache_of_device`."""
    mib = cache_variable()
    return (cache_of_device(device) if mib is None else mib) * 2**20


def cache_variable() -> int | None:
    """GSPO_CACHE_MIB, or None if it is not set."""
    return _mebibytes("GSPO_CACHE_MIB", "0", least=0) if os.environ.get("GSPO_CACHE_MIB") else None


def cache_of_device(device: torch.device) -> int:
    """1/64 of the total memory of a CUDA or ROCm device, in whole MiB; 0 for other devices.

    Free memory does not matter, so every call and every run gets the same size. A device without an index is the
    current device.
    """
    if device.type != "cuda" or not torch.cuda.is_available():  # fake tensors may be on a GPU that does not exist
        return 0
    return torch.cuda.get_device_properties(device).total_memory // (CACHE_DIVISOR * 2**20)


# torch.compile treats the result as a constant, see `dispatch.triton_obstacle`.
cache_of_device._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _mebibytes(name: str, default: str, least: int) -> int:
    text = os.environ.get(name) or default
    if not (text.isdecimal() and len(text) <= 13 and least <= int(text) <= LARGEST_MIB):
        expected = f"an integer number of MiB from {least} to {LARGEST_MIB}"
        raise ValueError(f"environment variable {name} must be {expected}, got {text[:40]!r}")
    return int(text)
