"""The options of `gspo bench`, and its measurement within the free memory."""

from __future__ import annotations

import math
import os

import torch

from gspo_kernels.benchmarks import measure
from gspo_kernels.benchmarks.candidates import Candidate
from gspo_kernels.benchmarks.suites import bench
from gspo_kernels.benchmarks.suites.options import DTYPES, BadOption, device_of
from gspo_kernels.benchmarks.workloads import FEWEST, MODELS, SCENARIOS, Head, Spec


def asked(
    model: str | None, tokens: str | None, against: str | None, scenario: str, dtype: str | None, device: str | None
) -> tuple[list[Candidate], Spec]:
    """Return the candidates and the workload for the options of a command line. Raise BadOption if one is bad."""
    place = device_of(device)
    on_gpu = place.type == "cuda"
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    for option, value, values in (("dtype", dtype, DTYPES), ("scenario", scenario, SCENARIOS)):
        if value not in values:
            raise BadOption(f"--{option}: expected one of {', '.join(values)}, got {value!r}")
    head = head_of(("qwen3-8b" if on_gpu else "qwen2.5-0.5b") if model is None else model)
    count = tokens_of(("16k" if on_gpu else "1k") if tokens is None else tokens)
    return bench.candidates(against), Spec(head, count, scenario, dtype, str(place))


def head_of(text: str) -> Head:
    """Return the head of the named model, or with the sizes "H,V"."""
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


def steps(chosen: list[Candidate], spec: Spec, rounds: int) -> int:
    """Return how often `bench.compare` calls `tick` if nothing fails."""
    return len(bench.present(spec, chosen)) * (rounds + 4) + 1


def forecast(chosen: list[Candidate], spec: Spec, rounds: int) -> str:
    """Return a line for the user: the estimated minutes, and the candidates that can run here."""
    names = ", ".join(candidate.name for candidate in bench.present(spec, chosen))
    return f"This takes about {math.ceil(bench.minutes(chosen, spec, rounds))} min: {rounds} rounds of {names}"


def run(spec: Spec, chosen: list[Candidate], rounds: int, tick: bench.Tick) -> bench.Record:
    """Run `bench.compare` within the free memory. Return its results for JSON, with date, commit, machine and versions.

    Raise a MemoryError with a message for the user if the memory does not suffice.
    """
    if spec.device == "cpu":
        measure.stop_before_swapping()
    # Running processes per core, averaged over the last minute. Windows has no such number.
    before = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None
    try:
        results = bench.compare(spec, chosen, rounds, tick) | {"load per core before": before}
    except (MemoryError, RuntimeError) as error:
        if not measure.no_room(error):
            raise
        raise MemoryError(bench.TOO_LARGE) from error
    return measure.jsonable(measure.about(torch.device(spec.device)) | results)
