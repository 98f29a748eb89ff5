"""Sums and means of rewards by group. The host reads no values.

Groups may differ in size, and the rewards of a group need not be adjacent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import accumulator, segment_sum
from .validation import FLOATS, TensorChecks, Unquoted, up_to_five


class Groups:
    """Rewards [B] in fp64, and the group of each. The rewards of a group are summed in batch order."""

    def __init__(self, check: TensorChecks, rewards: Tensor, group_size: Any, group_ids: Any) -> None:
        rewards = checked_rewards(check, rewards).double()
        batch = rewards.shape[0]
        if (group_size is None) == (group_ids is None):
            got = Unquoted("both" if group_ids is not None else "neither")
            check.fail("group_size", "given without group_ids, or group_ids without group_size", got)
        if group_ids is not None:
            check.tensor(
                "group_ids",
                group_ids,
                dtypes=(torch.int64, torch.int32),
                shapes=[(batch,)],
                shape_text=lambda: f"[{batch}]",
                device=rewards.device,
            )
        else:
            expected = f"an int >= 1 and a divisor of the {batch} rewards"
            group_size = check.integer("group_size", group_size, expected, lambda x: x >= 1 and batch % x == 0)
            group_ids = torch.arange(batch, device=rewards.device) // group_size
        # The host does not know the number of groups, so tensors over groups have length B. The last groups are empty.
        self.rewards = rewards  # [B] fp64
        self.order = group_ids.argsort(stable=True)  # [B]: rewards sorted by group
        sorted_ids = group_ids[self.order]
        starts = torch.ones(batch, dtype=torch.bool, device=rewards.device)  # [B], sorted: True where a group begins
        starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
        # [B]: index of each reward's group, from 0, in the order of ids
        self.group = torch.empty_like(self.order).index_copy_(0, self.order, starts.cumsum(0) - 1)
        counts = torch.zeros(batch, dtype=torch.int64, device=rewards.device)
        counts = counts.index_add_(0, self.group, torch.ones_like(self.group))
        self.offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # [B + 1]
        self.counts = counts.double()  # [B]: rewards in each group

    def per_reward(self, x: Tensor) -> Tensor:
        """Expand one value per group to one per reward, [B]."""
        return x[self.group]

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x`, one value per reward [B], over each group: one sum per group, padded to [B]."""
        return segment_sum(x[self.order], self.offsets)

    def centred(self) -> Tensor:
        """Subtract the mean of its group from each reward, [B]. The result is exactly 0 in a group of equal rewards."""
        # Compare the rewards, because the mean of equal rewards may be rounded, and subtracting it may not give 0.
        smallest, largest = self._extremes()
        mean = self.sum(self.rewards) / self.counts.clamp(min=1)
        return torch.where(smallest == largest, 0, self.rewards - self.per_reward(mean))

    def variance_of_others(self, ddof: int) -> Tensor:
        """Variance of the other rewards in each reward's group, [B], with divisor n - 1 - ddof.

        Exactly 0 if the other rewards are equal or there are none.
        """
        n = self.per_reward(self.counts)
        smallest, largest = self._extremes()
        is_smallest, is_largest = self.rewards == smallest, self.rewards == largest
        n_smallest, n_largest = (self.per_reward(self.sum(equal.double())) for equal in (is_smallest, is_largest))
        squares = self._squares_without_one()
        for is_extreme, n_extreme in ((is_smallest, n_smallest), (is_largest, n_largest)):
            is_outlier = is_extreme & (n_extreme == 1)
            squares = torch.where(is_outlier, self._squares(~is_outlier), squares)
        others_are_equal = (smallest == largest) | (~is_smallest & (n_smallest == n - 1))
        others_are_equal |= ~is_largest & (n_largest == n - 1)
        variance = squares.clamp(min=0) / (n - 1 - ddof).clamp(min=1)
        return torch.where(others_are_equal, 0, variance)

    def _squares_without_one(self) -> Tensor:
        """Sum the squares of the other rewards around their mean, [B], by subtraction from the group's sum.

        This is inaccurate for a reward that is far from all others, because it contributes nearly all of the group's
        sum. Only the single smallest or the single largest reward of a group can be that far away.
        """
        n = self.per_reward(self.counts)
        centred = self.rewards - self.per_reward(self.sum(self.rewards)) / n
        # Leaving out a reward at distance c from the mean reduces the sum of squares by c^2 n / (n - 1).
        return self.per_reward(self.sum(centred.square())) - centred.square() * n / (n - 1).clamp(min=1)

    def _squares(self, included: Tensor) -> Tensor:
        """Sum the squares of the included rewards around their mean, in each reward's group, [B]."""
        count = self.per_reward(self.sum(included.double())).clamp(min=1)
        mean = self.per_reward(self.sum(torch.where(included, self.rewards, 0))) / count
        return self.per_reward(self.sum(torch.where(included, self.rewards - mean, 0).square()))

    def _extremes(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest reward in each reward's group, [B] each."""
        x = self.rewards[self.order]
        smallest = torch.segment_reduce(x, "min", offsets=self.offsets, initial=float("inf"))
        largest = torch.segment_reduce(x, "max", offsets=self.offsets, initial=float("-inf"))
        return self.per_reward(smallest), self.per_reward(largest)


def checked_rewards(
    check: TensorChecks, rewards: Any, batch: int | None = None, device: torch.device | None = None
) -> Tensor:
    """Check that rewards are a finite floating-point tensor [B], of size `batch` and on `device` if given.

    Return them in fp32 or fp64.

    Infinite rewards that raise no error become NaN: if all rewards of a group were inf, its advantages would be 0.
    """
    text = "[B]" if batch is None else f"[{batch}]"
    check.tensor("rewards", rewards, dtypes=FLOATS, shapes=[(batch,)], shape_text=text, device=device)
    return finite(check, "rewards", rewards.to(accumulator(rewards.dtype)), "finite")


def finite(check: TensorChecks, name: str, x: Tensor, expected: str, where: Tensor | None = None) -> Tensor:
    """Check that `x` is finite, or only `where` is True. Return it with inf replaced by NaN there."""
    wrong = ~x.isfinite() if where is None else where & ~x.isfinite()
    check.flag(name, wrong, expected, lambda: up_to_five(x[wrong]))
    return torch.where(wrong, torch.nan, x)


def per_token(check: TensorChecks, name: str, x: Any, unmasked: Tensor) -> Tensor:
    """Check values per sequence or per token, and expand them to [B, T]."""
    batch = len(unmasked)
    shape, device = unmasked.shape, unmasked.device
    text = f"[{batch}], [{batch}, 1] or {list(shape)}"
    check.tensor(name, x, dtypes=FLOATS, shapes=[(batch,), (batch, 1), shape], shape_text=text, device=device)
    x = (x[:, None] if x.ndim == 1 else x).to(accumulator(x.dtype)).expand(shape)
    return finite(check, name, x, "finite where mask is true", unmasked)


def variance_of(x: Tensor, ddof: int) -> Tensor:
    """Variance of all values in fp64, [], with divisor count - ddof; exactly 0 if they are equal."""
    if x.numel() == 0:
        return x.new_zeros(())
    variance = (x - x.mean()).square().sum() / max(x.numel() - ddof, 1)
    return torch.where(x.amin() == x.amax(), 0, variance)


def over_deviation(x: Tensor, std: Tensor, eps: float) -> Tensor:
    """Divide x by std + eps, except where the standard deviation is 0."""
    # With std = 0, dividing by an eps of 1e-6 would multiply x by 1e6.
    return torch.where((x == 0) | (std == 0), x, x / torch.where(std == 0, 1, std + eps))
