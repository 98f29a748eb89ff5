"""The metrics of micro-batches, and how metrics of micro-batches, processes and updates combine.

Sums and counts are combined, not means. So the results do not depend on `micro_batch_size` or the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import LossOutput
from gspo_kernels.metrics import COUNTS, combine

MEANS = (
    "loss",
    "router_aux_loss",
    "grad_norm",
    "rows_run",
    "rows_differentiated",
)  # a step has their means over its updates

OF_TEACHER = {"distillation": "tokens", "teacher_mass": "tokens"}  # means over tokens


class Measures(NamedTuple):
    """Measurements of one or several micro-batches."""

    metrics: dict[str, Tensor]  # of the loss
    log_ratios: Tensor  # [answers, 3] fp64: number of tokens, mean log-ratio and variance of log-ratios per answer
    skipped: Tensor = torch.zeros(2, dtype=torch.int64)  # non-empty answers, and tokens, that did not run

    def cpu(self) -> Measures:
        """Copy the tensors to CPU memory."""
        return Measures({name: x.cpu() for name, x in self.metrics.items()}, self.log_ratios.cpu(), self.skipped)


class Update(NamedTuple):
    """The metrics of one update."""

    numbers: dict[str, float]  # by their names in metrics.jsonl
    measures: Measures  # of all processes


def measured(mask: Tensor, old_log_probs: Tensor, out: LossOutput) -> Measures:
    """Measure a micro-batch. `mask` and `old_log_probs` are [b, T]."""
    log_ratios = torch.where(mask, out.log_probs.double() - old_log_probs.double(), 0)
    tokens = mask.sum(1, dtype=torch.float64)
    mean = log_ratios.sum(1) / tokens.clamp(min=1)
    squares = torch.where(mask, (log_ratios - mean[:, None]).square(), 0)
    return Measures(out.metrics, torch.stack([tokens, mean, squares.sum(1) / tokens.clamp(min=1)], 1))


def joined(parts: Sequence[Measures]) -> Measures:
    """Combine the measures of micro-batches, processes or updates."""
    metrics = [part.metrics for part in parts]
    return Measures(
        combine(metrics, divisors={name: x for name, x in OF_TEACHER.items() if name in metrics[0]}),
        torch.cat([part.log_ratios for part in parts]),
        torch.stack([part.skipped for part in parts]).sum(0),
    )


def counting_skipped(metrics: dict[str, Tensor], skipped: Tensor) -> dict[str, Tensor]:
    """Make the clip fractions and zero_coefficient_share count the answers that did not run.

    The advantage of these answers is 0, so none of their tokens is clipped or has a gradient.
    """
    sequences, tokens = skipped.unbind()
    of_skipped = {name: torch.zeros(()) for name in metrics if "clip_fraction" in name}
    of_skipped |= {"zero_coefficient_share": torch.ones(()), "sequences": sequences, "tokens": tokens}
    return metrics | combine([{name: metrics[name] for name in of_skipped}, of_skipped])


def numbers(measures: Measures) -> dict[str, float]:
    """Compute the metrics that are shown, by their names in metrics.jsonl.

    The metrics that `counting_skipped` corrects cover all answers. All others cover the answers that ran.

    token_log_ratio_std, sequence_log_ratio_std: standard deviations of the log-ratios of tokens, and of non-empty
    answers.
    """
    tokens, mean, variance = measures.log_ratios[measures.log_ratios[:, 0] > 0].unbind(1)  # of non-empty answers
    metrics = counting_skipped(measures.metrics, measures.skipped) if measures.skipped.any() else measures.metrics
    shown = {name: x.item() for name, x in metrics.items() if name not in COUNTS}
    # The variance of all tokens is the mean variance within answers plus the variance of the answers' means.
    center = (tokens * mean).sum() / tokens.sum()
    of_tokens = (tokens * (variance + (mean - center).square())).sum() / tokens.sum()
    shown["token_log_ratio_std"] = of_tokens.sqrt().item() if len(tokens) else 0.0
    shown["sequence_log_ratio_std"] = mean.std(correction=0).item() if len(tokens) else 0.0
    return shown


def numbers_of_step(updates: Sequence[Update]) -> dict[str, float]:
    """Compute the metrics of all answers of all updates, and the means over updates of the metrics in MEANS."""
    means: dict[str, Any] = {
        name: fmean(update.numbers[name] for update in updates) for name in MEANS if name in updates[0].numbers
    }
    return {**updates[0].numbers, **numbers(joined([update.measures for update in updates])), **means}
