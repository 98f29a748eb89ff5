"""Compare implementations: first memory and passes, then errors of the gradients, then times in interleaved rounds.

gspo bench --model qwen2.5-0.5b --tokens 1k --against trl,liger --scenario rl-like
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .. import measure, truth
from ..candidates import AGAINST, ALL, Candidate
from ..measure import Record, Tick
from ..peaked import entropy_quantiles
from ..workloads import Head, Spec, Workload, counts, make
from .options import BadOption

NAIVE = "naive GSPO"  # always measured: errors and times are divided by its errors and times
TOO_LARGE = "the batch and its float64 gradients do not fit in memory: use fewer --tokens, or a smaller --model"
FEW = 256  # tokens on which naive PyTorch's errors are measured if full logits of the batch do not fit in memory
SMALL = (64, 128, 1000)  # tokens, H, V of a first call, in which libraries initialize and allocate
NOT_TIMED = ("absent", "does_not_fit", "failed", "wrong")  # keys that hold the reason why a candidate has no time


def candidates(against: str | None = None) -> list[Candidate]:
    """Naive GSPO, ours, and the candidates that `against` names, separated by commas. None means all."""
    names = AGAINST if against is None else [name.strip() for name in against.split(",") if name.strip()]
    if unknown := sorted({*names} - {"ours", *AGAINST}):
        raise BadOption(f"--against: {', '.join(unknown)}: choose from {', '.join(AGAINST)}")
    return [candidate for candidate in ALL.values() if candidate.name == NAIVE or candidate.against in {"ours", *names}]


def present(spec: Spec, chosen: list[Candidate]) -> list[Candidate]:
    """The candidates that can run here."""
    return [candidate for candidate in chosen if not absent(candidate, spec)]


def minutes(chosen: list[Candidate], spec: Spec, rounds: int) -> float:
    """Estimate the minutes that `compare` takes, from the measured time of one matrix product.

    The estimate assumes 4 passes of 2 N H V operations per step, rounds + 7 steps per candidate (one runs in a single
    thread, which takes longer), 10 s to start a process per candidate, or 60 s if it compiles, and 8 steps for float64.
    """
    here = present(spec, chosen)
    operations = 8.0 * spec.tokens * spec.head.width * spec.head.vocab
    device = torch.device(spec.device)
    dtype = getattr(torch, spec.dtype)
    a = torch.randn(512, spec.head.width, device=device).to(dtype)
    b = torch.randn(spec.head.width, 8192, device=device).to(dtype)
    taken = statistics.median(measure.interleaved({"product": lambda: a @ b}, 5, device)["product"])
    step = operations / (2 * 512 * spec.head.width * 8192) * taken
    starts = sum(60 if candidate.compiles else 10 for candidate in here)
    return (step * (len(here) * (rounds + 7) + 8) + starts) / 60


def compare(
    spec: Spec, chosen: list[Candidate], rounds: int, tick: Tick = lambda what: None, memory: bool = True
) -> Record:
    """Return a description of the workload as "on", and a record per candidate as "candidates".

    A record has errors, peak memory on top of the inputs (gradients count), and the time of loss and both gradients.
    "over_naive" is the time divided by naive GSPO's, round by round. Without a time, a key of `NOT_TIMED` says why.
    """
    device = _set_device(spec)
    torch._dynamo.reset()  # at a second size, torch.compile would otherwise make a graph for dynamic shapes
    records = {record["name"]: record for record in costs(spec, chosen, tick, memory=memory)}

    def remaining() -> list[Candidate]:
        return [candidate for candidate in chosen if not records[candidate.name].keys() & {*NOT_TIMED}]

    tick("the batch and its float64 gradients")
    w = make(spec)
    olds = {}
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
    for candidate in remaining():  # kernels may have been compiled again since `check`
        tick(f"gradients of {candidate.name} again")
        with _failure_recorded(records[candidate.name]):
            if truth.differ(truth.sizes(candidate.step(w, olds[candidate.name])), sizes[candidate.name]):
                records[candidate.name]["wrong"] = "after the timed runs, its loss or a gradient norm differs"
    for name in [candidate.name for candidate in remaining()]:
        records[name] |= measure.spread(seconds[name])
        if NAIVE in seconds:
            records[name]["over_naive"] = measure.over(seconds[name], seconds[NAIVE])
    on = spec._asdict() | {"head": spec.head._asdict(), "tokens": w.rows}
    on |= counts(spec.tokens, spec.scenario)._asdict() | {"entropy": entropy_quantiles(w.entropy.flatten())}
    return {"on": on, "candidates": list(records.values())}


def costs(
    spec: Spec, chosen: list[Candidate], tick: Tick = lambda what: None, passes: bool = True, memory: bool = True
) -> list[Record]:
    """Make a record per candidate. With `memory`, measure peak memory and, with `passes`, passes in a new process."""
    records = []
    for candidate in chosen:
        record: Record = {"name": candidate.name, "against": candidate.against}
        record["version"] = measure.version(candidate.package)
        records.append(record)
        if reason := absent(candidate, spec):
            record["absent"] = reason
        if reason or not memory:
            continue
        tick(f"memory of {candidate.name}")
        with _failure_recorded(record):
            measured = measure.fresh("suites.bench", "costs_of", name=candidate.name, spec=spec, passes=passes)
            if measured is None:
                raise MemoryError(TOO_LARGE)
            record |= measured
    return records


def absent(candidate: Candidate, spec: Spec) -> str | None:
    """The reason why a candidate cannot run here, or None if it can."""
    return candidate.absent(spec.head, getattr(torch, spec.dtype), torch.device(spec.device))


def _set_device(spec: Spec) -> torch.device:
    """Make the spec's device current, because other libraries may launch kernels only there. Return the device."""
    device = torch.device(spec.device)
    if device.index is not None:  # "cuda" is the current device already
        torch.cuda.set_device(device)
    return device


