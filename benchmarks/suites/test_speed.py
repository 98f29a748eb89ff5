"""Time the public functions with pytest-benchmark: `python -m pytest benchmarks --benchmark-only`.

The groups named "overhead" show the cost of a call: their arithmetic takes only microseconds. The last group has the
vocabulary of a real model, but few tokens. Our loss computes blocks of 128 rows, so 64 tokens cost as much as 128.
Every call is a forward and a backward. If a gradient differs from plain PyTorch's, the test fails without timing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.benchmarks.candidates import full_log_probs, loss_of
from gspo_kernels.benchmarks.workloads import Head, Old, Spec, Workload, make

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, REAL = "32 tokens, H = 64, V = 1,000", "64 tokens, H = 896, V = 152,000"


@cache
def batch(real: bool) -> tuple[Workload, Old, Tensor]:
    """Return a batch whose inputs require gradients, its old log-probs and its current log-probs [S, L]."""
    head, tokens = (Head(896, 152_000), 64) if real else (Head(64, 1000), 32)
    w = make(Spec(head, tokens, "dense", device=DEVICE))
    log_probs = plain_log_probs(w).detach()
    w.hidden.requires_grad_()
    w.weight.requires_grad_()
    return w, Old(log_probs - 1e-4, None), log_probs.requires_grad_()


def plain_log_probs(w: Workload) -> Tensor:
    return full_log_probs(w.hidden.flatten(0, 1), w.weight, w.target_ids.flatten(), None).view_as(w.target_ids)


def fused(w: Workload, old: Old, _: Tensor) -> Tensor:
    return gspo_fused_loss(w.hidden, w.weight, w.target_ids, w.advantages, old_log_probs=old.log_probs).loss


def from_log_probs(log_probs: Tensor, w: Workload, old: Old) -> Tensor:
    return policy_loss(log_probs, w.advantages, mask=torch.ones_like(w.target_ids), old_log_probs=old.log_probs).loss


Function = Callable[[Workload, Old, Tensor], Tensor]
# The gradients of all functions of a group must equal those of the first, except for GRPO, which is another loss.
GROUPS: dict[str, dict[str, Function]] = {
    f"overhead, hidden states to loss ({SMALL})": {
        "plain PyTorch": lambda w, old, _: loss_of(plain_log_probs(w), w, old),
        "gspo_fused_loss": fused,
        "linear_log_probs, policy_loss": lambda w, old, _: from_log_probs(
            linear_log_probs(w.hidden, w.weight, w.target_ids).log_probs, w, old
        ),
    },
    f"overhead, log-probs to loss ({SMALL})": {
        "plain PyTorch": lambda w, old, log_probs: loss_of(log_probs, w, old),
        "policy_loss": lambda w, old, log_probs: from_log_probs(log_probs, w, old),
    },
    f"real vocabulary, hidden states to loss ({REAL})": {
        "naive GSPO": lambda w, old, _: loss_of(plain_log_probs(w), w, old),
        "naive GRPO": lambda w, old, _: loss_of(plain_log_probs(w), w, old, per_token=True),
        "gspo_fused_loss": fused,
    },
}
CASES = [(group, name) for group, names in GROUPS.items() for name in names]


@pytest.mark.parametrize(("group", "name"), CASES)
def test_speed(group: str, name: str, benchmark: Any) -> None:
    real = REAL in group
    w, old, log_probs = batch(real)
    inputs = (log_probs,) if "log-probs to loss" in group else (w.hidden, w.weight)

    def gradients(function: Function) -> tuple[Tensor, ...]:
        result = torch.autograd.grad(function(w, old, log_probs), inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return result

    first, *_ = GROUPS[group].values()
    for gradient, plain in zip(gradients(GROUPS[group][name]), gradients(first), strict=True):
        assert name == "naive GRPO" or (gradient - plain).norm() <= 1e-4 * plain.norm(), "a gradient is wrong"
    benchmark.group, benchmark.name = group, name
    benchmark.pedantic(gradients, (GROUPS[group][name],), rounds=5 if real else 200, warmup_rounds=2)
