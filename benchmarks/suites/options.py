"""Command-line options that several commands share. A bad option raises `BadOption` with a message for the user."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from ..measure import OUTPUT

DTYPES = ("float32", "bfloat16", "float16")


class BadOption(argparse.ArgumentTypeError, ValueError):
    """A bad option. argparse prints the message only of an ArgumentTypeError; `gspo bench` catches a ValueError."""


def device_of(name: str | None) -> torch.device:
    """Find the device called `name`. None means a GPU if there is one, otherwise the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without this device
        raise BadOption(f"--device: expected a device that torch has here, such as cpu, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise BadOption(f"--device: expected cpu or cuda, got {name!r}")
    return device if device.type == "cuda" else torch.device("cpu")


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise BadOption(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parser_of(name: str, doc: str | None, output: str = OUTPUT) -> argparse.ArgumentParser:
    """Make a parser with the options of all measuring commands, described by the first paragraph of `doc`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m gspo_kernels.benchmarks {name}", description=(doc or "").split("\n\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="a trial with small shapes")
    parser.add_argument("--output", type=Path, help=output)
    return parser


say = partial(print, " ", flush=True)  # prints a line of progress, indented
