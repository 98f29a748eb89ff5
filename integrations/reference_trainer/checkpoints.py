"""The state of a run on disk: written by an atomic rename, and complete enough to continue to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .config import InputError


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, `path` still holds the earlier checkpoint."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raise an InputError if the file cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors for a damaged file
        raise InputError(f"resume: {path} cannot be read: {error}") from error
