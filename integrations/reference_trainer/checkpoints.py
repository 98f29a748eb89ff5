"""The state of a run on disk. It is replaced atomically and checked when read. A resumed run has the same bits."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .config import InputError


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, `path` still holds the earlier checkpoint."""
    with replacing(path) as partial, partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raise an InputError if the file is damaged."""
    try:
        # torch.load does not compare the checksums that torch.save has written. This reads the file once more, at about
        # 1 GB/s: a minute for a model of 5 billion weights (12 bytes each), once per resumed run and process.
        with zipfile.ZipFile(path) as archive:
            if record := archive.testzip():
                raise ValueError(f"the checksum of {record} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both raise many kinds of errors for a damaged file
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: damaged: expected a checkpoint: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path at which to write a file or folder. Move it to `path` at the end.

    If that fails, it is removed, and whatever was at `path` before is still there.
    """
    partial, replaced = (path.with_name(f"{path.name}.{suffix}") for suffix in ("partial", "replaced"))
    try:
        remove(partial)  # left by a process that was killed
        yield partial
        if partial.is_dir() and path.exists():  # a folder replaces only an empty folder
            remove(replaced)
            path.rename(replaced)
        partial.replace(path)
    finally:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        with suppress(OSError):  # an error of the block is the one to raise
            remove(partial)
            remove(replaced)


def remove(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
