"""The state of a run on disk: written by an atomic rename, and complete enough to continue to the bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
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


def rng_states() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and torch in this process."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {"python": random.getstate(), "numpy": (name, np.asarray(keys).tolist(), *rest)}
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {**states, "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore what `rng_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
