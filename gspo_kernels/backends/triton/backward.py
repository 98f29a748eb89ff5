"""Gradients of a head. Logits are recomputed one slab of the vocabulary at a time; the products use vendor libraries.

    d_logits = [d_log_prob (onehot - p) - d_entropy p (log p + entropy)] times the slope of the head's tail

The tail is the head's scale, soft-cap and temperature. Its slope is d(logit) / d(h W^T + bias). Only rows with a
gradient are gathered (`gradient_rows.py`). For each slab of columns and chunk of rows, one kernel writes d_logits, in
the operands' dtype unless another gradient needs them in fp32. Two matrix products with fp32 accumulation follow.
d_hidden is summed over slabs. Each slab of d_weight is summed over chunks and written once.

The host reads values once: the number of rows with a gradient and, with a gradient budget, the number of cells to
compute in each tile. While a CUDA graph is captured it reads nothing. Then all rows are gathered, and rows without a
gradient are set to 0.

On AMD and with TunableOp, PyTorch may refuse an fp32 product of half-precision operands. In that case our own kernels
multiply where they can (`cells/`, with all cells). Otherwise fp32 copies of the operands are multiplied.

Must match the torch backend's `backward.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision import add_product, exact_products, write_product
from ..rows import Cached, HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient
from .cells.backward import cell_backward, plan_all_cells, plan_cells
from .gradient_rows import (
    GradientRows,
    gradient_of_tiles,
    gradient_rows,
    may_read,
    round_to_operands,
    scatter,
    scatter_in_place,
    torch_rounds,
)
from .logit_tile import straighten
from .slabs import chunk_and_slab, multiplies_copies
from .tuning import Config, tile_config


def head_backward(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    needs: NeedsGradient,
    live_tiles: LiveTiles | None = None,
    cached: Cached | None = None,
) -> HeadGradients:
    """Compute the gradients of the head's operands; None where `needs` is False."""
    config = tile_config(head, "gradient")
    rows_of_weight = head.weight.shape[0]
    head = straighten(head, config)
    index = None
    # Without a gradient budget, `order` is empty.
    if live_tiles is not None and live_tiles.order.numel() and may_read(live_tiles.order):
        plan = plan_cells(head, live_tiles, config)
        index = live_tiles.order[: plan.rows]
        if plan.sparse:
            rows = gradient_rows(head, result, d_log_probs, None, index, ascending=False, cached=cached)
            return cell_backward(rows, rows_of_weight, config, needs, plan)
        index = index.sort().values
    rows = gradient_rows(head, result, d_log_probs, d_entropy, index, cached=cached)
    if _sums_in_kernels(rows):
        return cell_backward(rows, rows_of_weight, config, needs, plan_all_cells(rows, config))
    gradients = _Gradients(rows, rows_of_weight, config, needs)
    with exact_products(head.hidden.device):
        for low in range(0, head.vocab_size if gradients.n else 0, gradients.slab):
            gradients.add_slab(low, min(low + gradients.slab, head.vocab_size))
    return gradients.scattered()


def _sums_in_kernels(rows: GradientRows) -> bool:
    """True if all columns must be computed as cells, so that our own kernels sum the products in fp32.

    PyTorch would instead multiply fp32 copies of half-precision operands, at an eighth of the speed (NOTES.md). The
    cell kernels do not support a bias, an adapter or a gradient of the entropy.
    """
    head = rows.head
    is_plain = head.bias is None and head.adapter_weight is None and rows.d_entropy is None
    return is_plain and rows.index.shape[0] > 0 and multiplies_copies(head)


