"""Who is measured. Each computes the same loss and the same two gradients of the same batch.

What a trainer does with log-probs is a few operations in PyTorch, the same for everyone who only makes log-probs; ours
and Liger's GRPO loss are whole losses. How a peer is called stands in `peers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss, linear_log_probs

from . import peers
from .measure import version
from .workloads import CLIP_HIGH, CLIP_LOW, KL_COEF, Head, Old, Workload

LogProbs = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]  # hidden [N, H], weight [V, H], ids [N], soft-cap
GRPO_CLIP = 0.2


class Candidate(NamedTuple):
    name: str
    against: str  # its name on the command line
    log_probs: LogProbs
    loss: Callable[[Workload, Old, Tensor, Tensor], Tensor]  # of hidden [S, L, H] and weight, to a scalar
    package: str = "torch"  # what must be installed
    needs_cuda: bool = False
    takes_softcap: bool = True
    takes_fp32: bool = True
    widths: int = 1  # H must be a multiple of it
    in_triton: bool = False  # multiplies in kernels of its own, of which a profiler of PyTorch sees nothing
    compiles: bool = False  # at its first call with new shapes
    per_token: bool = False  # GRPO's ratio: another loss, with a truth of its own
    budget: float = 0.0

    def absent(self, head: Head, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why it is not measured; None if it is."""
        if version(self.package) is None:
            return f"{self.package} is not installed"
        if self.against == "torch" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            return "needs torch 2.13"
        if self.needs_cuda and device.type != "cuda":
            return "its kernels need a GPU"
        if head.softcap is not None and not self.takes_softcap:
            return "knows no soft-cap of logits"
        if dtype == torch.float32 and not self.takes_fp32:
            return "takes bf16 and fp16 only"
        if head.width % self.widths:
            return f"takes widths that {self.widths} divides"
        return None

    def multiplies_unseen(self, device: torch.device) -> bool:
        return self.in_triton or (self.against == "ours" and device.type == "cuda")

    def old(self, w: Workload) -> Old:
        """Old and reference log-probs from its own forward, as a trainer takes them."""
        with torch.no_grad():
            log_probs = self.log_probs(w.hidden.flatten(0, 1), w.weight, w.target_ids.flatten(), w.softcap)
        log_probs = log_probs.float().view_as(w.target_ids)
        return Old(
            None if w.log_ratio is None else log_probs - w.log_ratio[:, None],
            None if w.kl_drift is None else log_probs + w.kl_drift,
        )

    def step(self, w: Workload, old: Old) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, d_hidden [S, L, H], d_weight [V, H]."""
        hidden, weight = w.hidden.detach().requires_grad_(), w.weight.detach().requires_grad_()
        loss = self.loss(w, old, hidden, weight)
        d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
        return loss.detach(), d_hidden, d_weight


def loss_of(log_probs: Tensor, w: Workload, old: Old, per_token: bool = False) -> Tensor:
    """The loss of log-probs [S, L] as trainers write it: the paper's GSPO, or GRPO with its ratio per token."""
    before = log_probs.detach() if old.log_probs is None else old.log_probs.to(log_probs.dtype)
    log_ratio = log_probs - before
    low, high = (GRPO_CLIP, GRPO_CLIP) if per_token else (CLIP_LOW, CLIP_HIGH)
    ratio = (log_ratio if per_token else log_ratio.mean(1, keepdim=True)).exp()
    advantages = w.advantages.to(ratio.dtype)[:, None]
    policy = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    loss = -policy.mean(1).mean()
    if old.ref_log_probs is not None:
        apart = old.ref_log_probs.to(log_probs.dtype) - log_probs
        loss = loss + KL_COEF * (apart.exp() - apart - 1).mean(1).mean()
    return loss


