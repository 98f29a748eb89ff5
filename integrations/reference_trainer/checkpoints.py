"""The state of a run on disk: written by an atomic rename, and complete enough to continue to the bit."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import InputError

FORMAT = 1


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, `path` still holds the earlier checkpoint."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raise an InputError if the file is none of this version."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors for a damaged file
        raise InputError(f"resume: {path} cannot be read: {error}") from error
    if state.get("format") != FORMAT:
        raise InputError(f"resume: {path}: expected format {FORMAT}, got {state.get('format')}")
    return state


def rng_states() -> dict[str, Any]:
    """Return the states of the random number generators of Python, NumPy and torch in this process."""
    name, keys, *rest = np.random.get_state()
    numpy_state = (name, np.asarray(keys).tolist(), *rest)
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore what `rng_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_all(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