class _Gradients:
    """Sums of the gradients: over slabs for hidden states, over chunks of rows for weight, bias and adapter weight."""

    def __init__(self, rows: GradientRows, rows_of_weight: int, config: Config, needs: NeedsGradient) -> None:
        head = rows.head
        self.rows = rows
        self.config = config
        self.n = rows.index.shape[0]
        self.dtype = rows.d_log_probs.dtype
        # Gradients of bias and adapter need unrounded d_logits.
        self.unrounded = needs.bias or needs.adapter_hidden or needs.adapter_weight or torch_rounds(head)
        self.width = head.weight.shape[1]
        rank = 0 if head.adapter_weight is None else head.adapter_weight.shape[1]
        # The first slab writes d_hidden, the others add to it. Without rows there is no slab, so d_hidden starts at 0.
        self.d_hidden = None
        if needs.hidden:
            make = torch.empty if self.n else torch.zeros
            self.d_hidden = make(head.hidden.shape, dtype=self.dtype, device=head.hidden.device)
        # Likewise, the first chunk of rows writes d_weight, except the rows beyond the vocabulary, which start at 0.
        self.d_weight = None
        if needs.weight:
            self.d_weight = head.weight.new_empty(rows_of_weight, self.width)
            self.d_weight[head.vocab_size if self.n else 0 :].zero_()
        self.d_bias = self._zeros(rows_of_weight) if needs.bias else None
        self.d_ah = self._zeros(self.n, rank) if needs.adapter_hidden else None  # of adapter_hidden
        self.d_aw = self._zeros(rows_of_weight, rank) if needs.adapter_weight else None  # of adapter_weight
        # The gradients of the n gathered rows are summed in the last n rows of d_hidden; `scatter_in_place` moves them.
        self.gathered = None if self.d_hidden is None else self.d_hidden[self.d_hidden.shape[0] - self.n :]  # [n, H]
        # With a single chunk, a bf16 product writes d_weight directly. fp16 must first be divided by `boost`.
        direct = head.weight.dtype == torch.bfloat16
        self.chunk, self.slab, gather_once = chunk_and_slab(head, self.n, config, self.unrounded, direct)
        self.direct = direct and self.n <= self.chunk
        self.hidden = rows.hidden(slice(0, self.n)) if gather_once else None  # [n, H]

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.rows.head.hidden.device)

    def add_slab(self, low: int, high: int) -> None:
        """Compute d_logits of columns low to high, and add their contribution to every gradient."""
        d_weight = None if self.d_weight is None else self.d_weight[low:high]
        total = d_weight
        if d_weight is not None and d_weight.dtype != self.dtype and not self.direct:
            # The sum over chunks, in full precision. It is rounded once, after the last chunk.
            total = d_weight.new_empty(high - low, self.width, dtype=self.dtype)
        slab = self.rows.slab(low, high, self.config)
        for start in range(0, self.n, self.chunk):
            self._add_chunk(slab, slice(start, min(start + self.chunk, self.n)), low, high, total)
        if d_weight is not None and total is not None and total is not d_weight:
            d_weight.copy_(total if self.rows.boost is None else total.div_(self.rows.boost))

    def _add_chunk(self, slab: GradientRows, chunk: slice, low: int, high: int, d_weight: Tensor | None) -> None:
        """Add the contribution of one chunk of rows. `d_weight` is the slab [high - low, H]."""
        rows, head = self.rows, self.rows.head
        hidden = rows.hidden(chunk) if self.hidden is None else self.hidden[chunk]
        columns = slice(0, high - low) if head.split else slice(low, high)  # in the weight of `slab`
        d_z = gradient_of_tiles(slab, hidden, chunk, columns.start, columns.stop, self.config, self.unrounded)
        # If split, the last parts, which are the operands rounded to bf16.
        hidden, weight = hidden[:, -self.width :], slab.head.weight[columns, -self.width :]
        if self.d_bias is not None:
            self.d_bias[low:high] += d_z.sum(0)
        if self.d_ah is not None and head.adapter_weight is not None:
            self.d_ah[chunk].addmm_(d_z, head.adapter_weight[low:high].to(self.dtype))
        if self.d_aw is not None and head.adapter_hidden is not None:
            adapter_hidden = rows.zero_rows_without_gradient(
                head.adapter_hidden[rows.index[chunk]].to(self.dtype), chunk
            )
            self.d_aw[low:high].addmm_(d_z.t(), adapter_hidden)
        if self.unrounded:
            d_z = round_to_operands(d_z, rows)
        if self.gathered is not None:
            add_product(self.gathered[chunk], d_z, weight, first=low == 0)
        if d_weight is not None and self.direct:
            write_product(d_weight, d_z.t(), hidden)
        elif d_weight is not None:
            add_product(d_weight, d_z.t(), hidden, first=chunk.start == 0)

    def scattered(self) -> HeadGradients:
        """Scatter rows and cast, so that gradients have the shapes and dtypes of the head's operands."""
        rows, head = self.rows, self.rows.head
        d_bias, d_ah, d_aw = self.d_bias, self.d_ah, self.d_aw
        return HeadGradients(
            hidden=None if self.d_hidden is None else scatter_in_place(self.d_hidden, rows, self.chunk),
            weight=self.d_weight,
            bias=None if d_bias is None or head.bias is None else d_bias.to(head.weight.dtype),
            adapter_hidden=None
            if d_ah is None or head.adapter_hidden is None
            else scatter(d_ah, rows, head.adapter_hidden),
            adapter_weight=None if d_aw is None or head.adapter_weight is None else d_aw.to(head.adapter_weight.dtype),
        )
