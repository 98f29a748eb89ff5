"""Batches of log-probs for our loss and for other trainers' losses, and the comparison of both losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers.device import policy_loss
from tolerance import PARITY_GRADIENT_RELATIVE, check_loss
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels import objective as objectives
from gspo_kernels.objective import DIVERGENCES

# The presets, with changes for these batches, in which no ratio reaches the bound of 5 of `cispo`.
PRESETS: dict[str, dict[str, Any]] = {name: {} for name in objectives._PRESETS}
PRESETS |= {"dr_grpo": {"length_norm": 32}, "cispo": {"clip_high": 0.5}}


@dataclass(frozen=True)
class Rollout:
    """A batch in float64, [B, T] unless noted. It has masked holes, a single-token sequence and an advantage of 0."""

    log_probs: Tensor
    old: Tensor
    ref: Tensor
    mask: Tensor  # bool
    advantages: Tensor  # [B]
    weights: Tensor | None = None

    def double_mask(self) -> Tensor:
        return self.mask.double()


def rollout(objective: Objective, seed: int = 0, weights: bool = False) -> Rollout:
    """Make a batch with ratios below, inside and above the objective's window for both signs of the advantage."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 1, 12, 7, 5, 11, 8, 6, 13, 4, 10, 3])
    shape = (len(lengths), 16)
    mask = torch.arange(shape[1])[None, :] < lengths[:, None]
    mask &= torch.rand(shape, generator=rng) > 0.2
    mask[:, 0] = True
    randn = lambda: torch.randn(shape, generator=rng, dtype=torch.float64)  # noqa: E731
    log_probs = -randn().abs() - 4  # so far below 0 that old and reference log-probs are below 0, too
    if objective.surrogate in DIVERGENCES:  # probabilities from 0.05 to 0.95, old and new
        log_probs, old = (0.05 + 0.9 * torch.rand(2, *shape, generator=rng, dtype=torch.float64)).log()
        r = log_probs - old
    elif objective.ratio == "sequence-product":
        r = _log_ratios_of_products(mask, 0.2 * randn())
        log_probs += r.clamp(max=0)
    elif objective.ratio == "token" or objective.surrogate == "gmpo":
        r = randn() * max(objective.clip_low % 1, objective.clip_high % 1, 0.2) * 1.5
    else:
        side = torch.tensor([-2.0, -2.0, 0.3, -0.3, 2.0, 2.0]).repeat(2)[:, None]
        noise = torch.where(mask, 0.05 * randn(), 0)
        noise -= noise.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        r = noise + side * objective.clip_high
    advantages = torch.randn(len(lengths), generator=rng, dtype=torch.float64).abs() + 0.1
    advantages *= torch.tensor([1.0, -1.0]).repeat(6)
    advantages[-1] = 0
    token_weights = torch.rand(shape, generator=rng, dtype=torch.float64) + 0.5 if weights else None
    batch = Rollout(log_probs, log_probs - r, (log_probs + 0.3 * randn()).clamp(max=0), mask, advantages, token_weights)
    if objective.surrogate not in ("sapo", "reinforce"):
        out, _ = ours(batch, objective, "torch")
        metrics = {name: out.metrics[f"token_clip_fraction{name}"] for name in ("", "_low", "_high")}
        assert 0 < metrics[""] < 1 and metrics["_high"] > 0, metrics
        assert metrics["_low"] > 0 or objective.clip_low == 1 or objective.surrogate == "topr"
    return batch


def _log_ratios_of_products(mask: Tensor, r: Tensor) -> Tensor:
    """Move sequences 3 and 4 beyond vespo's bounds on sequences, and a token of 2 and 5 beyond its bounds on tokens."""
    for i, total in {2: -20.5, 3: 30.0, 4: -25.0, 5: 20.5}.items():
        r[i] += total / mask[i].sum()
    r[2, 0] = 25.0  # counts as 20
    r[5, 0] = -25.0
    return r


def ours(batch: Rollout, objective: Objective, backend: str, **options: Any) -> tuple[Any, Tensor]:
    """Return our output and d(loss) / d(log_probs). Log-probs of masked tokens are NaN."""
    log_probs = batch.log_probs.masked_fill(~batch.mask, torch.nan).requires_grad_()
    out = policy_loss(
        log_probs,
        batch.advantages,
        mask=batch.mask,
        old_log_probs=batch.old,
        objective=objective,
        backend=backend,
        ref_log_probs=batch.ref if objective.kl_coef > 0 else None,
        token_weights=batch.weights,
        **options,
    )
    out.loss.backward()
    assert log_probs.grad is not None and not log_probs.grad[~batch.mask].any()
    return out, log_probs.grad


def assert_agree(batch: Rollout, computed: tuple[Any, Tensor], loss: Tensor, gradient: Tensor) -> None:
    """Assert that our (output, gradient) equals the loss and gradient of another trainer."""
    out, our_gradient = computed
    check_loss(out.loss, loss, batch.advantages.abs().mean().item())
    assert gradient.norm() > 0
    difference = (our_gradient.double() - gradient.double())[batch.mask].norm() / gradient[batch.mask].norm()
    assert difference <= PARITY_GRADIENT_RELATIVE, f"gradients differ by {difference:.2e} of their norm"
