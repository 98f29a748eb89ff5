"""Are log-probs, gradients and clip decisions those of float64, and the same bits whatever batch a row is in?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from helpers.samples import Sample, make_sample, run_fused, run_oracle
from tolerance import LOG_RATIO_RELATIVE, check_loss, decision_band
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, ops, policy_loss
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.layout import segment_sum
from gspo_kernels.tools.compile_cases import OBJECTIVES

from .heads import (
    DTYPES,
    FLAGS,
    ROWS_AT_ONCE,
    Found,
    by_kernels,
    by_torch,
    compare,
    compare_all,
    differing,
    random_head,
    random_upstream,
    spread,
    together,
)

# Root mean square of a log-prob's error, where the products run on tensor cores.
LOG_PROB_ERROR_ON_TENSOR_CORES = 3e-5
TRAINED = ("bf16", "fp16", "fp32")
Check = Callable[[], Found]


@dataclass(frozen=True)
class Sizes:
    """How large the batches of a run are."""

    vocab: int  # V
    width: int  # H
    wide: int  # H of the larger model
    rows: int  # of a check against float64
    batch: int  # of a check of bits, and of an error's distribution
    ragged: tuple[tuple[int, int, int], ...]  # N, H, V
    lengths: dict[int, int]  # how many sequences of which length decide about clipping
    rounds: int  # of decisions, each with other old log-probs
    many_rows: int  # times vocab: logits past 2^31
    stride: int  # times vocab: a head past 2^31
    tall: tuple[int, int, int]  # N, H, V with N H past 2^31
    memory_rows: int  # where the peak of memory is measured


FULL = Sizes(
    vocab=151_936, width=896, wide=4096, rows=384, batch=8192,
    ragged=((127, 2881, 50_257), (1, 72, 257), (129, 72, 257)),
    lengths={16: 128, 64: 64, 256: 32, 1024: 8, 4096: 4}, rounds=64,
    many_rows=16_384, stride=16_384, tall=(600_000, 4096, 521), memory_rows=32_768,
)  # fmt: skip
TINY = Sizes(
    vocab=300, width=64, wide=72, rows=20, batch=150, ragged=((1, 24, 17), (129, 24, 17)),
    lengths={16: 4, 64: 2}, rounds=2, many_rows=140, stride=200, tall=(300, 16, 19), memory_rows=40,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    device: torch.device
    sizes: Sizes

    def head(self, rows: int, width: int | None = None, dtype: str = "bf16", **options: Any) -> HeadRows:
        """A head of the run's vocabulary."""
        return random_head(rows, width or self.sizes.width, self.sizes.vocab, DTYPES[dtype], self.device, **options)


def heads(setting: Setting) -> Iterator[tuple[str, Callable[..., HeadRows]]]:
    """(name, how to make it on a device) of every head that is held against float64."""
    sizes = setting.sizes
    some = {name: FLAGS[name] for name in ("plain", "everything")}
    work = [
        (sizes.rows, sizes.width, sizes.vocab, TRAINED, FLAGS),
        (sizes.rows, sizes.wide, sizes.vocab, TRAINED, some),
        *((*shape, TRAINED, some) for shape in sizes.ragged),
        (*sizes.ragged[-1], ("fp64",), some),
    ]
    for n, h, v, dtypes, flags in work:
        for dtype in dtypes:
            for flag, options in flags.items():
                yield f"head {n}x{h}x{v} {dtype} {flag}", partial(random_head, n, h, v, DTYPES[dtype], **options)


def checks(setting: Setting) -> Iterator[tuple[str, Check]]:
    """(name, check) of everything here."""
    for name, make in heads(setting):
        yield name, partial(equals_float64, make, setting.device)
    for name, objective in OBJECTIVES.items():
        yield f"loss {name}", partial(loss_equals_float64, setting, objective)
    for dtype in TRAINED:
        yield f"repeatable {dtype}", partial(repeats_bitwise, setting, dtype)
        yield f"batch-invariant {dtype}", partial(is_batch_invariant, setting, dtype)
    for width in (setting.sizes.width, setting.sizes.wide):
        for dtype in TRAINED:
            yield f"log-prob error {dtype} H={width}", partial(log_prob_error, setting, dtype, width)
    for dtype in TRAINED:
        yield f"clip decisions {dtype}", partial(decides_as_float64, setting, dtype)


def equals_float64(make: Callable[..., HeadRows], device: torch.device) -> Found:
    head = make(device=device)
    upstream, dtype = random_upstream(head), head.hidden.dtype
    ours = by_kernels(head, upstream)
    truth, same = by_torch(head, upstream, torch.float64), by_torch(head, upstream, dtype)
    error = spread((ours["log_probs"] - truth["log_probs"])[head.mask])
    bound = Found(error, {"log_prob error": LOG_PROB_ERROR_ON_TENSOR_CORES})
    return together([bound, compare_all(ours, same, truth, dtype)])


