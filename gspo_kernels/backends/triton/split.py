"""fp32 heads on tensor cores: an fp32 number x is the sum of two bf16 numbers, hi = bf16(x) and lo = bf16(x - hi).

    h . w = h_lo . w_hi + h_hi . w_lo + h_hi . w_hi    without h_lo . w_lo, which is at most 2^-16 of |h| |w|

This is one product of bf16 rows of 3 H numbers, [h_lo, h_hi, h_hi] and [w_hi, w_lo, w_hi], so the kernels of bf16 heads
compute it. The small terms come first, because tensor cores truncate a sum in proportion to its size. For hidden states
that are bf16 numbers, h_lo is 0 and left out.

The weight is split one slab of columns at a time, so that its parts fit the workspace. The backward recomputes the same
logits. It then multiplies d_logits, the weight and the hidden states in bf16, as for a bf16 head, and sums in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import HeadRows
from .logit_tile import gather_rows

# The parts of hidden states and of the weight, in the order of additions, by `HeadRows.split`.
_PARTS = {"weight": (("hi", "hi"), ("lo", "hi")), "both": (("lo", "hi", "hi"), ("hi", "lo", "hi"))}


def split_rows(hidden: Tensor, split: str) -> Tensor:
    """Split hidden states [n, H] into bf16 parts [n, 2 H or 3 H]; unchanged if `split` is ""."""
    return _parts(hidden, _PARTS[split][0]) if split else hidden


def slab_of(head: HeadRows, low: int, high: int) -> HeadRows:
    """Build a head from columns low to high, with the weight split into [high - low, 2 H or 3 H].

    Target ids become relative to `low`. A head without a split is returned unchanged.
    """
    if not head.split:
        return head
    return head._replace(
        weight=_parts(head.weight[low:high], _PARTS[head.split][1]),
        bias=None if head.bias is None else head.bias[low:high],
        adapter_weight=None if head.adapter_weight is None else head.adapter_weight[low:high],
        target_ids=head.target_ids - low,
        vocab_size=high - low,
    )


def bytes_of_parts(head: HeadRows) -> int:
    """Bytes of one row of the split weight, or 0 if the weight is not split."""
    return head.hidden.shape[1] * torch.bfloat16.itemsize * len(_PARTS[head.split][1]) if head.split else 0


def _parts(x: Tensor, names: tuple[str, ...]) -> Tensor:
    """Write the parts of each row of x [n, H] side by side. The last part is always "hi"."""
    out = x.new_empty(x.shape[0], len(names), x.shape[1], dtype=torch.bfloat16)
    hi = out[:, -1].copy_(x)
    for i, name in enumerate(names[:-1]):
        if name == "hi":
            out[:, i].copy_(hi)
        else:
            torch.sub(x, hi, out=out[:, i])
    return gather_rows(out.flatten(1), None)
