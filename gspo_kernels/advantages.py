"""Compute advantages from rewards, on the device of the rewards.

NaN and infinite values raise a ValueError on a CPU, and elsewhere with GSPO_CHECK=1. Without it, the host reads no
values on a GPU: such values make advantages NaN, which the loss counts as invalid. With `RunningMoments`, all later
calls return NaN as well.

The advantages of common trainers (R: rewards, in groups of n answers to a prompt):

    GSPO, and GRPO of ROLL, verl, slime   (R - mean) / (std + 1e-6)        group_advantages(R, n)
    TRL                                   (R - mean) / (std + 1e-4)        group_advantages(R, n, eps=1e-4)
    TRL, scale_rewards="batch"            (R - mean) / (batch std + 1e-4)  ... eps=1e-4, scale="batch"
    Dr. GRPO                              R - mean                         ... scale="none"
    RLOO                                  R - mean of the other answers    ... baseline="leave-one-out", scale="none"
    NeMo RL                               (R - mean of the other answers) / (their std + 1e-6)
                                                                           ... baseline="leave-one-out",
                                                                               scale="leave-one-out"
    StateSet                              (R - mean) / population std      ... ddof=0, eps=0.0
    GDPO, several rewards R_k             sum of w_k (R_k - mean_k) / (std_k + eps), divided by its batch std
                                                                           gdpo_advantages(R, n, weights=w)
    REINFORCE without group baseline      (R - mean) / std, over tokens    whiten(R, mask)

You may clamp rewards or pass them through `normalize_rewards` first. Afterwards you may clamp advantages or pass them
through `whiten`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .groups import Groups, checked_rewards, finite, over_deviation, per_token, variance_of
from .layout import accumulator, packed_layout
from .validation import FLOATS, LARGEST, TensorChecks, valid_bound

__all__ = [
    "RunningMoments",
    "gdpo_advantages",
    "group_advantages",
    "normalize_rewards",
    "token_returns",
    "turn_advantages",
    "whiten",
]

BASELINES = ("mean", "leave-one-out", "none")
SCALES = ("group", "leave-one-out", "batch", "none")


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
    """Compute (reward - baseline) / (std + eps), the advantage of GRPO and GSPO (arXiv 2507.18071, eq. 6).

    Args:
        rewards: [B].
        group_size: answers per prompt, a divisor of B. The answers to a prompt must be adjacent in the batch. Pass
            either group_size or group_ids.
        group_ids: [B] int64 or int32. Answers with the same id form a group. Groups may differ in size, and their
            answers need not be adjacent.
        baseline: "mean" of the group, "leave-one-out" (mean of the other answers, RLOO) or "none".
        scale: divide by the standard deviation of the "group", of the other answers of the group ("leave-one-out",
            NeMo RL), or of the "batch"; "none": do not divide (Dr. GRPO).
        ddof: 1 for the sample standard deviation, 0 for the population standard deviation.
        eps: added to the standard deviation, >= 0.

    Returns:
        [B] fp32 (fp64 for fp64 rewards). With a baseline, advantages are exactly 0 in a group of one answer and in a
        group of equal rewards. Where the standard deviation is 0, nothing is divided. On a GPU, a NaN or infinite
        reward makes all advantages of its group NaN. With scale="batch", it makes all advantages of the batch NaN,
        except those that are 0 before the division. With baseline="none" and scale="none", it affects only its own
        advantage.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("group_advantages")
    advantages = _of_groups(check, rewards, group_size, group_ids, baseline, scale, ddof, eps)
    return advantages.to(accumulator(rewards.dtype))


def _of_groups(
    check: TensorChecks,
    rewards: Tensor,
    group_size: Any,
    group_ids: Any,
    baseline: str,
    scale: str,
    ddof: int,
    eps: float,
) -> Tensor:
    """Compute `group_advantages` in fp64, so that rewards with a large common part keep their differences."""
    groups = Groups(check, rewards, group_size, group_ids)
    check.choice("baseline", baseline, BASELINES)
    check.choice("scale", scale, SCALES)
    check.integer("ddof", ddof, "0 or 1", lambda x: x in (0, 1))
    _check_eps(check, eps)
    centred = groups.centred()  # [B]
    n = groups.per_reward(groups.counts)  # [B]
    advantages = centred
    if baseline == "none":
        advantages = groups.rewards
    elif baseline == "leave-one-out":  # R - (sum - R) / (n - 1)
        advantages = centred * (n / (n - 1).clamp(min=1))
    if scale == "none":
        return advantages
    if scale == "group":
        variance = groups.per_reward(groups.sum(centred.square())) / (n - ddof).clamp(min=1)
    elif scale == "leave-one-out":
        variance = groups.variance_of_others(ddof)
    else:
        variance = variance_of(groups.rewards, ddof)
    return over_deviation(advantages, variance.sqrt(), eps)


