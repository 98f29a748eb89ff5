"""Rewards to advantages, on the device the rewards are on."""

from __future__ import annotations

import torch
from torch import Tensor

from .validation import FLOATS, Call


def group_advantages(rewards: Tensor, group_size: int, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """(reward - group mean) / (group std + eps), the group-relative advantage of GRPO and GSPO (arXiv 2507.18071, eq.
    6).

    Args:
        rewards: [B], the answers of one prompt next to each other.
        group_size: answers per prompt; divides B.
        normalize_std: divide by the standard deviation (of a sample, ddof 1); False gives Dr. GRPO's.
        eps: added to the standard deviation.

    Returns:
        [B] fp32 (fp64 for fp64 rewards). Exactly 0 in a group of one and in a group of equal rewards.
    """
    call = Call("group_advantages")
    call.tensor("rewards", rewards, dtypes=FLOATS, shapes=[(None,)], shape_text="[B]")
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        call.fail("group_size", "an int", group_size, TypeError)
    if group_size < 1 or rewards.shape[0] % group_size:
        call.fail("group_size", f">= 1 and a divisor of the {rewards.shape[0]} rewards", group_size)
    call.boolean("normalize_std", normalize_std)
    call.number("eps", eps, "a number >= 0", lambda x: x >= 0)
    groups = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, group_size)
    # Equal rewards must give exactly 0, which their rounded mean would not.
    centred = torch.where(
        groups.amin(1, keepdim=True) == groups.amax(1, keepdim=True), 0, groups - groups.mean(1, keepdim=True)
    )
    if normalize_std and group_size > 1:
        std = (centred.square().sum(1, keepdim=True) / (group_size - 1)).sqrt()
        centred = torch.where(centred == 0, 0, centred / (std + eps))
    return centred.reshape(-1)
