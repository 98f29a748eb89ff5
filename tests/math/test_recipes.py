"""Recipes of the GSPO guides that docs/parity.md lists, each step computed by hand and by our functions.

Also the class that introduces the loss in docs/how_it_works.md.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.marks import triton_is_slow
from helpers.other_trainers import assert_agree, ours, rollout
from helpers.pages import DOCS, code_blocks
from tolerance import FLOAT64_RELATIVE
from torch import Tensor

from gspo_kernels import Objective, policy_loss
from gspo_kernels.advantages import RunningMoments, group_advantages, normalize_rewards, token_returns, whiten
from gspo_kernels.reference import gspo_reference_loss
from gspo_kernels.sampler_mismatch import RolloutCorrection


def test_the_idea_in_plain_pytorch() -> None:
    """The class in docs/how_it_works.md computes the loss of `reference.py`, and skips answers without a gradient."""
    (code,) = code_blocks((DOCS / "how_it_works.md").read_text(), "python")
    assert len(code.splitlines()) <= 70
    scope: dict[str, Any] = {}
    exec(code, scope)
    rng = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 10, 12, 1, 14, 5])
    answer = torch.arange(6).repeat_interleave(lengths)
    hidden, weight = (torch.randn(n, 8, generator=rng, dtype=torch.float64, requires_grad=True) for n in (45, 600))
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
        x = normalize_rewards(rewards, RunningMoments() if by == "running" else by, 4 if by == "group" else None)
    x = x.clamp(-5, 5)
    options: dict[str, Any] = {"kl": kl, "kl_coef": 0.05} if in_reward_kl else {}
    advantages = whiten(token_returns(x, b.mask, reward_clip=5, **options), b.mask).clamp(-2, 2)
    torch.testing.assert_close(advantages, expected)
    leaf = b.log_probs.clone().requires_grad_()
    out = policy_loss(
        leaf, advantages, mask=b.mask, old_log_probs=b.old, ref_log_probs=b.ref, objective=objective, backend=backend
    )
    out.loss.backward()
    assert leaf.grad is not None
    assert_agree(b, (out, leaf.grad), loss.detach(), gradient)


def test_the_seven_steps_of_the_blog_on_answers_of_a_few_tokens(backend: str) -> None:
    """The steps: z-scores per group, one length-normalized ratio per answer, one clip.

    Groups have 2 to 8 answers, and answers have 1 to 5 tokens.
    """
    for group in range(2, 9):
        rng = torch.Generator().manual_seed(group)
        rewards = torch.rand(2 * group, generator=rng, dtype=torch.float64)
        grouped = rewards.view(2, group)
        by_hand = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True).clamp_min(1e-6)
        advantages = group_advantages(rewards, group, eps=0.0)
        torch.testing.assert_close(advantages, by_hand.flatten())
        lengths = torch.arange(2 * group) % 5 + 1
        mask = torch.arange(5)[None, :] < lengths[:, None]
        lp = (-torch.rand(2 * group, 5, generator=rng, dtype=torch.float64)).requires_grad_()
        old = lp.detach() + 1e-3 * torch.randn(2 * group, 5, generator=rng, dtype=torch.float64)
        out = policy_loss(lp, advantages, mask=mask, old_log_probs=old, backend=backend)
        (gradient,) = torch.autograd.grad(out.loss, lp)
        s = ratios(lp, old, mask)
        loss = -torch.min(s * advantages, s.clamp(1 - 3e-4, 1 + 4e-4) * advantages).mean()
        (expected,) = torch.autograd.grad(loss, lp)
        torch.testing.assert_close(out.loss, loss)
        torch.testing.assert_close(gradient, expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


def test_the_blogs_skeleton_is_not_this_loss() -> None:
    """The blog's code multiplies the clipped objective by log-probs again, so clipped answers keep a gradient."""
    objective = Objective(clip_low=0.4, clip_high=0.4, surrogate="clip")
    b = rollout(Objective())
    r = torch.where(b.advantages > 0, 0.6, -0.6)[:, None] * b.double_mask()  # every ratio beyond the window
    mask = b.double_mask()
    lp = b.log_probs.clone().requires_grad_()
    s = ratios(lp, b.log_probs - r, mask)
    w = torch.min(s * b.advantages, s.clamp(0.6, 1.4) * b.advantages)
    (skeleton,) = torch.autograd.grad(-(w[:, None] * lp * mask).sum() / mask.sum(), lp)
    leaf = b.log_probs.clone().requires_grad_()
    out = policy_loss(leaf, b.advantages, mask=b.mask, old_log_probs=b.log_probs - r, objective=objective)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    assert skeleton.abs().max() > 1e-3 and not gradient.any()


def test_dapo_and_grpo_differ_in_what_a_token_counts(backend: str) -> None:
    b = rollout(Objective.preset("grpo"))
    _, grpo = ours(b, Objective.preset("grpo", clip_high=0.28), backend)
    _, dapo = ours(b, Objective.preset("dapo"), backend)
    lengths = b.mask.sum(1, keepdim=True)
    torch.testing.assert_close(dapo, grpo * lengths * len(lengths) / lengths.sum())


def test_log_probs_of_the_engine_as_old_ones(backend: str) -> None:
    """Section 5.4 of the paper: the inference engine's log-probs replace a forward of the old policy.

    With a rollout correction, a metric reports how far the engine's log-probs are from the old policy's.
    """
    b = rollout(Objective())
    engine = b.old + 0.01 * torch.randn(b.old.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = (b.log_probs, b.advantages)
    options: dict[str, Any] = {"mask": b.mask, "backend": backend}
    direct = policy_loss(*arguments, old_log_probs=engine, **options)
    u = ((b.log_probs - engine) * b.mask).sum(1) / b.mask.sum(1)
    torch.testing.assert_close(direct.log_ratio, u)
    options["objective"] = Objective(rollout_correction=RolloutCorrection(level="geometric"))
    corrected = policy_loss(*arguments, old_log_probs=b.old, rollout_log_probs=engine, **options)
    assert 0 < corrected.metrics["rollout_kl_sampler_trainer"] < 1e-3


def test_a_partial_rollout_of_two_policies_and_tool_output(backend: str) -> None:
    """The old log-prob of each token is from the policy that sampled it. Tool output is masked and changes nothing."""
    b = rollout(Objective())
    later = b.old + 0.02
    first = torch.arange(16) < 5
    tools = torch.zeros(16, dtype=torch.bool)
    tools[3:6] = True
    mask = b.mask & ~tools
    old = torch.where(first, b.old, later)
    lp = b.log_probs.clone().requires_grad_()
    out = policy_loss(
        lp,
        b.advantages,
        mask=mask,
        old_log_probs=old,
        backend=backend,
        objective=Objective(clip_low=0.5, clip_high=0.5),
    )
    (gradient,) = torch.autograd.grad(out.loss, lp)
    for i in range(12):
        tokens = [t for t in range(16) if mask[i, t]]
        expected = math.fsum(float(b.log_probs[i, t] - old[i, t]) for t in tokens) / max(len(tokens), 1)
        assert out.log_ratio[i].item() == pytest.approx(expected, abs=1e-12)
    assert not gradient[:, tools].any()
