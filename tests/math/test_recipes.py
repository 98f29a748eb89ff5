"""Recipes of the GSPO guides that docs/parity.md lists, each step computed by hand and by our functions.

Also the class that introduces the loss in docs/how_it_works.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.device import run_policy
from helpers.marks import triton_is_slow
from helpers.other_trainers import assert_agree, rollout
from helpers.pages import DOCS, code_blocks
from tolerance import FLOAT64_RELATIVE
from torch import Tensor

from gspo_kernels import Objective
from gspo_kernels.advantages import RunningMoments, normalize_rewards, token_returns, whiten
from gspo_kernels.reference import gspo_reference_loss


@pytest.mark.parametrize("sharpness", [1, 30])  # with 30, most log-probs round to 0 or lie far below
def test_the_idea_in_plain_pytorch(sharpness: int) -> None:
    """The class in docs/how_it_works.md computes the loss of `reference.py`, and skips answers without a gradient."""
    (code,) = code_blocks((DOCS / "how_it_works.md").read_text(), "python")
    assert len(code.splitlines()) <= 70
    scope: dict[str, Any] = {}
    exec(code, scope)
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 10, 12, 1, 14, 5])
    answer = torch.arange(6).repeat_interleave(lengths)
    hidden, weight = (torch.randn(n, 8, generator=rng, dtype=torch.float64, requires_grad=True) for n in (45, 600))
    hidden.data *= sharpness
    ids = torch.randint(600, (45,), generator=rng)
    advantages = torch.tensor([1, -1, 0.5, 0, -0.5, 2], dtype=torch.float64)
    shifts = torch.tensor([1e-4, 2e-4, 5e-4, 1e-4, -5e-4, -1e-3], dtype=torch.float64)  # of these, 5e-4 and -5e-4 clip
    log_probs = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0].detach()
    old = log_probs - shifts[answer]

    loss = scope["TiledGSPO"].apply(hidden, weight, ids, old, advantages, answer)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    options: Any = {"cu_seqlens": offsets, "old_log_probs": old, "objective": Objective()}
    expected = gspo_reference_loss(hidden, weight, ids, advantages, **options).loss
    torch.testing.assert_close(loss, expected, rtol=FLOAT64_RELATIVE, atol=0)
    for got, want in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert (got - want).norm() < FLOAT64_RELATIVE * want.norm()
    clipped_or_zero = torch.tensor([False, False, True, True, True, False])
    assert torch.equal((gradients[0] == 0).all(1), clipped_or_zero[answer])


def ratios(lp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (((lp - old) * mask).sum(1) / mask.sum(1)).exp()


@pytest.mark.parametrize("by", [None, "batch", "group", "running"])
@pytest.mark.parametrize("in_reward_kl", [False, True])
@triton_is_slow
def test_rolls_gspo_recipe(by: str | None, in_reward_kl: bool, backend: str) -> None:
    """ROLL's GSPO page: reward norm, reward clip, KL in the reward, whitening, advantage clip, then the actor's loss.

    On that page, loss_agg_mode is seq-mean-token-sum, and the dual clip is 1 + 2 pg_clip with pg_clip 0.2. The gradient
    flows through the sequence's ratio, even if a KL in the reward makes advantages differ between tokens.
    """
    objective = Objective.preset("luspo", clip_low=0.2, clip_high=0.2, dual_clip=1.4, kl_coef=0.001)
    b = rollout(Objective())
    mask = b.double_mask()
    rng = torch.Generator().manual_seed(1)
    rewards = 8 * torch.rand(12, generator=rng, dtype=torch.float64)

    # The recipe by hand.
    std = lambda x: (x - x.mean()).square().sum().div(len(x) - 1).sqrt()  # noqa: E731
    x = rewards
    if by in ("batch", "running"):
        x = (x - x.mean()) / (std(x) + 1e-6)
    if by == "group":
        x = torch.cat([(g - g.mean()) / (std(g) + 1e-6) for g in rewards.split(4)])
    x = x.clamp(-5, 5)
    token_rewards = torch.zeros_like(mask)
    for i in range(12):
        last = int(mask[i].nonzero().max())
        token_rewards[i, last] = x[i]
    kl = (b.old - b.ref) * mask
    if in_reward_kl:
        token_rewards -= 0.05 * kl
    token_rewards = token_rewards.clamp(-5, 5)
    returns = token_rewards.flip(1).cumsum(1).flip(1)
    n = mask.sum()
    mean = (returns * mask).sum() / n
    variance = ((returns - mean).square() * mask).sum() / (n - 1)
    expected = (((returns - mean) / (variance + 1e-8).sqrt()) * mask).clamp(-2, 2)
    lp = b.log_probs.clone().requires_grad_()
    s = ratios(lp, b.old, mask)[:, None]
    loss = -torch.min(s * expected, s.clamp(0.8, 1.2) * expected)
    loss = torch.where(expected < 0, torch.min(loss, -1.4 * expected), loss)
    k3 = (b.ref - lp).exp() - (b.ref - lp) - 1
    loss = ((loss + 0.001 * k3) * mask).sum(1).mean()
    (gradient,) = torch.autograd.grad(loss, lp)

    # The recipe by our functions.
    x = rewards
    if by is not None:
        moments = RunningMoments() if by == "running" else by
        x = normalize_rewards(x, moments, group_size=4 if by == "group" else None)
    x = x.clamp(-5, 5)
    x = token_returns(x, b.mask, reward_clip=5, **({"kl": kl, "kl_coef": 0.05} if in_reward_kl else {}))
    x = whiten(x, b.mask).clamp(-2, 2)
    torch.testing.assert_close(x, expected)
    options = {"mask": b.mask, "old_log_probs": b.old, "ref_log_probs": b.ref, "objective": objective}
    assert_agree(b, run_policy(b.log_probs, x, **options, backend=backend), loss.detach(), gradient)
