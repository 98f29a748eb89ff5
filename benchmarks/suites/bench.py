"""What `gspo bench` does: parity first, then memory, then times in turns. The suites use the same comparison.

gspo bench --model qwen2.5-0.5b --tokens 1k --against trl,liger --scenario rl-like
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .. import truth
from ..candidates import AGAINST, ALL, Candidate
from ..json_text import dumps
from ..measure import (
    Record,
    about,
    fresh,
    interleaved,
    load,
    memory_is_known,
    no_room,
    over,
    peak_bytes,
    spread,
    stop_before_swapping,
    version,
)
from ..peaked import entropy_quantiles
from ..workloads import FEWEST, MODELS, SCENARIOS, Head, Old, Spec, Workload, counts, make, spec_from

NAIVE = "naive GSPO"  # what errors and times are compared with: always measured
DTYPES = ("float32", "bfloat16", "float16")
TOO_LARGE = "out of memory by the batch and its float64 gradients: fewer --tokens, or a smaller --model"
FEW = 256  # tokens on which naive PyTorch's errors are known where full logits do not fit
SMALL = (64, 128, 1000)  # tokens, H, V of the batch that libraries set themselves up with
Tick = Callable[[str], object]  # told what comes next
OUT = ("absent", "does_not_fit", "failed", "wrong")  # of these no time is taken


def candidates(against: str | None = None) -> list[Candidate]:
    """Naive GSPO, ours, and those asked for, with commas between; all of them where nothing is said."""
    asked = AGAINST if against is None else [name.strip() for name in against.split(",") if name.strip()]
    wanted = {"ours", *asked}
    if unknown := wanted - {"ours", *AGAINST}:
        raise ValueError(f"--against: {', '.join(sorted(unknown))}: choose from {', '.join(AGAINST)}")
    return [candidate for candidate in ALL.values() if candidate.name == NAIVE or candidate.against in wanted]


def run(spec: Spec, chosen: list[Candidate], rounds: int, tick: Tick) -> Record:
    """`compare`, for a machine whose memory others use too: what does not fit is a MemoryError with a line."""
    if spec.device == "cpu":
        stop_before_swapping()
    before = load()  # this one's own comes on top
    try:
        return compare(spec, chosen, rounds, tick) | {"load per core before": before}
    except (MemoryError, RuntimeError) as error:
        if not no_room(error):
            raise
        raise MemoryError(TOO_LARGE) from error


def steps(chosen: list[Candidate], spec: Spec, rounds: int) -> int:
    """How often `compare` calls `tick`, if nothing fails."""
    present = sum(not absent(candidate, spec) for candidate in chosen)
    return present * (rounds + 4) + 1


def compare(spec: Spec, chosen: list[Candidate], rounds: int, tick: Tick = lambda what: None) -> Record:
    """Every candidate's record, and what they were measured on.

    A record has `absent`, `does_not_fit`, `failed` or `wrong` with the reason, or errors and times. Times are of loss
    and both gradients; `over_naive` is of the ratios to naive GSPO's of the same round. Memory is beyond inputs,
    gradients included.
    """
    device = _start(spec)
    torch._dynamo.reset()  # or the second size would be timed as a graph for any size
    records = {record["name"]: record for record in costs(spec, chosen, tick)}

    def present() -> list[Candidate]:
        return [candidate for candidate in chosen if not records[candidate.name].keys() & OUT]

    tick("the batch and its float64 gradients")
    w = make(spec)
    olds: dict[str, Old] = {}
    for candidate in present():
        with _kept_in(records[candidate.name]):
            olds[candidate.name] = candidate.old(w)
    fits = "does_not_fit" not in records[NAIVE]
    small = w if fits else make(spec._replace(tokens=min(spec.tokens, FEW)))
    sizes = check(w, present(), olds, records, tick, small)

    def timed(candidate: Candidate) -> None:
        if "failed" not in records[candidate.name]:
            with _kept_in(records[candidate.name]):
                candidate.step(w, olds[candidate.name])

    runs = {candidate.name: partial(timed, candidate) for candidate in present()}
    taken = interleaved(runs, rounds, device, lambda name: tick(f"time of {name}"))
    for candidate in present():  # a graph or a kernel chosen anew in the meantime is another computation
        tick(f"gradients of {candidate.name} once more")
        with _kept_in(records[candidate.name]):
            if truth.differ(truth.sizes(candidate.step(w, olds[candidate.name])), sizes[candidate.name]):
                records[candidate.name]["wrong"] = (
                    "after the timed runs its loss or a gradient has another size than before"
                )
    for candidate in present():
        records[candidate.name] |= spread(taken[candidate.name])
        if NAIVE in taken:
            records[candidate.name]["over_naive"] = over(taken[candidate.name], taken[NAIVE])
    on = spec._asdict() | {"head": spec.head._asdict(), "tokens": w.rows}
    on |= counts(spec.tokens, spec.scenario)._asdict() | {"entropy": entropy_quantiles(w.entropy.flatten())}
    return {"on": on, "candidates": list(records.values())}


def costs(spec: Spec, chosen: list[Candidate], tick: Tick = lambda what: None, passes: bool = True) -> list[Record]:
    """Peak memory and matrix passes of every candidate, each in a process of its own. No times, no errors."""
    records = []
    for candidate in chosen:
        record: Record = {"name": candidate.name, "against": candidate.against, "version": version(candidate.package)}
        records.append(record)
        if why := absent(candidate, spec):
            record["absent"] = why
            continue
        tick(f"memory of {candidate.name}")
        with _kept_in(record):
            measured = fresh("suites.bench", "costs_of", name=candidate.name, spec=spec, passes=passes)
            if measured is None:
                raise MemoryError(TOO_LARGE)
            record |= measured
    return records


def absent(candidate: Candidate, spec: Spec) -> str | None:
    return candidate.absent(spec.head, getattr(torch, spec.dtype), torch.device(spec.device))


def _start(spec: Spec) -> torch.device:
    """Kernels of others are launched on the current device, whatever their tensors say."""
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def _kept_in(record: Record) -> Iterator[None]:
    """A peer that fails is reported as failed, and the others are still measured."""
    try:
        yield
    except Exception as error:
        if record["against"] == "ours" or record["name"] == NAIVE:
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        record["failed"] = said[:200] if "Error" in said.split(":")[0] else f"{type(error).__name__}: {said[:200]}"


def check(
    w: Workload, present: list[Candidate], olds: dict[str, Old], records: dict[str, Record], tick: Tick, small: Workload
) -> dict[str, truth.Sizes]:
    """Loss and gradients against float64, and their errors against naive PyTorch's in the same dtype, which it makes on
    `small`: where full logits do not fit, fewer tokens of the same head.

    GRPO is held against GRPO: the two truths are one after the other, because each is the size of the head in float64.
    Returns the sizes of everyone's loss and gradients.
    """
    sizes = {}
    for per_token in (False, True):
        those = [candidate for candidate in present if candidate.per_token == per_token]
        if not those:
            continue
        true, naive = truth.truth(w, per_token), ALL["naive GRPO" if per_token else NAIVE]
        small_truth = true if small is w else truth.truth(small, per_token)
        base = truth.errors(naive.step(small, naive.old(small)), small_truth)
        for candidate in those:
            tick(f"gradients of {candidate.name}")
            record = records[candidate.name]
            with _kept_in(record):
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
    """Peak memory of a candidate's step and, if wanted, its matrix passes, for a process of its own."""
    parsed = spec_from(spec)
    device, candidate = _start(parsed), ALL[name]
    tokens, width, vocab = SMALL
    small, w = make(parsed._replace(tokens=tokens, head=Head(width, vocab, parsed.head.softcap))), make(parsed)
    measured: Record = {}
    try:
        candidate.step(small, candidate.old(small))  # libraries allocate at their first call
        old = candidate.old(w)
        if candidate.compiles:
            candidate.step(w, old)  # a compiler's own memory is none of the step's
        if memory_is_known(device):
            measured["peak_bytes"] = peak_bytes(lambda: candidate.step(w, old), device)
        if passes and not candidate.multiplies_unseen(device):
            measured["passes"] = truth.product_operations(lambda: candidate.step(w, old)) / w.products
    except (MemoryError, RuntimeError) as error:
        if not no_room(error):
            raise
        return {"does_not_fit": "out of memory"}
    return measured


