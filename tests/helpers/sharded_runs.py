"""Compute the loss of a sample on several ranks that share its vocabulary, its sequences or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from helpers.samples import Sample, gradients
from torch import Tensor

from gspo_kernels import LossOutput, gspo_fused_loss

SHARDED = ("weight", "bias")  # leaves whose rows are vocabulary columns


@dataclass(frozen=True)
class Groups:
    """The process groups of a rank; None where nothing is sharded."""

    tp: Any = None
    cp: Any = None


def rank_in(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Any) -> int:
    return 1 if group is None else group.size()


def shard_rows(x: Tensor, group: Any) -> Tensor:
    """Return this rank's rows of `x` [V, ...]."""
    rows = x.shape[0] // size_of(group)
    assert rows * size_of(group) == x.shape[0]
    return x[rank_in(group) * rows : (rank_in(group) + 1) * rows]


def of_every_rank(x: Any, group: Any) -> list[Any]:
    out: list[Any] = [None] * group.size()
    dist.all_gather_object(out, x, group=group)
    return out


def contiguous(shape: Sequence[int], ranks: int) -> Tensor:
    """Return the rank of each token [B, T]: consecutive tokens on the same rank."""
    batch, length = shape
    return (torch.arange(length) * ranks // max(length, 1)).expand(batch, length)


def zigzag(shape: Sequence[int], ranks: int) -> Tensor:
    """Return the rank of each token [B, T]: of 2 R chunks, rank r holds chunks r and 2 R - 1 - r."""
    chunk = contiguous(shape, 2 * ranks)
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def run_sharded(
    sample: Sample, backend: str, groups: Groups, owner: Tensor | None = None, **options: Any
) -> tuple[LossOutput, dict[str, Tensor]]:
    """Compute values and gradients on the ranks, and put them together as one process would return them.

    Args:
        sample: a padded batch, or without a `cp` group also a packed one.
        owner: rank of each token [B, T]. Without `packed` in the options, a rank's tokens must be full columns.
    """
    packed = options.pop("packed", False)
    local = sample
    index = None
    if groups.cp is not None:
        assert owner is not None
        local, index = _tokens_of(sample, owner == rank_in(groups.cp), packed)
    leaves = {
        name: (shard_rows(x, groups.tp) if name in SHARDED else x).detach().clone().requires_grad_()
        for name, x in local.leaves.items()
    }
    out = gspo_fused_loss(
        leaves["hidden"],
        leaves["weight"],
        local.target_ids,
        local.advantages,
        bias=leaves.get("bias"),
        objective=local.objective,
        backend=backend,
        tp_group=groups.tp,
        cp_group=groups.cp,
        **local.options,
        **options,
    )
    grads = gradients(out.loss, leaves)
    if groups.tp is not None:
        grads |= {name: torch.cat(of_every_rank(grads[name], groups.tp)) for name in SHARDED if name in grads}
    if index is not None:
        shape = sample.target_ids.shape
        grads["hidden"] = _put_together(grads["hidden"], index, shape, groups.cp)
        for name in SHARDED:
            if name in grads:
                dist.all_reduce(grads[name], group=groups.cp)
        names = ("log_probs", "entropy", "log_ratio") if sample.objective.ratio == "token" else ("log_probs", "entropy")
        out = out._replace(
            **{
                name: _put_together(x, index, shape, groups.cp)
                for name in names
                if (x := getattr(out, name)) is not None
            }
        )
    return out, grads


def _tokens_of(sample: Sample, mine: Tensor, packed: bool) -> tuple[Sample, Tensor]:
    """Return the batch of the tokens where `mine` [B, T] is True, and their indices in the flattened batch."""
    shape = sample.target_ids.shape
    index = torch.arange(mine.numel()).view(shape)
    cut: Callable[[Tensor], Tensor]
    if packed:
        cut = lambda x: x[mine]  # noqa: E731
    else:
        columns = mine[0]
        assert (mine == columns).all()
        cut = lambda x: x[:, columns]  # noqa: E731

    def per_token(x: Any) -> Any:
        return cut(x.detach()) if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == shape else x

    options = {name: per_token(x) for name, x in sample.options.items()}
    if "kept_sets" in options:
        options["kept_sets"] = options["kept_sets"].select(cut(index))
    if packed:
        options["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), mine.sum(1).cumsum(0)])
    leaves = {name: x if name in SHARDED else per_token(x) for name, x in sample.leaves.items()}
    return replace(
        sample,
        leaves=leaves,
        target_ids=per_token(sample.target_ids),
        advantages=per_token(sample.advantages),
        options=options,
    ), cut(index)


def _put_together(x: Tensor, index: Tensor, shape: torch.Size, group: Any) -> Tensor:
    """Return the rows of all ranks at their places in the batch, [B, T, ...]."""
    rest = x.shape[index.ndim :]
    out = x.new_zeros(shape.numel(), *rest)
    for rows, places in of_every_rank((x.detach().reshape(-1, *rest), index.reshape(-1)), group):
        out[places] = rows
    return out.view(*shape, *rest)
