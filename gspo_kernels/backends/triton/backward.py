"""Gradients of a head: logits recomputed a slab of the vocabulary at a time, then the vendor's matrix products.

Rows without a gradient are gathered out first. For every slab of columns and chunk of rows one kernel writes d_logits
in the dtype of the operands, and two products with fp32 accumulation take it from there: d_hidden grows over slabs,
d_weight of a slab over chunks, and that is written once. How many rows have a gradient is the one number the host
reads; while a CUDA graph is captured it reads nothing and all rows take part, those without a gradient as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision import add_product, exact_products
from ..rows import HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient
from .gradient_rows import counted, gradient_of_tiles, make_upstream, part_shape, rounds_later, scatter, spread
from .logit_tile import straighten
from .sparse_backward import cell_backward, plan
from .tuning import tile_config


def head_backward(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    needs: NeedsGradient,
    live: LiveTiles | None = None,
) -> HeadGradients:
    """Compute the gradients of a head's operands, None where none is needed."""
    config = tile_config(head, "gradient")
    vocab, width = head.weight.shape
    head = straighten(head, config)
    index = None
    if live is not None and live.order.numel() and counted(live.order):
        chosen = plan(head, live, config)
        index = live.order[: chosen.rows]
        if chosen.sparse:
            up = make_upstream(head, result, d_log_probs, None, index, ascending=False)
            return cell_backward(up, vocab, config, needs, chosen)
        index = index.sort().values
    up = make_upstream(head, result, d_log_probs, d_entropy, index)
    n, dtype = up.index.shape[0], up.d_log_probs.dtype
    need_hidden, need_weight, need_bias, need_ah, need_aw = needs
    in_full = need_bias or need_ah or need_aw or rounds_later(head)  # their sums are of d_logits before rounding
    rank = 0 if head.adapter_weight is None else head.adapter_weight.shape[1]

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=head.hidden.device)

    d_hidden = zeros(*head.hidden.shape) if need_hidden else None
    d_weight = zeros(vocab, width, of=head.weight.dtype) if need_weight else None
    d_bias = zeros(vocab) if need_bias else None
    d_ah = zeros(n, rank) if need_ah else None
    d_aw = zeros(vocab, rank) if need_aw else None
    # Sums of gathered rows form at the end of d_hidden's memory; `spread` then moves each row down to its place.
    gathered = None if d_hidden is None else d_hidden[d_hidden.shape[0] - n :]
    chunk, slab = part_shape(head, n, config, in_full)
    hidden = up.hidden_rows(slice(0, n)) if n <= chunk else None
    with exact_products(head.hidden.device):
        for low in range(0, head.vocab_size if n else 0, slab):
            high = min(low + slab, head.vocab_size)
            d_slab = None  # of d_weight: summed in full, then rounded and written once
            if d_weight is not None:
                d_slab = d_weight[low:high] if d_weight.dtype == dtype else zeros(high - low, width)
            for start in range(0, n, chunk):
                rows = slice(start, min(start + chunk, n))
                some = up.hidden_rows(rows) if hidden is None else hidden
                d_z = gradient_of_tiles(up, some, rows, low, high, config, in_full)
                if d_bias is not None:
                    d_bias[low:high] += d_z.sum(0)
                if d_ah is not None and head.adapter_weight is not None:
                    d_ah[rows].addmm_(d_z, head.adapter_weight[low:high].to(dtype))
                if d_aw is not None and head.adapter_hidden is not None:
                    d_aw[low:high].addmm_(d_z.t(), up.live_only(head.adapter_hidden[up.index[rows]].to(dtype), rows))
                if in_full:
                    d_z = (d_z if up.boost is None else d_z.mul_(up.boost)).to(some.dtype)
                if gathered is not None:
                    add_product(gathered[rows], d_z, head.weight[low:high])
                if d_slab is not None:
                    add_product(d_slab, d_z.t(), some)
                del d_z, some  # or they would still be alive beside the next ones
            if d_weight is not None and d_slab is not None and d_weight.dtype != dtype:
                d_weight[low:high] = d_slab if up.boost is None else d_slab.div_(up.boost)
            del d_slab
    return HeadGradients(
        None if d_hidden is None else spread(d_hidden, up, chunk),
        d_weight,
        None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype),
        None if d_ah is None or head.adapter_hidden is None else scatter(d_ah, up, head.adapter_hidden),
        None if d_aw is None or head.adapter_weight is None else d_aw.to(head.adapter_weight.dtype),
    )