def full_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None, accumulator: torch.dtype = torch.float32
) -> Tensor:
    """From full logits: in the model's dtype, as a head makes them, with an fp32 softmax."""
    logits = (hidden @ weight.t()).to(accumulator)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _on(log_probs: LogProbs, per_token: bool = False) -> Callable[[Workload, Old, Tensor, Tensor], Tensor]:
    """The loss of what makes log-probs only."""

    def loss(w: Workload, old: Old, hidden: Tensor, weight: Tensor) -> Tensor:
        token_log_probs = log_probs(hidden.flatten(0, 1), weight, w.target_ids.flatten(), w.softcap)
        return loss_of(token_log_probs.float().view_as(w.target_ids), w, old, per_token)

    return loss


def _our_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    return linear_log_probs(hidden[None], weight, ids[None], logit_softcap=softcap).log_probs[0]


def _ours(budget: float) -> Callable[[Workload, Old, Tensor, Tensor], Tensor]:
    def loss(w: Workload, old: Old, hidden: Tensor, weight: Tensor) -> Tensor:
        return gspo_fused_loss(
            hidden,
            weight,
            w.target_ids,
            w.advantages,
            old_log_probs=old.log_probs,
            ref_log_probs=old.ref_log_probs,
            logit_softcap=w.softcap,
            objective=w.objective,
            gradient_budget=budget,
        ).loss

    return loss


def ours_at(budget: float, name: str) -> Candidate:
    return Candidate(name, "ours", _our_log_probs, _ours(budget), "gspo-kernels", budget=budget)


@cache
def _compiler() -> Callable[[Workload, Old, Tensor, Tensor], Tensor]:
    return torch.compile(_on(full_log_probs))


def _compiled(w: Workload, old: Old, hidden: Tensor, weight: Tensor) -> Tensor:
    return _compiler()(w, old, hidden, weight)


ALL = {
    candidate.name: candidate
    for candidate in (
        Candidate("naive GSPO", "naive", full_log_probs, _on(full_log_probs)),
        Candidate("naive GRPO", "naive", full_log_probs, _on(full_log_probs, per_token=True), per_token=True),
        Candidate("naive GSPO, compiled", "compile", full_log_probs, _compiled, compiles=True),
        Candidate("TRL fused head", "trl", peers.trl_log_probs, _on(peers.trl_log_probs), "trl"),
        Candidate(
            "Liger GRPO loss",
            "liger",
            peers.liger_log_probs,
            peers.liger_loss,
            "liger-kernel",
            takes_softcap=False,
            compiles=True,
        ),
        Candidate(
            "Liger fused CE",
            "liger",
            peers.liger_cross_entropy,
            _on(peers.liger_cross_entropy),
            "liger-kernel",
            needs_cuda=True,
        ),
        Candidate(
            "cut-cross-entropy",
            "cce",
            peers.cut_log_probs,
            _on(peers.cut_log_probs),
            "cut-cross-entropy",
            needs_cuda=True,
            takes_fp32=False,
            in_triton=True,
        ),
        Candidate(
            "cut-cross-entropy, no filter",
            "cce",
            peers.uncut_log_probs,
            _on(peers.uncut_log_probs),
            "cut-cross-entropy",
            needs_cuda=True,
            takes_fp32=False,
            in_triton=True,
        ),
        Candidate(
            "verl torch head",
            "verl",
            peers.verl_torch_log_probs,
            _on(peers.verl_torch_log_probs),
            "verl",
            takes_softcap=False,
        ),
        Candidate(
            "verl Triton head",
            "verl",
            peers.verl_triton_log_probs,
            _on(peers.verl_triton_log_probs),
            "verl",
            needs_cuda=True,
            takes_softcap=False,
            widths=128,
            in_triton=True,
        ),
        Candidate(
            "torch linear_cross_entropy",
            "torch",
            peers.torch_log_probs,
            _on(peers.torch_log_probs),
            takes_softcap=False,
        ),
        ours_at(0.0, "ours"),
        ours_at(1e-3, "ours, budget 1e-3"),
    )
}
AGAINST = tuple(dict.fromkeys(candidate.against for candidate in ALL.values() if candidate.against != "ours"))
