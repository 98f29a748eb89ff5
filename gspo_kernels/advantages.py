"""Rewards to advantages, on the device the rewards are on; nothing is read on the host.

What trainers compute, in these terms (R: rewards of a group of n answers to one prompt):

    GSPO, GRPO in ROLL, verl, slime   (R - mean) / (std + 1e-6)      group_advantages(R, n)
    TRL                               the same with eps=1e-4         ... eps=1e-4; scale="batch" for its scale_rewards
    Dr. GRPO                          R - mean                       ... scale="none"
    RLOO                              R - mean of the other answers  ... baseline="leave-one-out", scale="none"
    StateSet                          population std, 0 where std is ... ddof=0, eps=0.0
    REINFORCE without baseline        R itself, then whiten(R, mask)

Afterwards: `whiten` over tokens and `Tensor.clamp` (an advantage clip); before: `normalize_rewards`, a clamp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .groups import Groups, check_rewards, over_deviation, variance_of
from .layout import accumulator
from .validation import FLOATS, Call

BASELINES = ("mean", "leave-one-out", "none")
SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor,
    group_size: int | None = None,
    *,
    group_ids: Tensor | None = None,
    baseline: str = "mean",
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """(reward - baseline) / (std + eps): the group-relative advantage of GRPO and GSPO (arXiv 2507.18071, eq. 6).

    Args:
        rewards: [B].
        group_size: answers per prompt, next to each other; divides B.
        group_ids: [B] int64 instead: answers with the same id are a group, wherever they stand and however many.
        baseline: "mean" of the group, "leave-one-out" (the mean of the others, as RLOO has it) or "none".
        scale: divide by the standard deviation of the "group" or of the whole "batch"; "none": do not (Dr. GRPO).
        ddof: 1 for the deviation of a sample, 0 for that of a population.
        eps: added to the standard deviation.

    Returns:
        [B] fp32 (fp64 for fp64 rewards). With a baseline exactly 0 in a group of one and in a group of equal rewards;
        without one, where the deviation is 0, the reward as it is. A NaN reward makes its group NaN.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    call = Call("group_advantages")
    groups = Groups(call, rewards, group_size, group_ids)
    call.choice("baseline", baseline, BASELINES)
    call.choice("scale", scale, SCALES)
    if isinstance(ddof, bool) or ddof not in (0, 1):
        call.fail("ddof", "0 or 1", ddof)
    call.number("eps", eps, "a number >= 0", lambda x: x >= 0)
    centred = groups.centred()
    n = groups.of_each(groups.counts)
    advantages = centred
    if baseline == "none":
        advantages = groups.rewards
    elif baseline == "leave-one-out":  # R - (sum - R) / (n - 1)
        advantages = centred * (n / (n - 1).clamp(min=1))
    if scale == "none":
        return advantages
    if scale == "group":
        variance = groups.of_each(groups.sum(centred.square())) / (n - ddof).clamp(min=1)
    else:
        variance = variance_of(groups.rewards, ddof)
    return over_deviation(advantages, variance.sqrt(), eps)


@dataclass
class RunningMoments:
    """Mean and variance of all rewards seen so far: state that `normalize_rewards` updates. All fp64, 0-dim."""

    count: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None  # of the population

    def update(self, rewards: Tensor) -> None:
        """Take in more rewards (T. Chan, G. Golub, R. LeVeque, "Updating formulae")."""
        x = rewards.double()
        count, mean = torch.full((), float(x.numel()), dtype=x.dtype, device=x.device), x.mean()
        variance = (x - mean).square().mean()
        if x.numel() == 0:
            return
        if self.count is None or self.mean is None or self.variance is None:
            self.count, self.mean, self.variance = count, mean, variance
            return
        total, delta = self.count + count, mean - self.mean
        between = delta.square() * self.count * count / total
        self.variance = (self.variance * self.count + variance * count + between) / total
        self.mean, self.count = self.mean + delta * count / total, total

    @property
    def std(self) -> Tensor:
        """Of a sample; 0 of a single one."""
        assert self.count is not None and self.variance is not None, "no rewards were seen yet"
        return (self.variance * self.count / (self.count - 1).clamp(min=1)).sqrt()


