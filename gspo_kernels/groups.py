"""Rewards by group: uneven groups, in any order, without a look at their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import accumulator, segment_sum
from .validation import FLOATS, Call, Said


class Groups:
    """Rewards by group. Sums are in fp64, each group's in its own order."""

    def __init__(self, call: Call, rewards: Tensor, group_size: Any, group_ids: Any) -> None:
        check_rewards(call, rewards)
        batch = rewards.shape[0]
        if (group_size is None) == (group_ids is None):
            both = Said("both" if group_ids is not None else "neither")
            call.fail("group_size", "given, or group_ids, one of the two", both)
        if group_ids is not None:
            call.tensor(
                "group_ids",
                group_ids,
                dtypes=(torch.int64, torch.int32),
                shapes=[(batch,)],
                shape_text=lambda: f"[{batch}]",
                device=rewards.device,
            )
        else:
            if isinstance(group_size, bool) or not isinstance(group_size, int):
                call.fail("group_size", "an int", group_size, TypeError)
            if group_size < 1 or batch % group_size:
                call.fail("group_size", f">= 1 and a divisor of the {batch} rewards", group_size)
            group_ids = torch.arange(batch, device=rewards.device) // group_size
        self.rewards = rewards.to(accumulator(rewards.dtype))
        self.order = group_ids.argsort(stable=True)
        ordered = group_ids[self.order]
        new = torch.ones(batch, dtype=torch.bool, device=rewards.device)
        new[1:] = ordered[1:] != ordered[:-1]
        self.group = torch.empty_like(self.order).index_copy_(0, self.order, new.cumsum(0) - 1)  # [B], 0, 1, ...
        counts = torch.zeros(batch, dtype=torch.int64, device=rewards.device)
        counts = counts.index_add_(0, self.group, torch.ones_like(self.group))  # of groups that there are not 0
        self.offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.counts = counts.to(self.rewards.dtype)

    def of_each(self, x: Tensor) -> Tensor:
        """A value per group -> the value of each reward's group."""
        return x[self.group]

    def sum(self, x: Tensor) -> Tensor:
        return segment_sum(x[self.order], self.offsets)

    def centred(self) -> Tensor:
        """Rewards less their group's mean; equal ones give exactly 0, which their rounded mean would not."""
        x = self.rewards[self.order]
        least = torch.segment_reduce(x, "min", offsets=self.offsets, initial=float("inf"))
        largest = torch.segment_reduce(x, "max", offsets=self.offsets, initial=float("-inf"))
        mean = self.sum(self.rewards) / self.counts.clamp(min=1)
        return torch.where(self.of_each(least == largest), 0, self.rewards - self.of_each(mean))


def check_rewards(call: Call, rewards: Any, batch: int | None = None) -> None:
    text = "[B]" if batch is None else f"[{batch}]"
    call.tensor("rewards", rewards, dtypes=FLOATS, shapes=[(batch,)], shape_text=text)


def variance_of(x: Tensor, ddof: int) -> Tensor:
    """Of the whole batch, exactly 0 where all are equal."""
    if x.numel() == 0:
        return x.new_zeros(())
    wide = x.double()
    variance = (wide - wide.mean()).square().sum() / max(x.numel() - ddof, 1)
    return torch.where(x.amin() == x.amax(), 0, variance).to(x.dtype)


def over_deviation(x: Tensor, std: Tensor, eps: float) -> Tensor:
    """x / (std + eps), and x itself where nothing deviates: over eps alone it would be a million times itself."""
    return torch.where((x == 0) | (std == 0), x, x / torch.where(std == 0, 1, std + eps))
