"""Logits of (row, id) pairs and their gradients, for both backends: gather rows of the head, multiply, sum.

No pass over the vocabulary is needed. The products h_row . W_id and the sums of the gradients are the backend's
(`torch/pairs.py`, `triton/pairs.py`); here are the other options of a head, which take one number per pair.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..layout import accumulator
from ..ranks.collectives import gather
from ..ranks.shards import shard_of
from .rows import Groups, HeadGradients, HeadRows, NeedsGradient, Pairs


class PairKernels(Protocol):
    """What a backend computes for pairs."""

    def pair_products(self, left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
        """Dot product of left[row] and right[id] for each pair, [K] in fp32 (fp64 for fp64); 0 for negative ids."""
        ...

    def pair_sums(self, factors: Tensor, matrix: Tensor, index: Tensor, groups: Groups, count: int) -> Tensor:
        """Sum factors[i] * matrix[index[i]] over the pairs i of each group, [count, width] in the dtype of `matrix`.

        The result is 0 where there is no group. Rows of `matrix` whose factor is 0 are not read.
        """
        ...


def logits_at(kernels: PairKernels, head: HeadRows, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Compute the logits of live pairs, with all options of the head, [K] in fp32 (fp64 for fp64), and 0 elsewhere.

    Returns:
        The logits, and their derivatives with respect to h W^T + a B^T + bias, which are 0 for ids of other ranks.
    """
    own = _own(head, pairs)
    z = kernels.pair_products(head.hidden, head.weight, own)
    if head.adapter_hidden is not None and head.adapter_weight is not None:
        z = z + kernels.pair_products(head.adapter_hidden, head.adapter_weight, own).to(z.dtype)
    if head.bias is not None:
        z = z + head.bias[own.ids.clamp(min=0)].to(z.dtype)
    z, slope = z * head.logit_scale, torch.full_like(z, head.logit_scale)
    if head.logit_softcap is not None:
        tanh = torch.tanh(z / head.logit_softcap)
        z, slope = head.logit_softcap * tanh, slope * (1 - tanh.square())
    if head.temperature is not None:
        temperature = head.temperature[pairs.rows] if head.temperature.ndim else head.temperature
        z, slope = z / temperature, slope / temperature
    z, slope = torch.where(own.live, z, 0), torch.where(own.live, slope, 0)
    if head.shard:  # every id belongs to one rank, and the others have 0 there
        z = gather(z, shard_of(head.shard).group).sum(0)
    return z, slope


def gradients_at(
    kernels: PairKernels, head: HeadRows, pairs: Pairs, slope: Tensor, d_logits: Tensor, needs: NeedsGradient
) -> HeadGradients:
    """Compute the gradients of the head's operands from the gradients of the logits of pairs, [K]."""
    own = _own(head, pairs)
    factors = torch.where(own.live & (d_logits != 0), d_logits * slope, 0)
    rows, columns = head.hidden.shape[0], head.weight.shape[0]
    by_row = Groups(None, pairs.offsets, None)
    by_id = _groups(own.ids, factors != 0, columns) if needs.weight or needs.bias or needs.adapter_weight else by_row

    def sums(matrix: Tensor | None, index: Tensor, groups: Groups, count: int) -> Tensor:
        assert matrix is not None
        return kernels.pair_sums(factors, matrix, index, groups, count)

    d_bias = None
    if needs.bias and head.bias is not None:
        one = head.hidden.new_ones(1, 1, dtype=accumulator(head.hidden.dtype))
        d_bias = sums(one, torch.zeros_like(own.ids), by_id, columns)[:, 0].to(head.bias.dtype)
    adapter, adapter_weight = head.adapter_hidden, head.adapter_weight
    return HeadGradients(
        hidden=sums(head.weight, own.ids, by_row, rows) if needs.hidden else None,
        weight=sums(head.hidden, pairs.rows, by_id, columns) if needs.weight else None,
        bias=d_bias,
        adapter_hidden=_cast(sums(adapter_weight, own.ids, by_row, rows), adapter) if needs.adapter_hidden else None,
        adapter_weight=_cast(sums(adapter, pairs.rows, by_id, columns), adapter_weight)
        if needs.adapter_weight
        else None,
    )


def _own(head: HeadRows, pairs: Pairs) -> Pairs:
    """The pairs that this rank computes: live, with an id in its columns. All other ids become -1."""
    live = pairs.live & (pairs.ids >= 0) & (pairs.ids < head.vocab_size)
    return pairs._replace(live=live, ids=torch.where(live, pairs.ids, -1))


def _cast(gradient: Tensor, operand: Tensor | None) -> Tensor:
    assert operand is not None
    return gradient.to(operand.dtype)


def _groups(ids: Tensor, live: Tensor, columns: int) -> Groups:
    """Group the live pairs by id, in the order of the pairs. The host reads no values."""
    pairs, device = ids.shape[0], ids.device
    count = min(pairs, columns)  # the most groups that there can be
    if not pairs:
        empty = torch.zeros(1, dtype=torch.int64, device=device)
        return Groups(empty[:0], empty, empty[:0])
    ordered, order = torch.where(live, ids, columns).sort(stable=True)
    is_first = ordered < columns
    is_first[1:] &= ordered[1:] != ordered[:-1]
    group = torch.where(is_first, is_first.cumsum(0) - 1, count + 1)  # the last place is not used
    begin = live.sum().repeat(count + 2).scatter_(0, group, torch.arange(pairs, device=device))[:-1]
    return Groups(order, begin, ordered[begin[:-1].clamp(max=pairs - 1)])