def normalize_rewards(
    rewards: Tensor,
    by: str | RunningMoments,
    group_size: int | None = None,
    *,
    group_ids: Tensor | None = None,
    shift: bool = True,
    scale: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Rewards less their mean (`shift`), over their standard deviation + eps (`scale`): ROLL's reward_norm.

    Args:
        rewards: [B].
        by: whose mean and deviation: the "batch"'s, each "group"'s (with group_size or group_ids, as in
            `group_advantages`), or those of everything so far: a `RunningMoments`, which takes in the rewards first.
        eps: added to the deviation (of a sample).

    Returns:
        [B] fp32 (fp64 for fp64 rewards). Where the deviation is 0 nothing is divided.
    """
    call = Call("normalize_rewards")
    running = isinstance(by, RunningMoments)
    if not running and by not in ("batch", "group"):
        call.fail("by", "'batch', 'group' or a RunningMoments, which keeps the moments of everything so far", by)
    call.boolean("shift", shift)
    call.boolean("scale", scale)
    call.number("eps", eps, "a number >= 0", lambda x: x >= 0)
    if by != "group" and (group_size is not None or group_ids is not None):
        call.fail("group_size" if group_ids is None else "group_ids", "given with by='group' only", group_size)
    if by == "group":
        groups = Groups(call, rewards, group_size, group_ids)
        centred, n = groups.centred(), groups.of_each(groups.counts)
        std = (groups.of_each(groups.sum(centred.square())) / (n - 1).clamp(min=1)).sqrt()
        x = centred if shift else groups.rewards
    else:
        check_rewards(call, rewards)
        x = rewards.to(accumulator(rewards.dtype))
        if isinstance(by, RunningMoments):
            by.update(rewards)
            if by.mean is None:  # nothing yet
                return x
            mean, std = by.mean.to(x.dtype), by.std.to(x.dtype)
        else:
            mean, std = x.mean(), variance_of(x, 1).sqrt()
        x = x - mean if shift else x
    return over_deviation(x, std, eps) if scale else x


def whiten(advantages: Tensor, mask: Tensor, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """(A - mean) / sqrt(var + eps) over the tokens that count: whiten_advantages of ROLL, masked_whiten of verl.

    Args:
        advantages: [B] or [B, 1] per sequence, which then weigh by their tokens, or [B, T] per token.
        mask: [B, T] bool or 0/1: the tokens that count.
        shift: False adds the mean back afterwards, as their shift_mean=False does.
        eps: added to the variance (of a sample).

    Returns:
        [B, T] in the dtype of `group_advantages`, 0 where masked.
    """
    call = Call("whiten")
    shape = _tokens(call, mask)
    x = _per_token(call, "advantages", advantages, shape)
    call.boolean("shift", shift)
    call.number("eps", eps, "a number >= 0", lambda v: v >= 0)
    counts = mask != 0
    n = counts.sum().clamp(min=1)
    centred = torch.where(counts, x, 0).double()
    mean = centred.sum() / n
    centred = torch.where(counts, centred - mean, 0)
    rate = (centred.square().sum() / (n - 1).clamp(min=1) + eps).rsqrt()
    whitened = centred * torch.where(rate.isinf(), 1, rate)
    return torch.where(counts, whitened if shift else whitened + mean, 0).to(x.dtype)


def token_returns(
    rewards: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    reward_clip: float | None = None,
) -> Tensor:
    """Discounted sums of token rewards: a sequence's reward at its last token, less kl_coef times the KL of each.

    The in-reward KL of ROLL's add_token_level_kl and of verl's use_kl_in_reward with REINFORCE++ (with grpo and rloo
    verl adds a sequence's token rewards up first). Advantages then differ by token, which GSPO-token is for:
    ratio="sequence-token".

    Args:
        rewards: [B].
        mask: [B, T] bool or 0/1: the tokens that count. A sequence without any has returns of 0.
        kl: [B, T] of each token, for example old_log_probs - ref_log_probs (k1).
        kl_coef: >= 0.
        gamma: discount per position, holes of the mask included (verl skips them), in [0, 1].
        reward_clip: token rewards, the KL included, are clamped to plus and minus it.

    Returns:
        [B, T], 0 where masked.
    """
    call = Call("token_returns")
    shape = _tokens(call, mask)
    check_rewards(call, rewards, shape[0])
    call.number("kl_coef", kl_coef, "a number >= 0", lambda x: x >= 0)
    call.number("gamma", gamma, "a number from 0 to 1", lambda x: 0 <= x <= 1)
    if reward_clip is not None:
        call.number("reward_clip", reward_clip, "a number > 0, or None", lambda x: x > 0)
    counts, dtype = mask != 0, accumulator(rewards.dtype)
    last = counts & (counts.flip(1).cumsum(1).flip(1) == 1)
    returns = torch.where(last, rewards.to(dtype)[:, None], 0)
    if kl is not None:
        call.tensor("kl", kl, dtypes=FLOATS, shapes=[shape], shape_text=lambda: f"{list(shape)}")
        returns = returns - torch.where(counts, kl_coef * kl.to(dtype), 0)
    elif kl_coef > 0:
        call.fail("kl", "a tensor [B, T] for kl_coef > 0", None)
    if reward_clip is not None:
        returns = returns.clamp(-reward_clip, reward_clip)
    step = 1  # after a step of 2^k a place holds the sum of the 2^(k + 1) that begin there
    while step < shape[1]:
        returns = torch.cat([returns[:, :-step] + gamma**step * returns[:, step:], returns[:, -step:]], 1)
        step *= 2
    return torch.where(counts, returns, 0)


def turn_advantages(advantages: Tensor, turn_ids: Tensor) -> Tensor:
    """One advantage per turn of a conversation, spread over its tokens.

    Args:
        advantages: [B, K]: of turn k of sequence i.
        turn_ids: [B, T] int64: the turn of each token, 0 to K - 1; anything else gets 0.

    Returns:
        [B, T] in the dtype of `group_advantages`.
    """
    call = Call("turn_advantages")
    call.tensor("advantages", advantages, dtypes=FLOATS, shapes=[(None, None)], shape_text="[B, K]")
    shape = (advantages.shape[0], None)
    call.tensor("turn_ids", turn_ids, dtypes=(torch.int64,), shapes=[shape], shape_text="[B, T] like advantages' B")
    turns = advantages.shape[1]
    inside = (turn_ids >= 0) & (turn_ids < turns)
    x = advantages.to(accumulator(advantages.dtype))
    x = torch.cat([x, x.new_zeros(x.shape[0], 1)], 1)  # what tokens of no turn get
    return x.gather(1, torch.where(inside, turn_ids, turns))


def _tokens(call: Call, mask: Any) -> tuple[int, int]:
    call.mask(mask, shapes=[(None, None)], shape_text="[B, T]")
    return mask.shape[0], mask.shape[1]


def _per_token(call: Call, name: str, x: Any, shape: tuple[int, int]) -> Tensor:
    batch = shape[0]
    text = f"[{batch}], [{batch}, 1] or {list(shape)}"
    call.tensor(name, x, dtypes=FLOATS, shapes=[(batch,), (batch, 1), shape], shape_text=text)
    return (x[:, None] if x.ndim == 1 else x).to(accumulator(x.dtype)).expand(shape)
