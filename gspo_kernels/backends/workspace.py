"""The limit of the memory for tiles."""

from __future__ import annotations

import os


def workspace_bytes() -> int:
    """Return the memory limit for tiles of logits and of their gradients, in bytes.

    The environment variable GSPO_WORKSPACE_MIB sets it, in MiB. Default: 256.
    """
    text = os.environ.get("GSPO_WORKSPACE_MIB", "256")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"environment variable GSPO_WORKSPACE_MIB must be an integer number of MiB >= 1, got {text!r}")
    return int(text) * 2**20