def asked(
    model: str | None, tokens: str | None, against: str | None, scenario: str, dtype: str | None, device: str | None
) -> tuple[list[Candidate], Spec]:
    """The candidates and the workload of a command line; raises ValueError with a line for the user."""
    place = device_of(device)
    on_gpu = place.type == "cuda"
    dtype = ("bfloat16" if on_gpu else "float32") if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if scenario not in SCENARIOS:
        raise ValueError(f"--scenario: expected one of {', '.join(SCENARIOS)}, got {scenario!r}")
    head = head_of(("qwen3-8b" if on_gpu else "qwen2.5-0.5b") if model is None else model)
    count = tokens_of(("16k" if on_gpu else "1k") if tokens is None else tokens)
    return candidates(against), Spec(head, count, scenario, dtype, str(place))


def device_of(name: str | None) -> torch.device:
    """The device of that name; a GPU if there is one where nothing is said."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise ValueError(f"--device: expected a device that torch has here, such as cpu, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {name!r}")
    return device if device.type == "cuda" else torch.device("cpu")


def as_json(results: Record, spec: Spec) -> str:
    """What was found, and where."""
    return dumps({**about(torch.device(spec.device)), **results})


def head_of(text: str) -> Head:
    """A model's head by name, or from "H,V"."""
    if text in MODELS:
        return MODELS[text]
    expected = f"--model: expected one of {', '.join(MODELS)}, or H,V such as 896,151936"
    try:
        width, vocab = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{expected}; got {text!r}") from error
    if not (64 <= width < 2**20 and 1000 <= vocab < 2**31):
        raise ValueError(f"{expected} of at least 64,1000 and less than 2^20,2^31; got {text!r}")
    return Head(width, vocab)


def tokens_of(text: str) -> int:
    """4096, or 4k."""
    try:
        number = int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)
    except ValueError as error:
        raise ValueError(f"--tokens: expected a number such as 4096 or 4k, got {text!r}") from error
    if not FEWEST <= number < 2**31:
        raise ValueError(
            f"--tokens: expected at least {FEWEST}, one for each sequence, and less than 2^31; got {text!r}"
        )
    return number
