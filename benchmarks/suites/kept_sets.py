"""Measure log-probs over kept sets, of extra ids, and with a teacher: time, peak memory and errors of the gradients.

    python -m gspo_kernels.benchmarks kept_sets    on a GPU; on a CPU only the teacher; a trial with --tiny

Four ways to compute log-probs over a sampler's kept ids, forward and backward: logits of the full vocabulary with a
mask, a copy of the head's rows of all ids (SkyRL's way), ours, and for comparison our log-probs over the full
vocabulary. Then log-probs of K extra ids per token, from full logits and ours. Sets have log-normal sizes, at most
2,048. Ids are log-uniform, like the tokens of a BPE. Last, log-probs minus a forward KL to a teacher at its top K ids,
which a server returns or `linear_top_k` computes, and TRL's divergence over the vocabulary, without log-probs. A CPU's
times are processor seconds, which other processes change less.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import KeptSets, linear_log_probs
from gspo_kernels.distillation import TopK, linear_top_k, topk_divergence

from ..measure import Record, destination, fresh, interleaved, no_room, over, peak_bytes, save, spread
from ..peaked import FIRST_ID
from ..truth import product_operations
from .options import device_of, parser_of, positive, say

SIZES = (1, 2, 8, 64, 1024)  # mean number of ids in a set
EXTRA = (1, 32, 128)  # extra ids per token
TEACHER = (8, 64, 256)  # a teacher's ids per token
LARGEST = 2048  # ids in a set, as engines allow
CHECKED = 256  # tokens whose gradients are compared with float64
FULL = "masked full logits"
COPY = "copied rows of the head"
OURS = "ours"
VOCABULARY = "ours, full vocabulary"
LOCAL = "ours, ids of a local teacher"
CHUNKED = "TRL's ChunkedDivergenceFunction"
NAMES = {
    "sets": (FULL, COPY, OURS, VOCABULARY),
    "extra": (FULL, OURS, VOCABULARY),
    "teacher": (FULL, OURS, LOCAL, VOCABULARY, CHUNKED),
}


class Shape(NamedTuple):
    rows: int  # N
    width: int  # H
    vocab: int  # V


FULL_SHAPE = Shape(8192, 4096, 151_936)
CPU_SHAPE = Shape(256, 896, 32_768)
TINY = Shape(48, 32, 300)


class Batch(NamedTuple):
    """Inputs of one measurement. `sets` or `extra_ids` is None."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    target_ids: Tensor  # [N]
    sets: KeptSets | None
    extra_ids: Tensor | None  # [N, K]
    upstream: Tensor  # [N] or [N, K]: gradient of the log-probs
    teacher_weight: Tensor  # [V, H], the head of a teacher with the same hidden states
    teacher: TopK | None = None  # of that head


