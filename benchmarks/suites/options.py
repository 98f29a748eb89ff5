"""Command-line options that several commands share. A bad option raises `BadOption` with a line for the user."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..measure import OUTPUT
from ..workloads import FEWEST, MODELS, Head

DTYPES = ("float32", "bfloat16", "float16")


class BadOption(argparse.ArgumentTypeError, ValueError):
    """A bad option of argparse, which prints the text only of an ArgumentTypeError, or of `gspo bench`."""


def device_of(name: str | None) -> torch.device:
    """Return the device of that name. None means a GPU if there is one, otherwise the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise BadOption(f"--device: expected a device that torch has here, such as cpu, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise BadOption(f"--device: expected cpu or cuda, got {name!r}")
    return device if device.type == "cuda" else torch.device("cpu")


def head_of(text: str) -> Head:
    """Return a model's head from its name or from "H,V"."""
    if text in MODELS:
        return MODELS[text]
    expected = f"--model: expected one of {', '.join(MODELS)}, or H,V such as 896,151936"
    try:
        width, vocab = (int(part) for part in text.split(","))
    except ValueError as error:
        raise BadOption(f"{expected}; got {text!r}") from error
    if not (64 <= width < 2**20 and 1000 <= vocab < 2**31):
        raise BadOption(f"{expected} of at least 64,1000 and less than 2^20,2^31; got {text!r}")
    return Head(width, vocab)


def tokens_of(text: str) -> int:
    """Return a number of tokens from "4096" or "4k"."""
    try:
        number = int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)
    except ValueError as error:
        raise BadOption(f"--tokens: expected a number such as 4096 or 4k, got {text!r}") from error
    if not FEWEST <= number < 2**31:
        raise BadOption(f"--tokens: expected at least {FEWEST}, one per sequence, and less than 2^31; got {text!r}")
    return number


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise BadOption(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options that all suites have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m gspo_kernels.benchmarks {name}", description=(doc or "").split("\n\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="a trial with small shapes")
    parser.add_argument("--output", type=Path, help=OUTPUT)
    return parser


def add_comparison(parser: argparse.ArgumentParser, candidates: Callable[[str], Any]) -> None:
    """Add the options of suites that compare implementations. `candidates` parses --against."""
    device = str(device_of(None))
    parser.add_argument("--rounds", type=positive, help="interleaved timed runs of each candidate")
    default = "default: all that are installed; with --tiny: torch"
    parser.add_argument("--against", type=candidates, help=f"as in `gspo bench` ({default})")
    parser.add_argument("--device", type=device_of, default=device, help=f"default {device}")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32 on a CPU, bfloat16 on a GPU")


def say(what: str) -> None:
    """Print a line of progress."""
    print(f"  {what}", flush=True)
