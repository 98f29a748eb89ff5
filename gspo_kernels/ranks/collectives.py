"""Collectives over a process group. Operators take the name of a group, because schemas have no type for groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..validation import warn_once
from .shards import Shard


def resolve(group: str) -> Any:
    """Look up a process group by name."""
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(group)


def gather(x: Tensor, group: str) -> Tensor:
    """Gather `x` [K, ...] from every rank to [ranks, K, ...] by one all-gather, which is skipped if `x` is empty."""
    process_group = resolve(group)
    out = x.new_empty(process_group.size(), *x.shape)
    if x.numel():
        # torch 2.13 deprecates the old name.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        getattr(dist, name)(out.flatten(0, 1), x.contiguous(), group=process_group)
    return out


def gather_tiles(shard: Shard, tables: Sequence[tuple[Tensor, int]], target_logit: Tensor) -> list[Tensor]:
    """Gather the tile results of all ranks, by one all-gather.

    Args:
        shard: this rank's columns.
        tables: pairs (table [tiles of this rank, n], width of its tiles in columns).
        target_logit: [n], NaN where the target is not in this rank's columns.

    Returns:
        Each table with the tiles of all ranks in column order, [tiles, n], and last the logits of the targets, [n], NaN
        for targets outside the vocabulary.
    """
    if not shard.columns():  # this rank computed a column of padding
        target_logit = torch.full_like(target_logit, torch.nan)
    sizes = [shard.tiles(width) for _, width in tables]
    # Pad to the number of tiles of rank 0, which has the most.
    own = target_logit.new_zeros(sum(tiles[0] for tiles in sizes) + 1, target_logit.shape[0])
    start = 0
    for (table, width), tiles in zip(tables, sizes, strict=True):
        _warn_of_unaligned(shard, width)
        own[start : start + tiles[shard.rank]] = table[: tiles[shard.rank]]
        start += tiles[0]
    own[-1] = target_logit
    every = gather(own, shard.group)  # [ranks, tiles of all tables + 1, n]
    gathered = []
    start = 0
    for tiles in sizes:
        gathered.append(torch.cat([every[rank, start : start + count] for rank, count in enumerate(tiles)]))
        start += tiles[0]
    logits = every[:, -1]  # [ranks, n]
    is_nan = logits.isnan()
    gathered.append(torch.where(is_nan.all(0), torch.nan, torch.where(is_nan, -torch.inf, logits).amax(0)))
    return gathered


def _warn_of_unaligned(shard: Shard, width: int) -> None:
    if shard.rows % width:
        warn_once(
            f"gspo_kernels: tp_group has {shard.rows} rows of lm_head per rank, which is not a multiple of "
            f"{width}, the width of a vocabulary tile. Results are correct, but the last bits of log-probs may "
            "depend on the number of ranks",
            stacklevel=2,
            kind="unaligned shards",
        )


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_x = d_x.contiguous()
        with torch.no_grad():  # d_x keeps its graph, so that a double backward raises the error of `head_backward`
            dist.all_reduce(d_x, group=ctx.group)
        return d_x, None


def sum_gradient(x: Tensor, group: Any) -> Tensor:
    """Pass `x` through. In the backward, sum its gradient over the ranks by one all-reduce."""
    return _SumGradient.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x
