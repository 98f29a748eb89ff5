"""Limits of memory: for tiles, and for what the forward keeps for the backward."""

from __future__ import annotations

import os

LARGEST_MIB = 2**40  # so that the number of bytes fits int64


def workspace_bytes() -> int:
    """Return the memory limit for tiles of logits and of their gradients, in bytes.

    The environment variable GSPO_WORKSPACE_MIB sets it, in MiB. Default: 256.
    """
    return _mebibytes("GSPO_WORKSPACE_MIB", "256", least=1) * 2**20


def cache_bytes() -> int:
    """Return the default of `cache_mib`, in bytes: the environment variable GSPO_CACHE_MIB, or 0."""
    return _mebibytes("GSPO_CACHE_MIB", "0", least=0) * 2**20


def _mebibytes(name: str, default: str, least: int) -> int:
    text = os.environ.get(name, default)
    if not (text.isdecimal() and len(text) <= 13 and least <= int(text) <= LARGEST_MIB):
        expected = f"an integer number of MiB from {least} to {LARGEST_MIB}"
        raise ValueError(f"environment variable {name} must be {expected}, got {text[:40]!r}")
    return int(text)