def gdpo_advantages(
    rewards: Tensor,
    group_size: int | None = None,
    *,
    group_ids: Tensor | None = None,
    weights: Sequence[float] | None = None,
    baseline: str = "mean",
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Compute the advantages of several rewards: normalize each reward by group, add them, normalize the sums by batch.

    GDPO (arXiv 2601.05242) does this so that a reward with a large deviation does not hide the others. With the
    advantages A_k = `group_advantages(rewards[:, k], ...)` and the sums x = sum of w_k A_k, the result is
    (x - mean of x) / (std of x + eps), with mean and sample standard deviation over the batch. TRL's
    multi_objective_aggregation="normalize_then_sum" equals `gdpo_advantages(..., eps=1e-4)`.

    Args:
        rewards: [B, K], K rewards of each answer.
        group_size, group_ids, baseline, scale, ddof: as in `group_advantages`.
        weights: K finite numbers; None: every reward has weight 1.
        eps: added to the standard deviations of groups and batch, >= 0.

    Returns:
        [B] fp32 (fp64 for fp64 rewards). A reward that is equal for all answers of a group adds nothing in this group.
        On a GPU, a NaN or infinite reward makes all advantages NaN.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("gdpo_advantages")
    check.tensor("rewards", rewards, dtypes=FLOATS, shapes=[(None, None)], shape_text="[B, K]")
    count = rewards.shape[1]
    if count == 0:
        check.fail("rewards", "[B, K] with K >= 1", rewards)
    if weights is None:
        weights = [1.0] * count
    if not isinstance(weights, list | tuple) or len(weights) != count:
        check.fail("weights", f"a list of {count} numbers, one per reward, or None", weights)
    weights = [
        check.number("weights", x, "finite numbers within float32", lambda x: abs(x) <= LARGEST) for x in weights
    ]
    # In fp64, because the last division would amplify the rounding errors of advantages that cancel.
    total = rewards.new_zeros(rewards.shape[0], dtype=torch.float64)
    for weight, reward in zip(weights, rewards.unbind(1), strict=True):
        total = total + weight * _of_groups(check, reward, group_size, group_ids, baseline, scale, ddof, eps)
    return normalize_rewards(total, "batch", eps=eps).to(accumulator(rewards.dtype))


@dataclass
class RunningMoments:
    """Mean and variance of all rewards so far, updated by `normalize_rewards`.

    Fields are 0-dim fp64 tensors, or None before the first reward.
    """

    count: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None  # population variance

    def update(self, rewards: Tensor) -> None:
        """Add finite rewards to the moments (T. Chan, G. Golub, R. LeVeque, "Updating formulae")."""
        x = checked_rewards(TensorChecks("RunningMoments.update"), rewards).double()
        count = torch.full((), float(x.numel()), dtype=x.dtype, device=x.device)
        mean = x.mean()
        variance = (x - mean).square().mean()
        if x.numel() == 0:
            return
        if self.count is None or self.mean is None or self.variance is None:
            self.count, self.mean, self.variance = count, mean, variance
            return
        total = self.count + count
        delta = mean - self.mean
        between = delta.square() * self.count * count / total
        self.variance = (self.variance * self.count + variance * count + between) / total
        self.mean, self.count = self.mean + delta * count / total, total

    @property
    def std(self) -> Tensor:
        """Sample standard deviation of all rewards so far, []; 0 for a single reward."""
        assert self.count is not None and self.variance is not None, "no rewards yet: call update first"
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
    """Subtract the mean from rewards and divide by their standard deviation (ROLL's reward_norm).

    Args:
        rewards: [B].
        by: the source of mean and standard deviation: "batch"; "group" (pass group_size or group_ids, as in
            `group_advantages`); or a `RunningMoments` over all rewards so far (this call first adds `rewards` to it).
        shift: subtract the mean.
        scale: divide by the sample standard deviation plus eps.
        eps: added to the standard deviation, >= 0.

    Returns:
        [B] fp32 (fp64 for fp64 rewards). Where the standard deviation is 0, nothing is divided.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("normalize_rewards")
    running = isinstance(by, RunningMoments)
    if not running and by not in ("batch", "group"):
        check.fail("by", "'batch', 'group' or a RunningMoments, which holds the moments of all rewards so far", by)
    check.boolean("shift", shift)
    check.boolean("scale", scale)
    _check_eps(check, eps)
    for name, value in (("group_size", group_size), ("group_ids", group_ids)):
        if by != "group" and value is not None:
            check.fail(name, "None unless by='group'", value)
    if by == "group":
        groups = Groups(check, rewards, group_size, group_ids)
        centred = groups.centred()  # [B]
        n = groups.per_reward(groups.counts)  # [B]
        std = (groups.per_reward(groups.sum(centred.square())) / (n - 1).clamp(min=1)).sqrt()
        x = centred if shift else groups.rewards
    else:
        checked = checked_rewards(check, rewards)
        x = checked.double()
        if isinstance(by, RunningMoments):
            by.update(checked)
            if by.mean is None:  # no reward so far
                return checked
            mean, std = by.mean.double(), by.std.double()
        else:
            mean, std = x.mean(), variance_of(x, 1).sqrt()
        x = x - mean if shift else x
    return (over_deviation(x, std, eps) if scale else x).to(accumulator(rewards.dtype))


def _check_eps(check: TensorChecks, eps: float) -> None:
    check.number("eps", eps, "a finite number >= 0", lambda x: 0 <= x <= LARGEST)


def whiten(advantages: Tensor, mask: Tensor, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """Compute (A - mean) / sqrt(var + eps), with mean and variance over the unmasked tokens.

    This equals ROLL's whiten_advantages and verl's masked_whiten.

    Args:
        advantages: [B, T] per token, or [B] or [B, 1] per sequence. An advantage per sequence counts once per unmasked
            token.
        mask: [B, T] bool or 0/1, True or 1 at unmasked tokens.
        shift: subtract the mean. If False, the mean is added back at the end, like shift_mean=False in ROLL and verl.
        eps: added to the sample variance, >= 0.

    Returns:
        [B, T] fp32 (fp64 for fp64 advantages), 0 where masked.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("whiten")
    _mask_shape(check, mask)
    unmasked = mask != 0
    x = per_token(check, "advantages", advantages, unmasked)  # [B, T]
    check.boolean("shift", shift)
    _check_eps(check, eps)
    n = unmasked.sum().clamp(min=1)
    centred = torch.where(unmasked, x, 0).double()
    mean = centred.sum() / n
    centred = torch.where(unmasked, centred - mean, 0)
    inverse_std = (centred.square().sum() / (n - 1).clamp(min=1) + eps).rsqrt()
    whitened = centred * torch.where(inverse_std.isinf(), 1, inverse_std)
    return check.nan_if_invalid(torch.where(unmasked, whitened if shift else whitened + mean, 0).to(x.dtype))


def token_returns(
    rewards: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    reward_clip: float | None = None,
) -> Tensor:
    """Compute the discounted sum of token rewards from each token to the end of its sequence.

    The reward of a token is -kl_coef times its KL. The last unmasked token also receives the reward of its sequence.
    ROLL's add_token_level_kl and verl's use_kl_in_reward with REINFORCE++ compute the same returns. With the advantage
    estimators grpo and rloo, verl instead sums the token rewards to one reward per sequence; use `group_advantages` in
    that case. The returns differ by token, so pass them as per-token advantages with ratio="sequence-token"
    (GSPO-token).

    Args:
        rewards: [B].
        mask: [B, T] bool or 0/1, True or 1 at unmasked tokens. A sequence without unmasked tokens has returns 0.
        kl: [B, T], the KL per token, such as old_log_probs - ref_log_probs (k1); required if kl_coef > 0.
        kl_coef: weight of `kl`, >= 0.
        gamma: discount per position, in [0, 1]. Masked positions inside a sequence count; verl skips them.
        reward_clip: clamp each token reward, KL included, to [-reward_clip, reward_clip]; None: no clamp.

    Returns:
        [B, T] fp32 (fp64 for fp64 rewards), 0 where masked.

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("token_returns")
    shape = _mask_shape(check, mask)
    rewards = checked_rewards(check, rewards, shape[0], mask.device)
    check.number("kl_coef", kl_coef, "a finite number >= 0", lambda x: 0 <= x <= LARGEST)
    check.number("gamma", gamma, "a number from 0 to 1", lambda x: 0 <= x <= 1)
    if reward_clip is not None:
        expected = "a number > 0, within float32, or None"
        check.number("reward_clip", reward_clip, expected, lambda x: x > 0 and valid_bound(x))
    unmasked = mask != 0
    last = unmasked & (unmasked.flip(1).cumsum(1).flip(1) == 1)  # [B, T]: the last unmasked token of each sequence
    returns = torch.where(last, rewards[:, None], 0)  # [B, T]
    if kl is not None:
        text = lambda: f"{list(shape)}"  # noqa: E731
        check.tensor("kl", kl, dtypes=FLOATS, shapes=[shape], shape_text=text, device=mask.device)
        kl = finite(check, "kl", kl.to(rewards.dtype), "finite where mask is true", unmasked)
        returns = returns - torch.where(unmasked, kl_coef * kl, 0)
    elif kl_coef > 0:
        check.fail("kl", "a tensor [B, T] for kl_coef > 0", None)
    if reward_clip is not None:
        returns = returns.clamp(-reward_clip, reward_clip)
    step = 1
    while step < shape[1]:  # each pass doubles the number of positions that a sum covers, from `step` to 2 * step
        returns = torch.cat([returns[:, :-step] + gamma**step * returns[:, step:], returns[:, -step:]], 1)
        step *= 2
    return check.nan_if_invalid(torch.where(unmasked, returns, 0))


def turn_advantages(advantages: Tensor, turn_ids: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Expand one advantage per turn of a conversation to per-token advantages.

    Args:
        advantages: [B, K], one advantage for each of K turns; [S, K] with cu_seqlens.
        turn_ids: [B, T] int64, the turn of each token, 0 to K - 1; [N] with cu_seqlens. In each sequence, turns are
            counted from 0. Tokens with any other id get advantage 0.
        cu_seqlens: [S + 1] int32 or int64, for packed input.

    Returns:
        [B, T] or [N], fp32 (fp64 for fp64 advantages).

    Raises:
        ValueError, TypeError: The message names the argument, the expected value and the value received.
    """
    check = TensorChecks("turn_advantages")
    shape_text = "[B, K]" if cu_seqlens is None else "[S, K], with cu_seqlens"
    check.tensor("advantages", advantages, dtypes=FLOATS, shapes=[(None, None)], shape_text=shape_text)
    sequences, turns = advantages.shape
    shape, text = (sequences, None), f"[B, T] with B = {sequences}, as in advantages"
    if cu_seqlens is not None:
        shape, text = (None,), "[N]"
    device = advantages.device
    check.tensor("turn_ids", turn_ids, dtypes=(torch.int64,), shapes=[shape], shape_text=text, device=device)
    inside = (turn_ids >= 0) & (turn_ids < turns)
    x = advantages.to(accumulator(advantages.dtype))
    x = torch.cat([x, x.new_zeros(sequences, 1)], 1)  # [B, K + 1]: the last column is for tokens outside all turns
    columns = torch.where(inside, turn_ids, turns)
    if cu_seqlens is None:
        x = x.gather(1, columns)
    else:
        check.offsets(cu_seqlens, len(turn_ids), turn_ids.device)
        if len(cu_seqlens) != sequences + 1:
            check.fail("cu_seqlens", f"[S + 1] with S = {sequences}, as in advantages", cu_seqlens)
        x = x[packed_layout(len(turn_ids), cu_seqlens).sequence_of_row(), columns]
        x = check.nan_if_invalid(x)  # bad offsets that a GPU does not report
    return finite(check, "advantages", x, "finite in turns with tokens")


def _mask_shape(check: TensorChecks, mask: Any) -> tuple[int, int]:
    """Check a mask [B, T] and return (B, T)."""
    check.mask(mask, shapes=[(None, None)], shape_text="[B, T]")
    return mask.shape[0], mask.shape[1]