def loss_equals_float64(setting: Setting, objective: Objective) -> Found:
    """The fused loss of a small batch in which every clip branch is taken, against the readable oracle."""
    sample = make_sample(3, objective=objective, padded_vocab=11, temperature="per-token", token_weights=True)
    truth, true_gradients = run_oracle(sample)
    _, same_gradients = run_oracle(sample, torch.float32)
    out, gradients = run_fused(_moved(sample, setting.device), "triton", entropy=True)
    wrong = []
    try:
        check_loss(out.loss.cpu(), truth.loss, sample.advantages)
    except AssertionError as broken:
        wrong.append(str(broken))
    counts = sample.options["mask"] if objective.ratio == "token" else ...
    error = (out.log_ratio.cpu() - truth.log_ratio)[counts].abs().max().item()
    allowed = LOG_RATIO_RELATIVE[torch.float32] * max(truth.log_probs.abs().max().item(), 1)
    parts = [Found({"log_ratio max": error}, {"log_ratio max": allowed}, wrong)]
    for name, g in gradients.items():
        ours, same, true = (x.cpu().reshape(-1, x.shape[-1]) for x in (g, same_gradients[name], true_gradients[name]))
        parts.append(compare(f"d_{name}", ours, same, true, torch.float32))
    return together(parts)


def _moved(sample: Sample, device: torch.device) -> Sample:
    def to(x: Any) -> Any:
        return x.detach().to(device) if isinstance(x, Tensor) else x

    options = {name: to(x) for name, x in sample.options.items()}
    leaves = {name: to(x) for name, x in sample.leaves.items()}
    moved = replace(sample, leaves=leaves, target_ids=to(sample.target_ids), advantages=to(sample.advantages))
    return replace(moved, options=options)


