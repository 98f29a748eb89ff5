"""`gspo bench`: check the options, plan the measurement, and run it within the free memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import measure
from ..candidates import Candidate
from ..workloads import FEWEST, MODELS, SCENARIOS, Head, Spec
from . import bench
from .options import DTYPES, BadOption, device_of


class Plan(NamedTuple):
    """What `gspo bench` will measure."""

    forecast: str  # a line for the user: estimated minutes, and what is measured
    steps: int  # number of calls that `run` makes to its argument, if nothing fails
    run: Callable[[bench.Tick], bench.Record]  # results for JSON; a MemoryError has a message for the user
    scenario: str  # its description


def of_loss(batch: dict[str, Any], dtype: str | None, device: str | None, rounds: int) -> Plan:
    """Plan a comparison of losses. `batch`: the command's other options. Raise BadOption for a bad option."""
    place = device_of(device)
    on_gpu = place.type == "cuda"
    scenario = "rl-like" if batch["scenario"] is None else batch["scenario"]
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    for option, value, values in (("dtype", dtype, DTYPES), ("scenario", scenario, SCENARIOS)):
        if value not in values:
            raise BadOption(f"--{option}: expected one of {', '.join(values)}, got {value!r}")
    model, tokens = batch["model"], batch["tokens"]
    head = head_of(("qwen3-8b" if on_gpu else "qwen2.5-0.5b") if model is None else model)
    count = tokens_of(("16k" if on_gpu else "1k") if tokens is None else tokens)
    chosen = bench.candidates(batch["against"])
    spec = Spec(head, count, scenario, dtype, str(place))
    here = bench.present(spec, chosen)
    minutes = math.ceil(bench.minutes(chosen, spec, rounds))
    return Plan(
        f"This takes about {minutes} min: {rounds} rounds of {', '.join(candidate.name for candidate in here)}",
        len(here) * (rounds + 4) + 1,
        partial(run_loss, spec, chosen, rounds),
        SCENARIOS[scenario].what,
    )


def head_of(text: str) -> Head:
    """Parse a model name or sizes "H,V"."""
    if text in MODELS:
        return MODELS[text]
    expected = f"--model: expected one of {', '.join(MODELS)}, or H,V with 64 <= H < 2^20, 1000 <= V < 2^31"
    try:
        width, vocab = (int(part) for part in text.split(","))
    except ValueError as error:
        raise BadOption(f"{expected}; got {text!r}") from error
    if not (64 <= width < 2**20 and 1000 <= vocab < 2**31):
        raise BadOption(f"{expected}; got {text!r}")
    return Head(width, vocab)


def tokens_of(text: str) -> int:
    """Parse a number of tokens, such as "4096" or "4k"."""
    try:
        number = int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)
    except ValueError as error:
        raise BadOption(f"--tokens: expected a number such as 4096 or 4k, got {text!r}") from error
    if not FEWEST <= number < 2**31:
        raise BadOption(f"--tokens: expected at least {FEWEST}, one per sequence, and less than 2^31; got {text!r}")
    return number


def run_loss(spec: Spec, chosen: list[Candidate], rounds: int, tick: bench.Tick) -> bench.Record:
    """Run `bench.compare` within the free memory. Add date, commit, machine and versions to its results."""
    if spec.device == "cpu":
        measure.stop_before_swapping()
    # Running processes per core, averaged over the last minute; not available on Windows.
    before = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None
    try:
        results = bench.compare(spec, chosen, rounds, tick) | {"load per core before": before}
    except (MemoryError, RuntimeError) as error:
        if not measure.no_room(error):
            raise
        raise MemoryError(bench.TOO_LARGE) from error
    return measure.jsonable(measure.about(torch.device(spec.device)) | results)
