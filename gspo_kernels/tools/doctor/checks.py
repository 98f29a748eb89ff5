"""The checks of `gspo doctor`: compare the fused loss on a backend and device with the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends.self_check.samples import ADVANTAGES, LENGTHS, make_sample
from ...fused_loss import gspo_fused_loss
from ...objective import Objective
from ...reference import gspo_reference_loss
from ...tolerance import LARGEST_ERROR, LOSS_PER_ADVANTAGE

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Check:
    """Result of checking the fused loss, forward and backward, for a backend, a device and a dtype of the inputs."""

    device: str
    backend: str
    dtype: str
    verdict: str  # "ok", "wrong" or "crashed"
    ratios: dict[str, float | None] | None = None  # for each output, error / allowed error; None if not finite
    wrong_decisions: int | None = None  # number of sequences with a clip decision that differs from float64
    message: str = ""

    @property
    def place(self) -> str:
        return f"{self.backend} on {self.device} in {self.dtype}"


class Batch(NamedTuple):
    """Inputs of the fused loss: S packed sequences, N tokens."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    target_ids: Tensor  # [N] int64, -100 where masked
    advantages: Tensor  # [S] fp32
    old_log_probs: Tensor  # [N] fp32
    cu_seqlens: Tensor  # [S + 1] int64

    def in_dtype(self, dtype: torch.dtype) -> Batch:
        """Convert all floating-point tensors."""
        return Batch(*(x.to(dtype) if x.is_floating_point() else x for x in self))


class Outputs(NamedTuple):
    """The compared outputs. The fused loss returns fp32 log-probs and loss for all input dtypes of the checks."""

    log_probs: Tensor  # [N]
    loss: Tensor  # []
    d_hidden: Tensor  # [N, H]
    d_weight: Tensor  # [V, H]


def make_batch(dtype: torch.dtype) -> Batch:
    """The batch of the self-check whose head uses the same kernels as most models, in `dtype`."""
    sample = make_sample("plain", dtype)
    head, policy = sample.head, sample.policy
    assert policy.old_log_probs is not None
    advantages = torch.tensor(ADVANTAGES)
    return Batch(head.hidden, head.weight, head.target_ids, advantages, policy.old_log_probs, policy.offsets)


def outputs(loss: Callable[..., Any], batch: Batch, **options: Any) -> Outputs:
    """Run `loss` forward and backward. Return the outputs on the CPU."""
    hidden, weight = batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_()
    packing = {"cu_seqlens": batch.cu_seqlens, "old_log_probs": batch.old_log_probs}
    out = loss(hidden, weight, batch.target_ids, batch.advantages, **packing, objective=Objective(), **options)
    gradients = torch.autograd.grad(out.loss, (hidden, weight))
    return Outputs(*(x.detach().cpu() for x in (out.log_probs, out.loss, *gradients)))


def decisions(d_hidden: Tensor) -> Tensor:
    """Mark the sequences that have a gradient, [S] bool. The gradient of a clipped sequence is exactly 0."""
    return torch.stack([gradient.any() for gradient in d_hidden.split(LENGTHS)])


def error_ratio(ours: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Divide our largest error by the largest error that the self-check allows."""
    allowed = LARGEST_ERROR[dtype] * torch.finfo(dtype).eps * truth.abs().max()
    return ((ours.double() - truth).abs().max() / allowed).item()


def check(device: torch.device, backend: str, dtype: str) -> Check:
    """Compare the fused loss with the reference loss of the same inputs, in float64 on the CPU."""
    try:
        batch = make_batch(DTYPES[dtype])
        ours = outputs(gspo_fused_loss, Batch(*(x.to(device) for x in batch)), backend=backend)
        truth = outputs(gspo_reference_loss, batch.in_dtype(torch.float64))
        size = max(batch.advantages.abs().mean().item(), abs(truth.loss.item()))
        ratios = {
            "log_probs": error_ratio(ours.log_probs, truth.log_probs, torch.float32),
            "loss": abs(ours.loss.item() - truth.loss.item()) / (LOSS_PER_ADVANTAGE * size),
            "d_hidden": error_ratio(ours.d_hidden, truth.d_hidden, DTYPES[dtype]),
            "d_weight": error_ratio(ours.d_weight, truth.d_weight, DTYPES[dtype]),
        }
        wrong = int((decisions(ours.d_hidden) != decisions(truth.d_hidden)).sum())
    except Exception as error:
        return Check(str(device), backend, dtype, "crashed", message=one_line(error))
    finite = {name: x if math.isfinite(x) else None for name, x in ratios.items()}
    infinite = ", ".join(name for name, x in finite.items() if x is None)
    verdict = "wrong" if wrong or infinite or max(ratios.values()) > 1 else "ok"
    return Check(str(device), backend, dtype, verdict, finite, wrong, f"not finite: {infinite}" if infinite else "")


def one_line(error: Exception) -> str:
    """Format an exception on one line, cut at 400 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 400 else text[:400] + ' ...'}"
