"""Statements of the GSPO paper (arXiv 2507.18071) that are exact identities, for both backends.

`docs/benchmarks.md` lists all claims of the paper and how each was checked. Sections below are sections of the paper.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.device import on_device, policy_loss, run_policy
from helpers.marks import triton_is_slow
from helpers.other_trainers import assert_agree, ours, rollout
from torch import Tensor

from gspo_kernels import Objective

GSPO = Objective.preset("gspo")
GRPO = Objective.preset("grpo", clip_low=0.2, clip_high=0.27)  # the paper's window for GRPO
EXP_ROUNDING = 4 * torch.finfo(torch.float64).eps


@on_device
def test_gspo_token_with_one_advantage_per_sequence_is_gspo(backend: str) -> None:
    """Section 4.3: equal loss and gradients, with masks that have holes."""
    batch = rollout(GSPO)
    token = Objective.preset("gspo-token")
    gspo, gradient = ours(batch, GSPO, backend)
    assert_agree(batch, ours(batch, token, backend), gspo.loss.detach(), gradient)


def weights_of(
    log_ratio: Tensor, advantages: Tensor, objective: Objective, backend: str, old_log_prob: float = -4.0
) -> Tensor:
    """Return the weight in each token's gradient, -weight * advantage / length: [S, L], 0 if clipped."""
    old = torch.full_like(log_ratio, old_log_prob)
    options: dict[str, Any] = {"old_log_probs": old, "objective": objective, "normalizer": 1.0, "backend": backend}
    _, gradient = run_policy(log_ratio + old, advantages, **options)
    return -gradient * log_ratio.shape[1] / advantages[:, None]


def samples(objective: Objective) -> tuple[Tensor, Tensor]:
    """Return log-ratios [64, 64] on both sides of the window, and advantages [64] of both signs."""
    rng = torch.Generator().manual_seed(0)
    log_ratio = 0.2 * torch.randn(64, 64, generator=rng, dtype=torch.float64)
    if objective is GSPO:
        u = 5e-4 * torch.randn(64, 1, generator=rng, dtype=torch.float64)
        log_ratio += u - log_ratio.mean(1, keepdim=True)
    return log_ratio, torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)


@on_device
@pytest.mark.parametrize("objective", [GSPO, GRPO], ids=["gspo", "grpo"])
def test_weights_lie_inside_the_bounds_and_are_zero_beyond(objective: Objective, backend: str) -> None:
    """Section 4.2: nonzero weights are in (0, 1 + clip_high] if A > 0, and in [1 - clip_low, inf) if A < 0."""
    log_ratio, advantages = samples(objective)
    weights = weights_of(log_ratio, advantages, objective, backend)
    positive, negative = weights[advantages > 0], weights[advantages < 0]
    for half in (positive, negative):
        assert 0.05 < (half == 0).double().mean() < 0.95
    assert (positive >= 0).all() and positive.max() <= 1 + objective.clip_high + EXP_ROUNDING
    assert negative[negative != 0].min() >= 1 - objective.clip_low - EXP_ROUNDING
    for sign, bound in zip((-1.0, 1.0), objective.log_window, strict=True):
        on = torch.tensor(bound, dtype=torch.float64)
        beyond = torch.nextafter(on, torch.tensor(math.copysign(math.inf, bound), dtype=torch.float64))
        at_bound = torch.stack([on, beyond])[:, None]
        signs = torch.full((2,), sign).double()
        kept = weights_of(at_bound, signs, objective, backend, old_log_prob=0.0) != 0  # 0, so that nothing is rounded
        assert kept.tolist() == [[True], [False]]


@on_device
def test_gspo_weights_all_tokens_of_a_sequence_alike_and_grpo_does_not(backend: str) -> None:
    """Section 4.2: GSPO has one weight per sequence, GRPO one weight per token."""
    for objective, varies in ((GSPO, False), (GRPO, True)):
        weights = weights_of(*samples(objective), objective, backend)
        assert ((weights.amax(1) - weights.amin(1) > 0) == varies).all()


@on_device
@triton_is_slow
def test_the_range_of_the_log_ratio_shrinks_with_the_root_of_the_length(backend: str) -> None:
    """Section 4.1 says that dividing by the length unifies the range of ratios.

    All combinations of signs of independent tokens are in the batch, so the standard deviation is known exactly.
    """
    size = 0.02  # nats: every token's log-ratio is +size or -size
    for length in (1, 4, 9):
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * length)
        log_probs = size * signs.view(-1, length)  # [2^L, L]
        old = torch.zeros_like(log_probs)
        advantages = torch.ones(len(log_probs), dtype=torch.float64)
        out = policy_loss(log_probs, advantages, old_log_probs=old, objective=GSPO, backend=backend)
        assert out.log_ratio.std(correction=0).item() == pytest.approx(size * length**-0.5, rel=1e-12)
        assert (length * out.log_ratio).std(correction=0).item() == pytest.approx(size * length**0.5, rel=1e-12)
