"""The implementations that are measured. All compute the same loss and gradients of the same batch.

Our loss and Liger's GRPO loss take hidden states. The other candidates only compute log-probs; `loss_of` then computes
the loss from them, with the PyTorch operations of a trainer. `peers.py` calls the other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss, linear_log_probs

from . import peers
from .measure import version
from .workloads import CLIP_HIGH, CLIP_LOW, Head, Workload

LogProbs = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]  # hidden [N, H], weight [V, H], ids [N], soft-cap
# Old log-probs [S, L], hidden [S, L, H] and weight [V, H] -> scalar.
Loss = Callable[[Workload, Tensor, Tensor, Tensor], Tensor]


class Candidate(NamedTuple):
    name: str
    against: str  # the value of `gspo bench --against` that selects this candidate; several can share it
    log_probs: LogProbs
    loss: Loss
    package: str = "torch"  # the package that must be installed
    needs_cuda: bool = False
    takes_softcap: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)  # that it takes
    width_multiple: int = 1  # H must be divisible by this
    in_triton: bool = False  # Triton or CuTe kernels compute the products, and PyTorch's profiler does not see them
    compiles: bool = False  # compiles at the first call with new shapes
    budget: float = 0.0

    def absent(self, head: Head, dtype: torch.dtype, device: torch.device) -> str | None:
        """The reason why this candidate cannot be measured, or None if it can."""
        reasons = {
            f"{self.package} is not installed": version(self.package) is None,
            "needs torch 2.13": self.against == "torch" and not hasattr(torch.nn, "LinearCrossEntropyOptions"),
            "its kernels need a GPU": self.needs_cuda and device.type != "cuda",
            "does not support a soft-cap": head.softcap is not None and not self.takes_softcap,
            f"takes {' and '.join(str(d).removeprefix('torch.') for d in self.dtypes)} only": dtype not in self.dtypes,
            f"takes only H divisible by {self.width_multiple}": head.width % self.width_multiple != 0,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def old(self, w: Workload) -> Tensor:
        """Derive old log-probs [S, L] from this candidate's own: minus `w.log_ratio`."""
        with torch.no_grad():
            log_probs = self.log_probs(w.hidden.flatten(0, 1), w.weight, w.target_ids.flatten(), w.softcap)
        return log_probs.float().view_as(w.target_ids) - w.log_ratio[:, None]

    def step(self, w: Workload, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run forward and backward: loss, d_hidden [S, L, H] and d_weight [V, H]."""
        hidden, weight = w.hidden.detach().requires_grad_(), w.weight.detach().requires_grad_()
        loss = self.loss(w, old, hidden, weight)
        d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
        return loss.detach(), d_hidden, d_weight


def loss_of(log_probs: Tensor, w: Workload, old: Tensor) -> Tensor:
    """Compute GSPO's loss from log-probs [S, L] in plain PyTorch, as trainers do."""
    ratio = (log_probs - old.to(log_probs.dtype)).mean(1).exp()
    advantages = w.advantages.to(ratio.dtype)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages).mean()


def full_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None, accumulator: torch.dtype = torch.float32
) -> Tensor:
    """Compute log-probs [N] from full logits. Logits have the inputs' dtype, and are cast for the softmax."""
    logits = (hidden @ weight.t()).to(accumulator)  # [N, V]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _loss_from(log_probs: LogProbs) -> Loss:
    """Make the loss of a candidate that only computes log-probs."""

    def loss(w: Workload, old: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        token_log_probs = log_probs(hidden.flatten(0, 1), weight, w.target_ids.flatten(), w.softcap)
        return loss_of(token_log_probs.float().view_as(w.target_ids), w, old)

    return loss


def _our_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    return linear_log_probs(hidden[None], weight, ids[None], logit_softcap=softcap).log_probs[0]


def _our_loss(w: Workload, old: Tensor, hidden: Tensor, weight: Tensor, budget: float, cache_mib: int | None) -> Tensor:
    return gspo_fused_loss(
        hidden, weight, w.target_ids, w.advantages, old_log_probs=old, logit_softcap=w.softcap,
        gradient_budget=budget, cache_mib=cache_mib,
    ).loss  # fmt: skip  # related arguments share a line


def ours_at(budget: float, name: str, cache_mib: int | None = 0) -> Candidate:
    """The candidate that runs our fused loss with this budget and cache. With None, the cache has its default size."""
    loss = partial(_our_loss, budget=budget, cache_mib=cache_mib)
    return Candidate(name, "ours", _our_log_probs, loss, "gspo-kernels", budget=budget)


@cache
def _compiled_loss() -> Loss:
    return torch.compile(_loss_from(full_log_probs))


def _peer(name: str, against: str, log_probs: LogProbs, package: str = "torch", **limits: Any) -> Candidate:
    return Candidate(name, against, log_probs, _loss_from(log_probs), package, **limits)


LIGER, CCE = "liger-kernel", "cut-cross-entropy"
CCE_LIMITS: dict[str, Any] = dict(needs_cuda=True, dtypes=(torch.bfloat16, torch.float16), in_triton=True)
CUTE: dict[str, Any] = dict(needs_cuda=True, takes_softcap=False, dtypes=(torch.bfloat16,), in_triton=True)
VERL_TRITON: dict[str, Any] = dict(needs_cuda=True, takes_softcap=False, width_multiple=128, in_triton=True)
_CANDIDATES = (
    _peer("naive GSPO", "naive", full_log_probs),
    Candidate("naive GSPO, compiled", "compile", full_log_probs, lambda *args: _compiled_loss()(*args), compiles=True),
    _peer("TRL fused head", "trl", peers.trl_log_probs, "trl"),
    _peer("TRL cast_lm_head_to_fp32", "trl-fp32", peers.trl_fp32_log_probs, "trl"),
    Candidate(
        "Liger GRPO loss", "liger", peers.liger_log_probs, peers.liger_loss, LIGER, takes_softcap=False, compiles=True
    ),
    _peer("Liger fused CE", "liger", peers.liger_cross_entropy, LIGER, needs_cuda=True),
    _peer("Liger scaled CE", "liger", peers.liger_scaled_cross_entropy, "nvidia-cutlass-dsl", **CUTE),
    _peer("cut-cross-entropy", "cce", peers.cut_log_probs, CCE, **CCE_LIMITS),
    _peer("cut-cross-entropy, no filter", "cce", partial(peers.cut_log_probs, filter_eps=None), CCE, **CCE_LIMITS),
    _peer("verl torch head", "verl", peers.verl_torch_log_probs, "verl", takes_softcap=False),
    _peer("verl Triton head", "verl", peers.verl_triton_log_probs, "verl", **VERL_TRITON),
    _peer("torch linear_cross_entropy", "torch", peers.torch_log_probs, takes_softcap=False),
    ours_at(0.0, "ours"),
    ours_at(1e-3, "ours, budget 1e-3"),
)
ALL = {candidate.name: candidate for candidate in _CANDIDATES}
AGAINST = tuple(dict.fromkeys(candidate.against for candidate in _CANDIDATES if candidate.against != "ours"))