@contextmanager
def _failure_recorded(record: Record) -> Iterator[None]:
    """Record an exception of another library, and continue. Exceptions of our code and of naive GSPO are raised."""
    try:
        yield
    except Exception as error:
        if record["against"] == "ours" or record["name"] == NAIVE:
            raise
        line = (str(error).strip().splitlines() or [""])[0][:200]
        record["failed"] = line if "Error" in line.split(":")[0] else f"{type(error).__name__}: {line}"


def check(
    w: Workload,
    chosen: list[Candidate],
    olds: dict[str, torch.Tensor],
    records: dict[str, Record],
    tick: Tick,
    small: Workload,
) -> dict[str, truth.Sizes]:
    """Record each candidate's errors relative to float64, and `wrong` if one is too large. Return sizes of the results.

    The limit depends on naive PyTorch's errors in the same dtype, measured on `small`: the batch, or fewer tokens with
    the same head if full logits of the batch do not fit.
    """
    sizes = {}
    true = truth.truth(w)
    small_truth = true if small is w else truth.truth(small)
    base = truth.errors(ALL[NAIVE].step(small, ALL[NAIVE].old(small)), small_truth)
    for candidate in chosen:
        tick(f"gradients of {candidate.name}")
        record = records[candidate.name]
        with _failure_recorded(record):
            result = candidate.step(w, olds[candidate.name])
            sizes[candidate.name] = truth.sizes(result)
            error = truth.errors(result, true)
            del result
            if w.hidden.is_cuda and "peak_bytes" not in record:  # this process's allocator counts the step
                step = partial(candidate.step, w, olds[candidate.name])
                record["peak_bytes"] = measure.peak_bytes(step, w.hidden.device)
            record["error"] = error._asdict() | {"worst": error.worst}
            record["error_over_naive"] = error.worst / base.worst
            if wrong := truth.verdict(error, base, candidate.budget):
                record["wrong"] = wrong
    return sizes


def costs_of(name: str, spec: list[Any], passes: bool) -> Record:
    """Measure the peak memory of a candidate's step and, if `passes`, its passes. Call this in a new process."""
    parsed = Spec(Head(*spec[0]), *spec[1:])  # JSON turned the named tuples into lists
    device = _set_device(parsed)
    candidate = ALL[name]
    tokens, width, vocab = SMALL
    small = make(parsed._replace(tokens=tokens, head=Head(width, vocab, parsed.head.softcap)))
    w = make(parsed)
    measured: Record = {}
    try:
        candidate.step(small, candidate.old(small))  # libraries allocate in their first call
        old = candidate.old(w)
        if candidate.compiles:
            candidate.step(w, old)  # compile first, because the compiler takes memory
        if device.type == "cuda" or sys.platform == "linux":  # only Linux has the peak of resident memory in /proc
            measured["peak_bytes"] = measure.peak_bytes(lambda: candidate.step(w, old), device)
        in_triton = candidate.in_triton or (candidate.against == "ours" and device.type == "cuda")
        if passes and not in_triton:  # the profiler does not see products in Triton
            operations = truth.product_operations(lambda: candidate.step(w, old), candidate.compiles)
            measured["passes"] = operations / w.products
    except (MemoryError, RuntimeError) as error:
        if not measure.no_room(error):
            raise
        return {"does_not_fit": "out of memory"}
    return measured
