"""Compare implementations: first gradients, then memory, then times in interleaved rounds.

gspo bench --model qwen2.5-0.5b --tokens 1k --against trl,liger --scenario rl-like
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .. import measure, truth
from ..candidates import AGAINST, ALL, BY_BUDGET, Candidate
from ..measure import Record
from ..peaked import entropy_quantiles
from ..workloads import SCENARIOS, Head, Old, Spec, Workload, counts, make
from .options import DTYPES, BadOption, device_of, head_of, tokens_of

NAIVE = "naive GSPO"  # always measured: errors and times are relative to it
TOO_LARGE = "the batch and its float64 gradients do not fit in memory: use fewer --tokens, or a smaller --model"
FEW = 256  # tokens for measuring naive PyTorch's errors if full logits of the batch do not fit
SMALL = (64, 128, 1000)  # tokens, H, V of a first call, in which libraries initialise
Tick = Callable[[str], object]  # is called with the name of the next measurement
NOT_TIMED = ("absent", "does_not_fit", "failed", "wrong")  # keys that hold the reason why a candidate has no time


def candidates(against: str | None = None) -> list[Candidate]:
    """Return naive GSPO, ours, and the candidates named in `against`, separated by commas. None means all."""
    names = AGAINST if against is None else [name.strip() for name in against.split(",") if name.strip()]
    if unknown := sorted({*names} - {"ours", *AGAINST}):
        raise BadOption(f"--against: {', '.join(unknown)}: choose from {', '.join(AGAINST)}")
    return [candidate for candidate in ALL.values() if candidate.name == NAIVE or candidate.against in {"ours", *names}]


def run(spec: Spec, chosen: list[Candidate], rounds: int, tick: Tick) -> Record:
    """Run `compare` within the free memory. Return results for JSON, with date, commit, machine and versions.

    Raise a MemoryError with a line for the user if the memory does not suffice.
    """
    if spec.device == "cpu":
        measure.stop_before_swapping()
    # The load per core in the last minute. Windows has no load average.
    before = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None
    try:
        results = compare(spec, chosen, rounds, tick) | {"load per core before": before}
    except (MemoryError, RuntimeError) as error:
        if not measure.no_room(error):
            raise
        raise MemoryError(TOO_LARGE) from error
    return measure.jsonable(measure.about(torch.device(spec.device)) | results)


def present(spec: Spec, chosen: list[Candidate]) -> list[Candidate]:
    """Return the candidates that can run here."""
    return [candidate for candidate in chosen if not absent(candidate, spec)]


def steps(chosen: list[Candidate], spec: Spec, rounds: int) -> int:
    """Return the number of calls of `tick` by `compare` if nothing fails."""
    return len(present(spec, chosen)) * (rounds + 4) + 1


def minutes(chosen: list[Candidate], spec: Spec, rounds: int) -> float:
    """Estimate the minutes of `compare` from the speed of one matrix product here.

    A step has 4 passes of 2 N H V operations. A candidate makes rounds + 7 steps, the last in one thread, and starts a
    process, which takes 10 s, or 60 s if the candidate compiles. float64 takes as long as 8 steps.
    """
    here = present(spec, chosen)
    operations = 8.0 * spec.tokens * spec.head.width * spec.head.vocab
    device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
    a = torch.randn(512, spec.head.width, device=device).to(dtype)
    b = torch.randn(spec.head.width, 8192, device=device).to(dtype)
    taken = statistics.median(measure.interleaved({"product": lambda: a @ b}, 5, device)["product"])
    step = operations / (2 * 512 * spec.head.width * 8192) * taken
    starts = sum(60 if candidate.compiles else 10 for candidate in here)
    return (step * (len(here) * (rounds + 7) + 8) + starts) / 60


def forecast(chosen: list[Candidate], spec: Spec, rounds: int) -> str:
    """Return a line with the estimated minutes and the candidates."""
    names = ", ".join(candidate.name for candidate in present(spec, chosen))
    return f"This takes about {math.ceil(minutes(chosen, spec, rounds))} min: {rounds} rounds of {names}"


def compare(spec: Spec, chosen: list[Candidate], rounds: int, tick: Tick = lambda what: None) -> Record:
    """Return the workload's description and a record per candidate.

    A record has a key of `NOT_TIMED` with the reason; or it has errors, peak memory beyond the inputs (gradients
    included) and times of loss and both gradients. `over_naive` holds ratios to naive GSPO's time in the same round.
    """
    device = _set_device(spec)
    torch._dynamo.reset()  # otherwise the second size would run a graph for dynamic shapes
    records = {record["name"]: record for record in costs(spec, chosen, tick)}

    def remaining() -> list[Candidate]:
        return [candidate for candidate in chosen if not records[candidate.name].keys() & {*NOT_TIMED}]

    tick("the batch and its float64 gradients")
    w, olds = make(spec), {}
    for candidate in remaining():
        with _failure_recorded(records[candidate.name]):
            olds[candidate.name] = candidate.old(w)
    small = w if "does_not_fit" not in records[NAIVE] else make(spec._replace(tokens=min(spec.tokens, FEW)))
    sizes = check(w, remaining(), olds, records, tick, small)

    def timed(candidate: Candidate) -> None:
        if "failed" not in records[candidate.name]:
            with _failure_recorded(records[candidate.name]):
                candidate.step(w, olds[candidate.name])

    runs = {candidate.name: partial(timed, candidate) for candidate in remaining()}
    seconds = measure.interleaved(runs, rounds, device, lambda what: tick(f"time of {what}"))
    for candidate in remaining():  # a graph or kernel may have been compiled again during the timed runs
        tick(f"gradients of {candidate.name} again")
        with _failure_recorded(records[candidate.name]):
            if truth.differ(truth.sizes(candidate.step(w, olds[candidate.name])), sizes[candidate.name]):
                records[candidate.name]["wrong"] = "after the timed runs its loss or a gradient has another size"
    for name in [candidate.name for candidate in remaining()]:
        records[name] |= measure.spread(seconds[name])
        if NAIVE in seconds:
            records[name]["over_naive"] = measure.over(seconds[name], seconds[NAIVE])
    on = spec._asdict() | {"head": spec.head._asdict(), "tokens": w.rows}
    on |= counts(spec.tokens, spec.scenario)._asdict() | {"entropy": entropy_quantiles(w.entropy.flatten())}
    return {"on": on, "candidates": list(records.values())}


def costs(spec: Spec, chosen: list[Candidate], tick: Tick = lambda what: None, passes: bool = True) -> list[Record]:
    """Return a record per candidate with peak memory and matrix passes, each measured in a new process."""
    records = []
    for candidate in chosen:
        record: Record = {"name": candidate.name, "against": candidate.against}
        record["version"] = measure.version(candidate.package)
        records.append(record)
        if reason := absent(candidate, spec):
            record["absent"] = reason
            continue
        tick(f"memory of {candidate.name}")
        with _failure_recorded(record):
            measured = measure.fresh("suites.bench", "costs_of", name=candidate.name, spec=spec, passes=passes)
            if measured is None:
                raise MemoryError(TOO_LARGE)
            record |= measured
    return records


def absent(candidate: Candidate, spec: Spec) -> str | None:
    """Return the reason why a candidate cannot run here, or None if it can."""
    return candidate.absent(spec.head, getattr(torch, spec.dtype), torch.device(spec.device))


def _set_device(spec: Spec) -> torch.device:
    """Make the spec's device current and return it. Some peers launch kernels on the current device only."""
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def _failure_recorded(record: Record) -> Iterator[None]:
    """Record the failure of a peer, so that other candidates are still measured. Raise ours and naive GSPO's."""
    try:
        yield
    except Exception as error:
        if record["against"] == "ours" or record["name"] == NAIVE:
            raise
        line = (str(error).strip().splitlines() or [""])[0][:200]
        record["failed"] = line if "Error" in line.split(":")[0] else f"{type(error).__name__}: {line}"


