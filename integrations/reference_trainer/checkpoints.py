"""The state of a run on disk. It is replaced atomically and checked when read. A resumed run has the same bits."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .config import InputError
from .update import TrainingError

# The keys of a checkpoint and the types of their values. `Optimizer.load` compares the weights with the model's.
CHECKPOINT = {
    "seed": int,
    "step": int,
    "optimizer": {"updates": int, "weights": dict, "loss_scale": float, "updates_at_scale": int},
    "running": dict,
    "sizes": {"metrics.jsonl": int, "samples.jsonl": int},
}


class WriteError(TrainingError):
    """The operating system refuses to write a file of the run."""


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. If the process is killed meanwhile, `path` still holds the earlier checkpoint."""
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # the caller may have switched them off
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        torch.serialization.set_crc32_options(with_checksums)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raise an InputError if the file is damaged."""
    try:
        # torch.load does not compare the checksums that torch.save has written. This reads the file once more, at about
        # 1 GB/s: a minute for a model of 5 billion weights (12 bytes each), once per resumed run and process.
        with zipfile.ZipFile(path) as archive:
            if record := archive.testzip():
                raise ValueError(f"the checksum of {record} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both raise many kinds of errors for a damaged file
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: damaged: expected a checkpoint: {reason}") from error
    check_form(path, state, CHECKPOINT)
    return state


def check_form(where: object, value: Any, form: Any, name: str = "its content") -> None:
    """Check the keys and types of a value that was read from the file `where`, or raise an InputError."""
    kind = dict if isinstance(form, dict) else form
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"{where}: damaged: expected {name} to be {kind.__name__}, got {str(value)[:60]!r}")
    for key, inner in form.items() if isinstance(form, dict) else ():
        check_form(where, value.get(key), inner, key)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path at which to write a file or folder. Move it to `path` at the end, or remove it if that fails.

    Raises:
        WriteError: the system refuses. Whatever was at `path` before is still there.
    """
    partial, replaced = (path.with_name(f"{path.name}.{suffix}") for suffix in ("partial", "replaced"))
    try:
        with naming(path):
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise a WriteError that names `path` and the system's reason if the block fails to write."""
    try:
        yield
    except Exception as error:
        reason = system_error(error)
        if reason is None:
            raise
        raise WriteError(f"{path} cannot be written: {reason}") from error


def system_error(error: BaseException | None) -> BaseException | None:
    """The operating system's error behind `error`, or None.

    torch.save raises a RuntimeError about positions in its file while it handles the OSError. safetensors and
    tokenizers, which are written in Rust, raise other classes, whose texts end in "(os error 28)".
    """
    while error is not None and not isinstance(error, OSError) and not re.search(r"\(os error \d+\)", str(error)):
        error = error.__context__
    return error


def remove(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
