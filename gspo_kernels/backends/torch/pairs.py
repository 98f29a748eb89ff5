"""Products and sums of (row, id) pairs in PyTorch. Must match the Triton backend's `pairs.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout import accumulator
from ..rows import Groups, Pairs

_ELEMENTS = 2**18  # of the gathered rows that are multiplied at a time: few enough to stay in a CPU's caches


def pair_products(left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
    """Dot product of left[row] and right[id] for each pair, [K]; 0 for negative ids.

    Every chunk has the same number of pairs, because a sum of another shape may round differently.
    """
    dtype, size = accumulator(left.dtype), _pairs_at_a_time(left)
    out = torch.zeros(pairs.ids.shape[0], dtype=dtype, device=left.device)
    for part in (pairs.ids >= 0).nonzero()[:, 0].split(size):
        product = left[pairs.rows[part]].to(dtype) * right[pairs.ids[part]].to(dtype)
        out[part] = F.pad(product, (0, 0, 0, size - len(part))).sum(1)[: len(part)]
    return out


def pair_sums(factors: Tensor, matrix: Tensor, index: Tensor, groups: Groups, count: int) -> Tensor:
    """Sum factors[i] * matrix[index[i]] over the pairs i of each group, [count, width] in the dtype of `matrix`.

    Sums are in the dtype of the factors, in the order of the pairs, and rounded once.
    """
    sizes = groups.begin[1:] - groups.begin[:-1]
    of_group = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    order = torch.arange(len(of_group), device=sizes.device) if groups.order is None else groups.order[: len(of_group)]
    live = (factors[order] != 0).nonzero()[:, 0]
    used, place = of_group[live].unique(return_inverse=True)
    total = torch.zeros(len(used), matrix.shape[1], dtype=factors.dtype, device=matrix.device)
    for part, to in zip(order[live].split(size := _pairs_at_a_time(matrix)), place.split(size), strict=True):
        terms = matrix[index[part]].to(factors.dtype) * factors[part, None]
        if total.device.type == "cpu":
            total.index_add_(0, to, terms)
        else:  # index_add_ would add in any order
            total.index_put_((to,), terms, accumulate=True)
    out = torch.zeros(count, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    out[used if groups.to is None else groups.to[used]] = total.to(matrix.dtype)
    return out


def _pairs_at_a_time(matrix: Tensor) -> int:
    """Depends on the width alone, so that a pair has the same bits in any batch."""
    return max(_ELEMENTS // max(matrix.shape[1], 1), 1)
