"""Time a call of the public functions with pytest-benchmark: `python -m pytest tests/benchmarks --benchmark-only`.

Every timed call is a forward and a backward. The inputs are so small that most of our time is the fixed cost of a call,
not arithmetic. `gspo bench` times real sizes. A function with a wrong gradient is not timed. Under pytest-xdist nothing
is timed, but gradients are tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.device import DEVICE
from torch import Tensor

from gspo_kernels import gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.benchmarks.candidates import full_log_probs, loss_of
from gspo_kernels.benchmarks.workloads import Head, Old, Spec, Workload, make

SIZE = "32 tokens, H = 64, V = 1,000"


@cache
def batch() -> tuple[Workload, Old, Tensor]:
    """Return a batch whose inputs require gradients, its old log-probs and its current log-probs [S, L]."""
    w = make(Spec(Head(64, 1000), 32, "dense", device=str(DEVICE)))
    log_probs = plain_log_probs(w).detach()
    w.hidden.requires_grad_()
    w.weight.requires_grad_()
    return w, Old(log_probs - 1e-4, None), log_probs.requires_grad_()


def plain_log_probs(w: Workload) -> Tensor:
    return full_log_probs(w.hidden.flatten(0, 1), w.weight, w.target_ids.flatten(), None).view_as(w.target_ids)


def from_log_probs(log_probs: Tensor, w: Workload, old: Old) -> Tensor:
    return policy_loss(log_probs, w.advantages, mask=torch.ones_like(w.target_ids), old_log_probs=old.log_probs).loss


Function = Callable[[Workload, Old, Tensor], Tensor]
# All functions of a group must have the gradients of its first function.
GROUPS: dict[str, dict[str, Function]] = {
    f"hidden states to loss, {SIZE}": {
        "plain PyTorch": lambda w, old, _: loss_of(plain_log_probs(w), w, old),
        "gspo_fused_loss": lambda w, old, _: (
            gspo_fused_loss(w.hidden, w.weight, w.target_ids, w.advantages, old_log_probs=old.log_probs).loss
        ),
        "linear_log_probs, policy_loss": lambda w, old, _: from_log_probs(
            linear_log_probs(w.hidden, w.weight, w.target_ids).log_probs, w, old
        ),
    },
    f"log-probs to loss, {SIZE}": {
        "plain PyTorch": lambda w, old, log_probs: loss_of(log_probs, w, old),
        "policy_loss": lambda w, old, log_probs: from_log_probs(log_probs, w, old),
    },
}
CASES = [(group, name) for group, names in GROUPS.items() for name in names]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("group", "name"), CASES)
def test_speed(group: str, name: str, benchmark: Any) -> None:
    w, old, log_probs = batch()
    inputs = (log_probs,) if group.startswith("log-probs") else (w.hidden, w.weight)

    def gradients(function: Function) -> tuple[Tensor, ...]:
        result = torch.autograd.grad(function(w, old, log_probs), inputs)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return result

    first, *_ = GROUPS[group].values()
    for gradient, plain in zip(gradients(GROUPS[group][name]), gradients(first), strict=True):
        assert (gradient - plain).norm() <= 1e-4 * plain.norm(), "a gradient is wrong"
    benchmark.group, benchmark.name = group, name
    benchmark.pedantic(gradients, (GROUPS[group][name],), rounds=200, warmup_rounds=2)
