"""Errors of tokens, and the clip decisions that they turn over: the statistics of `fidelity`, which explains them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gspo_kernels import Objective

from ..measure import Record

SPREAD = 3.4e-4  # of the true log-ratios of sequences
AT_ONCE = 2000  # sequences
MEANS = "std of sequence means times sqrt(L) over std of tokens"
ANEW = "95 %, tokens drawn anew"
Z, T = 1.959964, 2.022691  # 95 % of the normal law, and of Student's with REDRAWS - 1
REDRAWS, PART = 40, 10  # of the tokens, and one in so many sequences for each


def about_errors(errors: Tensor, sequence: Tensor) -> dict[str, float]:
    """Of token errors [N], nats. What has the same number in `sequence` [N] is not taken for independent."""
    sizes, sums = errors.abs(), torch.bincount(sequence, errors - errors.mean())
    return {
        "std": errors.std().item(),
        "bias": errors.mean().item(),
        "standard error of the bias": sums.norm().item() / errors.numel(),
        "99th percentile": sizes.quantile(0.99).item(),
        "largest": sizes.max().item(),
    }


def spread_of_means(errors: Tensor, sequence: Tensor) -> Record:
    """How correlated a sequence's errors are; nothing of sequences of one token. The interval draws them anew."""
    if sequence.unique().numel() == sequence.numel():
        return {}
    centred = errors - errors.mean()
    sums, squares = (torch.bincount(sequence, x) for x in (centred, centred.square()))
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(sums), (1000, len(sums)), generator=rng)
    ends = (sums[drawn].square().sum(1) / squares[drawn].sum(1)).sqrt().quantile(errors.new_tensor([0.025, 0.975]))
    return {MEANS: (sums.norm() / centred.norm()).item(), f"{MEANS}, 95 %": ends.tolist()}


def passes_clip(u: Tensor, positive: Tensor) -> Tensor:
    """Whether a sequence of log-ratio u keeps its gradient, by the sign of its advantage."""
    low, high = Objective().log_window
    return torch.where(positive, u <= high, u >= low)


def interval(hits: int, count: int) -> tuple[float, float]:
    """95 % of a share, by Wilson's score."""
    share, scale = hits / count, 1 + Z * Z / count
    middle = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return (middle - half) / scale if hits else 0.0, (middle + half) / scale


def decisions(
    ratio_errors: dict[str, Tensor],
    lengths: tuple[int, ...],
    sequences: int,
    sequence: Tensor | None = None,
    seed: int = 0,
) -> list[Record]:
    """Wrong ones by implementation and length, whose errors share all draws. `sequence`: as in `Tokens`."""
    rng = torch.Generator().manual_seed(seed)
    names, errors = list(ratio_errors), torch.stack(list(ratio_errors.values()), 1)
    alone = torch.arange(errors.shape[0])
    apart = _redrawn(errors, alone if sequence is None else sequence, lengths, sequences // PART, rng)
    bias = errors.mean(0)
    wrong = torch.zeros(2, len(lengths), len(names), dtype=torch.int64)
    clipped = 0
    for chunk in torch.arange(sequences).split(AT_ONCE):
        u = SPREAD * torch.randn(len(chunk), 1, generator=rng, dtype=torch.float64)
        positive = torch.rand(len(chunk), 1, generator=rng) < 0.5
        right = passes_clip(u, positive)
        clipped += int((~right).sum())
        for at, mean in enumerate(_means(errors - bias, len(chunk), lengths, rng)):
            for kind, more in enumerate((0.0, bias)):
                wrong[kind, at] += (passes_clip(u + mean + more, positive) != right).sum(0)
    return [
        {
            "implementation": name,
            "length": length,
            "sequences": sequences,
            "clipped": clipped / sequences,
            **_share("wrong", int(wrong[0, at, k]), sequences, apart[0, at, k].item()),
            **_share("wrong with the bias", int(wrong[1, at, k]), sequences, apart[1, at, k].item()),
        }
        for k, name in enumerate(names)
        for at, length in enumerate(lengths)
    ]


def _means(errors: Tensor, count: int, lengths: tuple[int, ...], rng: torch.Generator) -> Iterator[Tensor]:
    """Mean errors [count, K] of sequences of each length, drawn from [N, K]; a longer one is a shorter one and more."""
    table, total, before = errors.float(), torch.zeros(count, errors.shape[1], dtype=torch.float64), 0
    for length in lengths:
        drawn = torch.randint(errors.shape[0], (count, length - before), generator=rng)
        total += torch.nn.functional.embedding_bag(drawn, table, mode="sum").double()
        before = length
        yield total / length


def _redrawn(
    errors: Tensor, sequence: Tensor, lengths: tuple[int, ...], sequences: int, rng: torch.Generator
) -> Tensor:
    """Standard deviations [2, lengths, K] of both shares of wrong decisions, when the tokens [N, K] are drawn anew.

    True log-ratios are integrated over and not drawn, so that few sequences do; what their number adds is left in.
    """
    sizes = sequence.unique_consecutive(return_counts=True)[1]
    tables = []
    for _ in range(REDRAWS):
        chunk = torch.randint(len(sizes), (4 * len(sizes),), generator=rng)  # more than are needed: lengths differ
        shift = (sizes.cumsum(0)[chunk] - sizes[chunk].cumsum(0)).repeat_interleave(sizes[chunk])
        tables.append(errors[(shift + torch.arange(len(shift)))[: errors.shape[0]]])
    every = torch.cat(tables, 1)
    bias = every.mean(0)
    share = torch.zeros(2, len(lengths), every.shape[1], dtype=torch.float64)
    for chunk in torch.arange(sequences).split(AT_ONCE):
        for at, mean in enumerate(_means(every - bias, len(chunk), lengths, rng)):
            for kind, more in enumerate((0.0, bias)):
                share[kind, at] += _turned(mean + more).sum(0) / sequences
    return share.unflatten(2, (REDRAWS, -1)).std(2)


def _turned(error: Tensor) -> Tensor:
    """The chance that it turns a decision over, of a true log-ratio as it is set and either sign of the advantage."""
    cdf = torch.special.ndtr
    sides = [cdf((end - error) / SPREAD) - cdf(error.new_tensor(end / SPREAD)) for end in Objective().log_window]
    return 0.5 * (sides[0].abs() + sides[1].abs())


def _share(name: str, hits: int, count: int, apart: float) -> Record:
    """`apart`: standard deviation by what else varies."""
    share, (low, high) = hits / count, interval(hits, count)
    wider = (share - math.hypot(share - low, T * apart), share + math.hypot(high - share, T * apart))
    return {name: share, f"{name}, 95 %": (low, high), f"{name}, {ANEW}": (max(0.0, wider[0]), min(1.0, wider[1]))}