def check(
    w: Workload, chosen: list[Candidate], olds: dict[str, Old], records: dict[str, Record], tick: Tick, small: Workload
) -> dict[str, truth.Sizes]:
    """Record every candidate's errors against float64, and `wrong` if they are too large. Return sizes of the results.

    The limit depends on naive PyTorch's errors in the same dtype. They are measured on the batch, or if full logits do
    not fit, on fewer tokens with the same head (`small`). GRPO and GSPO are compared one after the other, because the
    float64 gradient of the head is large.
    """
    sizes = {}
    for per_token in (False, True):
        group = [candidate for candidate in chosen if candidate.per_token == per_token]
        if not group:
            continue
        true, naive = truth.truth(w, per_token), ALL["naive GRPO" if per_token else NAIVE]
        small_truth = true if small is w else truth.truth(small, per_token)
        base = truth.errors(naive.step(small, naive.old(small)), small_truth)
        for candidate in group:
            tick(f"gradients of {candidate.name}")
            record = records[candidate.name]
            with _failure_recorded(record):
                result = candidate.step(w, olds[candidate.name])
                sizes[candidate.name], error = truth.sizes(result), truth.errors(result, true)
                del result
                record["error"] = error._asdict() | {"worst": error.worst}
                record["error_over_naive"] = error.worst / base.worst
                if wrong := truth.verdict(error, base, candidate.budget):
                    record["wrong"] = wrong
        del true, small_truth
    return sizes


def costs_of(name: str, spec: list[Any], passes: bool) -> Record:
    """Return peak memory of a candidate's step and, if `passes`, its matrix passes. Runs in a new process."""
    parsed = Spec(Head(*spec[0]), *spec[1:])  # JSON turned the named tuples into lists
    device, candidate = _set_device(parsed), (ALL | BY_BUDGET)[name]
    tokens, width, vocab = SMALL
    small, w = make(parsed._replace(tokens=tokens, head=Head(width, vocab, parsed.head.softcap))), make(parsed)
    measured: Record = {}
    try:
        candidate.step(small, candidate.old(small))  # libraries allocate in their first call
        old = candidate.old(w)
        if candidate.compiles:
            candidate.step(w, old)  # compile first, because the compiler takes memory
        if device.type == "cuda" or sys.platform == "linux":  # only Linux's /proc has the peak of resident memory
            measured["peak_bytes"] = measure.peak_bytes(lambda: candidate.step(w, old), device)
        if passes and not candidate.multiplies_unseen(device):
            measured["passes"] = truth.product_operations(lambda: candidate.step(w, old)) / w.products
    except (MemoryError, RuntimeError) as error:
        if not measure.no_room(error):
            raise
        return {"does_not_fit": "out of memory"}
    return measured


def asked(
    model: str | None, tokens: str | None, against: str | None, scenario: str, dtype: str | None, device: str | None
) -> tuple[list[Candidate], Spec]:
    """Return the candidates and the workload of a command line. Raise BadOption with a line for the user."""
    place = device_of(device)
    on_gpu = place.type == "cuda"
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    for option, value, values in (("dtype", dtype, DTYPES), ("scenario", scenario, SCENARIOS)):
        if value not in values:
            raise BadOption(f"--{option}: expected one of {', '.join(values)}, got {value!r}")
    head = head_of(("qwen3-8b" if on_gpu else "qwen2.5-0.5b") if model is None else model)
    count = tokens_of(("16k" if on_gpu else "1k") if tokens is None else tokens)
    return candidates(against), Spec(head, count, scenario, dtype, str(place))