def repeats_bitwise(setting: Setting, dtype: str) -> Found:
    head = setting.head(setting.sizes.batch // 4, dtype=dtype, **FLAGS["entropy"])
    upstream = random_upstream(head)
    first, second = by_kernels(head, upstream), by_kernels(head, upstream)
    found = {name: differing(first[name], second[name]) for name in first}
    return Found(found, dict.fromkeys(found, 0))


def is_batch_invariant(setting: Setting, dtype: str) -> Found:
    """A row's log-prob in other company, with other options and from other memory."""
    head = setting.head(setting.sizes.batch, dtype=dtype, masked=False)
    whole, device = _log_probs(head), setting.device
    some = torch.randperm(head.hidden.shape[0], device=device)[:300]
    masked = torch.zeros_like(head.mask)
    masked[some] = True
    shifted = {name: _misaligned(getattr(head, name)) for name in ("hidden", "weight")}
    batch: dict[str, Any] = dict(hidden=head.hidden[None], lm_head=head.weight, target_ids=head.target_ids[None])
    with torch.no_grad():
        unrecorded = _log_probs(head)
    found = {
        "alone": differing(_log_probs(_rows(head, some[:1])), whole[some[:1]]),
        "with 299 others": differing(_log_probs(_rows(head, some)), whole[some]),
        "others masked": differing(_log_probs(head._replace(mask=masked))[some], whole[some]),
        "with entropy": differing(_log_probs(head._replace(entropy=True)), whole),
        "without autograd": differing(unrecorded, whole),
        "in the fused loss": differing(
            gspo_fused_loss(**batch, advantages=torch.ones(1, device=device), backend="triton").log_probs[0], whole
        ),
        "misaligned": differing(_log_probs(head._replace(**shifted)), whole),
        "transposed head": differing(_log_probs(head._replace(weight=head.weight.T.contiguous().T)), whole),
        "every other row": differing(_log_probs(_rows(head, slice(None, None, 2))), whole[::2]),
    }
    return Found(found, dict.fromkeys(found, 0))


def _log_probs(head: HeadRows) -> Tensor:
    hidden = head.hidden.detach().requires_grad_()
    return ops.linear_log_probs(head._replace(hidden=hidden), "triton").log_probs.detach()


def _rows(head: HeadRows, rows: Any) -> HeadRows:
    return head._replace(hidden=head.hidden[rows], target_ids=head.target_ids[rows], mask=head.mask[rows])


def _misaligned(x: Tensor) -> Tensor:
    """The same numbers, each row starting at an odd element."""
    out = x.new_empty(x.shape[0], x.shape[1] + 3)[:, 1:-2]
    return out.copy_(x)


def log_prob_error(setting: Setting, dtype: str, width: int) -> Found:
    """Per-token error at logits up to about 30, beside that of logits rounded to the operands' dtype."""
    hidden, weight, ids, truth, largest = _sampled(setting, setting.sizes.batch // 4, width, dtype)
    ours = linear_log_probs(hidden, weight, ids, backend="triton").log_probs
    full = torch.log_softmax((hidden @ weight.T).float(), 1).gather(1, ids[:, None])[:, 0]
    measured = {"largest logit": largest} | spread(ours - truth) | spread(full - truth, "full-logit log_prob")
    return Found(measured, {"log_prob error": LOG_PROB_ERROR_ON_TENSOR_CORES})


def _sampled(setting: Setting, rows: int, width: int, dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """(hidden, weight, ids sampled from their softmax, true log-probs, largest |logit|)."""
    head = setting.head(rows, width, dtype, masked=False, std=5.0)
    rng, ids, log_probs, largest = torch.Generator(setting.device).manual_seed(2), [], [], 0.0
    weight = head.weight.double()
    for hidden in head.hidden.split(ROWS_AT_ONCE):
        z = hidden.double() @ weight.T
        largest = max(largest, z.abs().max().item())
        uniform = torch.rand(z.shape, generator=rng, dtype=torch.float64, device=setting.device)
        ids.append((z - uniform.log_().neg_().log_()).argmax(1))
        log_probs.append(torch.log_softmax(z, 1).gather(1, ids[-1][:, None])[:, 0])
    return head.hidden, head.weight, torch.cat(ids), torch.cat(log_probs), largest


def decides_as_float64(setting: Setting, dtype: str) -> Found:
    """In GSPO's own window, with ratios about as wide: which sequences have a gradient?"""
    lengths = torch.tensor([n for n, times in setting.sizes.lengths.items() for _ in range(times)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(setting.device)
    band = torch.tensor([decision_band(n) for n in lengths.tolist()], dtype=torch.float64, device=setting.device)
    hidden, weight, ids, truth, _ = _sampled(setting, int(lengths.sum()), setting.sizes.width, dtype)
    lengths, objective = lengths.to(setting.device), Objective()
    bounds = truth.new_tensor([math.log1p(-objective.clip_low), math.log1p(objective.clip_high)])
    leaf = linear_log_probs(hidden, weight, ids, backend="triton").log_probs.requires_grad_()
    rng = torch.Generator(setting.device).manual_seed(3)

    def randn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=rng, dtype=torch.float64, device=setting.device)

    def mean(x: Tensor) -> Tensor:
        return segment_sum(x, offsets) / lengths

    n_clear = n_clipped = n_wrong = 0
    worst = torch.zeros_like(band)
    for turn in range(setting.sizes.rounds):
        noise = 0.03 * randn(truth)
        level = objective.clip_low * randn(band) - mean(noise)
        old = (truth - level.repeat_interleave(lengths) - noise).float()
        u, advantages = mean(truth - old.double()), randn(band)
        options: dict[str, Any] = dict(cu_seqlens=offsets, old_log_probs=old, objective=objective, backend="triton")
        if turn == 0:  # the whole way; later only from the log-probs on
            leaves = hidden.detach().requires_grad_()
            out = gspo_fused_loss(leaves, weight, ids, advantages.float(), **options)
            moved = torch.autograd.grad(out.loss * len(lengths), leaves)[0].any(1)
        else:
            out = policy_loss(leaf, advantages.float(), **options)
            moved = torch.autograd.grad(out.loss, leaf)[0] != 0
        ours = segment_sum(moved.double(), offsets) == 0  # a clipped sequence has exactly no gradient
        clipped = torch.where(advantages > 0, u > bounds[1], u < bounds[0])
        clear = (u[:, None] - bounds).abs().amin(1) > band
        worst = torch.maximum(worst, (out.log_ratio.double() - u).abs())
        n_clear, n_clipped = n_clear + int(clear.sum()), n_clipped + int(clipped.sum())
        n_wrong += int((clear & (ours != clipped)).sum())
    n = setting.sizes.rounds * len(lengths)
    measured = {"decisions": n, "outside the band": n_clear / n, "clipped": n_clipped / n, "disagreements": n_wrong}
    limit: dict[str, float] = {"disagreements": 0}
    for length in setting.sizes.lengths:
        name = f"u off at L={length}"
        measured[name], limit[name] = worst[lengths == length].max().item(), decision_band(length)
    no_test = [] if n_clear > 0.7 * n and 0.02 < n_clipped / n < 0.5 else ["too few decisions are in question"]
    return Found(measured, limit, no_test)