def make(shape: Shape, kind: str, count: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Make a batch of a kind in NAMES with `count` ids per token, on average if they are sets."""
    rng = torch.Generator(device).manual_seed(0)
    rows, width, vocab = shape

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device)

    def ids(*size: int) -> Tensor:
        uniform = torch.rand(size, generator=rng, device=device)
        return (FIRST_ID * ((uniform * math.log(vocab / FIRST_ID + 1)).exp() - 1)).long().clamp(0, vocab - 1)

    hidden, weight, target_ids = randn(rows, width), randn(vocab, width) / width**0.5, ids(rows)
    sets = extra = teacher = None
    teacher_weight = weight
    if kind == "sets":
        spread = randn(rows).mul(1.5).exp()
        sizes = (spread / spread.mean() * (count - 1)).round().long().clamp(0, min(LARGEST, vocab // 4) - 1)
        row = torch.arange(rows, device=device)
        token = torch.repeat_interleave(row, sizes)
        keys = torch.cat([token * vocab + ids(len(token)), row * vocab + target_ids]).unique()
        sets = KeptSets.from_counts(keys % vocab, torch.bincount(keys // vocab, minlength=rows))
    elif kind == "extra":
        extra = ids(rows, count)
    else:
        teacher_weight = (weight + 0.3 * randn(vocab, width) / width**0.5).to(dtype)
        teacher = linear_top_k(hidden.to(dtype), teacher_weight, count)
        extra = teacher.ids
    upstream = randn(rows, *((count,) if kind == "extra" else ())) / rows
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return Batch(hidden, weight, target_ids, sets, extra, upstream, teacher_weight, teacher)


def full_logits(batch: Batch) -> Tensor:
    """Compute log-probs from the logits of the full vocabulary, in fp32 after a product in the head's dtype."""
    logits = torch.nn.functional.linear(batch.hidden, batch.weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if batch.sets is None:
        assert batch.extra_ids is not None
        ids = batch.extra_ids if batch.teacher is None else torch.cat([batch.extra_ids, batch.target_ids[:, None]], 1)
        log_probs = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
        return log_probs if batch.teacher is None else with_teacher(log_probs[:, -1], log_probs[:, :-1], batch.teacher)
    dropped = torch.ones_like(logits, dtype=torch.bool)
    dropped[row_of_id(batch.sets), batch.sets.ids] = False
    logits = logits.masked_fill(dropped, -torch.inf)
    return logits.gather(1, batch.target_ids[:, None])[:, 0] - logits.logsumexp(1)


def copied_rows(batch: Batch) -> Tensor:
    """Compute log-probs from a copy [K, H] of the head's rows of all kept ids, multiplied in the head's dtype."""
    assert batch.sets is not None
    token = row_of_id(batch.sets)
    z = (batch.weight.index_select(0, batch.sets.ids) * batch.hidden.index_select(0, token)).sum(1, dtype=torch.float32)
    top = torch.segment_reduce(z.detach(), "max", offsets=batch.sets.offsets)
    total = torch.segment_reduce((z - top[token]).exp(), "sum", offsets=batch.sets.offsets)
    is_target = batch.sets.ids == batch.target_ids[token]
    return z[is_target] - top - total.log()


def row_of_id(sets: KeptSets) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sets.sizes), device=sets.ids.device), sets.sizes)


def with_teacher(log_probs: Tensor, student: Tensor, teacher: TopK) -> Tensor:
    """The log-probs of the tokens minus the KL at the teacher's ids."""
    return log_probs - topk_divergence(student, teacher.log_probs, kind="forward", tail="bucket")


def ours(batch: Batch, vocabulary: bool = False) -> Tensor:
    options: dict[str, Any] = {} if vocabulary else {"kept_sets": batch.sets, "extra_ids": batch.extra_ids}
    out = linear_log_probs(batch.hidden, batch.weight, batch.target_ids, cache_mib=0, **options)
    if out.extra_log_probs is None:
        return out.log_probs
    if batch.teacher is None:
        return out.extra_log_probs
    return with_teacher(out.log_probs, out.extra_log_probs, batch.teacher)


def local_teacher(batch: Batch) -> Tensor:
    assert batch.extra_ids is not None
    teacher = linear_top_k(batch.hidden.detach(), batch.teacher_weight, batch.extra_ids.shape[1])
    return ours(batch._replace(extra_ids=teacher.ids, teacher=teacher))


