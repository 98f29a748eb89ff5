"""Measure log-probs over kept sets and of extra ids: time, peak memory and errors of the gradients.

    python -m gspo_kernels.benchmarks kept_sets    on a GPU; with --tiny, a trial on any device

Four ways to compute log-probs over a sampler's kept ids, forward and backward: logits of the full vocabulary with a
mask, a copy of the head's rows of all ids (SkyRL's way), ours, and for comparison our log-probs over the full
vocabulary. Then log-probs of K extra ids per token, from full logits and ours. Sets have log-normal sizes, at most
2,048. Ids are log-uniform, like the tokens of a BPE.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import KeptSets, linear_log_probs

from ..measure import Record, destination, interleaved, no_room, peak_bytes, save, spread
from ..peaked import FIRST_ID
from .options import device_of, parser_of, positive, say

SIZES = (1, 2, 8, 64, 1024)  # mean number of ids in a set
EXTRA = (1, 32, 128)  # extra ids per token
LARGEST = 2048  # ids in a set, as engines allow
CHECKED = 256  # tokens whose gradients are compared with float64
FULL = "masked full logits"
COPY = "copied rows of the head"
OURS = "ours"
VOCABULARY = "ours, full vocabulary"


class Shape(NamedTuple):
    rows: int  # N
    width: int  # H
    vocab: int  # V


FULL_SHAPE = Shape(8192, 4096, 151_936)
TINY = Shape(48, 32, 300)


class Batch(NamedTuple):
    """Inputs of one measurement. `sets` or `extra_ids` is None."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    target_ids: Tensor  # [N]
    sets: KeptSets | None
    extra_ids: Tensor | None  # [N, K]
    upstream: Tensor  # [N] or [N, K]: gradient of the log-probs


def make(shape: Shape, kind: str, count: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Make a batch with sets of `count` ids on average (kind "sets"), or with `count` extra ids (kind "extra")."""
    rng = torch.Generator(device).manual_seed(0)
    rows, width, vocab = shape

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device)

    def ids(*size: int) -> Tensor:
        uniform = torch.rand(size, generator=rng, device=device)
        return (FIRST_ID * ((uniform * math.log(vocab / FIRST_ID + 1)).exp() - 1)).long().clamp(0, vocab - 1)

    hidden, weight, target_ids = randn(rows, width), randn(vocab, width) / width**0.5, ids(rows)
    sets = extra = None
    if kind == "sets":
        spread = randn(rows).mul(1.5).exp()
        sizes = (spread / spread.mean() * (count - 1)).round().long().clamp(0, min(LARGEST, vocab // 4) - 1)
        row = torch.arange(rows, device=device)
        token = torch.repeat_interleave(row, sizes)
        keys = torch.cat([token * vocab + ids(len(token)), row * vocab + target_ids]).unique()
        sets = KeptSets.from_counts(keys % vocab, torch.bincount(keys // vocab, minlength=rows))
    else:
        extra = ids(rows, count)
    upstream = randn(rows, *(() if extra is None else (count,))) / rows
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return Batch(hidden, weight, target_ids, sets, extra, upstream)


def full_logits(batch: Batch) -> Tensor:
    """Compute log-probs from the logits of the full vocabulary, in fp32 after a product in the head's dtype."""
    logits = torch.nn.functional.linear(batch.hidden, batch.weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if batch.sets is None:
        assert batch.extra_ids is not None
        return logits.gather(1, batch.extra_ids) - logits.logsumexp(1, keepdim=True)
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


def ours(batch: Batch, vocabulary: bool = False) -> Tensor:
    options: dict[str, Any] = {} if vocabulary else {"kept_sets": batch.sets, "extra_ids": batch.extra_ids}
    out = linear_log_probs(batch.hidden, batch.weight, batch.target_ids, cache_mib=0, **options)
    return out.log_probs if out.extra_log_probs is None else out.extra_log_probs


WAYS: dict[str, Callable[[Batch], Tensor]] = {
    FULL: full_logits, COPY: copied_rows, OURS: ours, VOCABULARY: partial(ours, vocabulary=True),
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
    )  # fmt: skip  # lines by subject
    wide = few._replace(**{x: getattr(few, x).detach().double().requires_grad_() for x in ("hidden", "weight")})
    pairs = zip(gradients(way, few), gradients(full_logits, wide), strict=True)
    return max(((ours - truth).norm() / truth.norm()).item() for ours, truth in pairs)


def measured(shape: Shape, kind: str, count: int, dtype: str, rounds: int, device: torch.device) -> Record:
    """Measure all ways on one batch."""
    batch = make(shape, kind, count, getattr(torch, dtype), device)
    names = [FULL, *([COPY] if kind == "sets" else []), OURS, VOCABULARY]
    record: Record = {"kind": kind, "count": count}
    if batch.sets is not None:
        sizes = batch.sets.sizes.double()
        record |= {"mean": sizes.mean().item(), "largest": int(sizes.max())}
    rows: dict[str, Record] = {name: {"name": name} for name in names}
    for name in names:
        say(f"{kind} {count}, {dtype}: {name}, error and memory")
        try:
            if name != VOCABULARY:
                rows[name]["error"] = errors(WAYS[name], batch)
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
    seconds = interleaved(runs, rounds, device)
    for name, taken in seconds.items():
        rows[name] |= spread(taken)
    return record | {"ways": list(rows.values())}


def main() -> None:
    parser = parser_of("kept_sets", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each way")
    parser.add_argument("--device", type=device_of, default=str(device_of(None)))
    options = parser.parse_args()
    device = options.device
    if device.type == "cpu" and not options.tiny:
        parser.error("--device: expected a GPU, or --tiny, got 'cpu'")
    shape = TINY if options.tiny else FULL_SHAPE
    dtype = "bfloat16"
    output = destination("kept_sets", device, options.output, options.tiny)
    records = []
    for kind, counts in (("sets", SIZES), ("extra", EXTRA)):
        for count in counts if not options.tiny else counts[:2]:
            records.append(measured(shape, kind, count, dtype, 1 if options.tiny else options.rounds, device))
            results = {"shape": shape._asdict(), "dtype": dtype, "rounds": options.rounds, "batches": records}
            print(save("kept_sets", device, results, output))
