"""How the range of GSPO's ratio depends on the length of the sequence, with and without length normalisation.

    python -m gspo_kernels.benchmarks ratio_range          about a minute on two cores

Log-ratios of tokens are independent and normal, not those of a trained policy. With drift, every token also moves in
the direction that its sequence's advantage pushes.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor

from gspo_kernels import policy_loss

from .. import measure
from ..measure import Record

STD, DRIFT = 0.02, 3e-4  # nats per token
LENGTHS, MOST, TOKENS = (100, 1000, 10_000, 100_000), 4000, 6 * 10**7  # at most so many sequences and tokens each
TINY = (100, 400, 1600)
CHUNK = 2**22  # tokens at once


def log_ratios(length: int, sequences: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the library's log-ratios of sequences without drift [S] float64, and their advantages [S]."""
    size, parts, advantages = max(1, CHUNK // length), [], torch.tensor([1.0, -1.0]).repeat(sequences)[:sequences]
    for chunk in advantages.split(size):
        tokens = STD * torch.randn(len(chunk), length, generator=rng)
        parts.append(policy_loss(tokens, chunk, old_log_probs=torch.zeros_like(tokens)).log_ratio.double())
    return torch.cat(parts), advantages


def points(lengths: tuple[int, ...]) -> list[Record]:
    """Return the 1 % and 99 % quantiles of the length-normalised log-ratio, by drift and length."""
    rng, records = torch.Generator().manual_seed(3), []
    for length in lengths:
        u, advantages = log_ratios(length, min(MOST, TOKENS // length), rng)
        for drift in (0.0, DRIFT):
            low, high = (u + drift * advantages).quantile(u.new_tensor([0.01, 0.99])).tolist()
            records.append({"drift": drift, "length": length, "sequences": len(u), "1 %": low, "99 %": high})
            print(records[-1], flush=True)
    return records


def power(records: list[Record], product: bool = False) -> float:
    """Return the slope of log(range of the log-ratio) against log(length), by least squares."""
    lengths = [math.log(r["length"]) for r in records]
    widths = [math.log((r["99 %"] - r["1 %"]) * (r["length"] if product else 1)) for r in records]
    return statistics.linear_regression(lengths, widths).slope


def verdict(records: list[Record]) -> str:
    """Say whether the paper's claim of one numerical range for all lengths holds for these points."""
    free, drifting = ([r for r in records if (r["drift"] > 0) == drifts] for drifts in (False, True))
    product, normalised, with_drift = power(free, product=True), power(free), power(drifting)
    text = (
        f"the range of the log-ratio scales as length^{normalised:.2f} with normalisation (with drift "
        f"length^{with_drift:.2f}) and as length^{product:.2f} without"
    )
    if max(abs(normalised), abs(with_drift)) < 0.1 <= product:
        return f"holds: {text}"
    if normalised >= product:
        return f"does not hold: {text}"
    return f"does not hold as stated, because one window does not fit all lengths: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks ratio_range", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="a trial of seconds: short sequences")
    parser.add_argument("--output", type=Path, help=measure.OUTPUT)
    options = parser.parse_args()
    device = torch.device("cpu")
    output = measure.destination("ratio_range", device, options.output, options.tiny)
    records = points(TINY if options.tiny else LENGTHS)
    print(verdict(records))
    print(f"wrote {measure.save('ratio_range', device, {'std': STD, 'points': records}, output)}")