def chunked_divergence(batch: Batch) -> Tensor:
    """The forward KL over the vocabulary. Log-probs would take another pass."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    teacher = (batch.hidden.detach(), batch.teacher_weight, None)
    divergence, _ = ChunkedDivergenceFunction.apply(batch.hidden, batch.weight, None, *teacher, 0.0)
    return divergence


WAYS: dict[str, Callable[[Batch], Tensor]] = {
    FULL: full_logits, COPY: copied_rows, OURS: ours, VOCABULARY: partial(ours, vocabulary=True),
    LOCAL: local_teacher, CHUNKED: chunked_divergence,
}  # fmt: skip  # by name


def gradients(way: Callable[[Batch], Tensor], batch: Batch) -> tuple[Tensor, ...]:
    log_probs = way(batch)
    upstream = batch.upstream if log_probs.shape == batch.upstream.shape else batch.upstream[:, 0]
    return torch.autograd.grad(log_probs, (batch.hidden, batch.weight), upstream.to(log_probs.dtype))


def errors(way: Callable[[Batch], Tensor], batch: Batch) -> float:
    """Return the larger relative error of the two gradients of the first tokens, compared with float64."""
    n = min(CHECKED, len(batch.hidden))
    sets = None if batch.sets is None else batch.sets.select(torch.arange(n, device=batch.hidden.device))
    few = batch._replace(
        hidden=batch.hidden[:n].detach().requires_grad_(), target_ids=batch.target_ids[:n], sets=sets,
        extra_ids=None if batch.extra_ids is None else batch.extra_ids[:n], upstream=batch.upstream[:n],
        teacher=None if batch.teacher is None else TopK(*(x[:n] for x in batch.teacher)),
    )  # fmt: skip  # lines by subject
    wide = few._replace(**{x: getattr(few, x).detach().double().requires_grad_() for x in ("hidden", "weight")})
    pairs = zip(gradients(way, few), gradients(full_logits, wide), strict=True)
    return max(((ours - truth).norm() / truth.norm()).item() for ours, truth in pairs)


def measured(shape: Shape, kind: str, count: int, dtype: str, rounds: int, device: torch.device) -> Record:
    """Measure all ways on one batch."""
    batch = make(shape, kind, count, getattr(torch, dtype), device)
    names = NAMES[kind]
    record: Record = {"kind": kind, "count": count}
    if batch.sets is not None:
        sizes = batch.sets.sizes.double()
        record |= {"mean": sizes.mean().item(), "largest": int(sizes.max())}
    rows: dict[str, Record] = {name: {"name": name} for name in names}
    for name in names:
        say(f"{kind} {count}, {dtype}: {name}, error and memory")
        try:
            if name not in (VOCABULARY, CHUNKED):
                rows[name]["error"] = errors(WAYS[name], batch)
            if device.type == "cpu":
                on = (shape, kind, count, dtype)
                tiny = shape == TINY  # new processes would take most of a trial's time
                rows[name] |= costs_of(name, on) if tiny else fresh("suites.kept_sets", "costs_of", name=name, on=on)
                continue
            run = partial(gradients, WAYS[name], batch)
            run()
            rows[name]["peak_bytes"] = peak_bytes(run, device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not no_room(error):
                raise
            rows[name]["does_not_fit"] = "out of memory"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    runs = {name: partial(gradients, WAYS[name], batch) for name in names if "does_not_fit" not in rows[name]}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = interleaved(runs, rounds, device, clock=clock)
    for name, taken in seconds.items():
        rows[name] |= spread(taken) | {"over_vocabulary": over(taken, seconds[VOCABULARY])}
    return record | {"ways": list(rows.values())}


def costs_of(name: str, on: Sequence[Any]) -> Record:
    """Measure the peak memory and the passes of a way on a CPU. Call this in a new process."""
    sizes, kind, count, dtype = on
    shape = Shape(*sizes)
    device = torch.device("cpu")
    gradients(WAYS[name], make(TINY, kind, min(count, 8), getattr(torch, dtype), device))  # the first call allocates
    run = partial(gradients, WAYS[name], make(shape, kind, count, getattr(torch, dtype), device))
    operations = product_operations(run)
    return {"peak_bytes": peak_bytes(run, device), "passes": operations / (2.0 * math.prod(shape))}


def main() -> None:
    parser = parser_of("kept_sets", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each way")
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    device = options.device
    on_cpu = device.type == "cpu"
    shape = TINY if options.tiny else CPU_SHAPE if on_cpu else FULL_SHAPE
    dtype = "float32" if on_cpu else "bfloat16"
    output = destination("kept_sets", device, options.output, options.tiny)
    records = []
    kinds = {"sets": SIZES, "extra": EXTRA, "teacher": TEACHER}
    for kind, counts in kinds.items() if options.tiny or not on_cpu else [("teacher", TEACHER)]:
        for count in counts if not options.tiny else counts[1:2]:
            records.append(measured(shape, kind, count, dtype, 1 if options.tiny else options.rounds, device))
            results = {"shape": shape._asdict(), "dtype": dtype, "rounds": options.rounds, "batches": records}
            print(save("kept_sets", device, results, output))
