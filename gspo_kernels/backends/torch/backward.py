"""Gradients of a head: logits recomputed a slab of the vocabulary at a time.

Must match the Triton backend's `backward.py`. Only rows with a gradient are gathered. Each thread of a CPU takes whole
slabs, so that d_weight is written once and d_hidden is summed in a fixed order.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ..precision import exact_products, pad_columns, power_of_two
from ..rows import HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient
from . import workers
from .tiles import LOG_OF_NOTHING, Part, Runs, Tiles, add_product_of_tile, product_of_tile


def head_backward(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    needs: NeedsGradient,
    live: LiveTiles | None = None,
) -> HeadGradients:
    """Compute the gradients of a head's operands, None where none is needed.

    d_logits = d_log_prob (onehot - p) - d_entropy p (log p + entropy), times the derivative of the head's tail.
    """
    moved = d_log_probs != 0 if d_entropy is None else (d_log_probs != 0) | (d_entropy != 0)
    count, sparse = live.counts.tolist() if live is not None and live.counts.numel() else (0, False)
    work = Tiles(head, live.order[:count] if live and sparse else (head.mask & moved).nonzero()[:, 0])
    runs = Runs(work, live.cells if live and sparse else None)
    gradients = _Gradients(work, GradientRows(work, result, d_log_probs, d_entropy), needs, runs.sparse)
    with exact_products(work.device):
        workers.run(gradients.add_slab, runs.by_slab(), work.threads, gradients.sums)
    return gradients.scattered()


class _Gradients:
    """The gradients as they are added up: over slabs for hidden states, over chunks of rows for the head."""

    def __init__(self, work: Tiles, up: GradientRows, needs: NeedsGradient, sparse: bool) -> None:
        self.work, self.up, self.sparse = work, up, sparse
        need_hidden, need_weight, need_bias, need_ah, need_aw = needs
        weight = work.head.weight  # [V, H]
        self.d_hidden = work.zeros(work.padded, weight.shape[1]) if need_hidden else None
        self.d_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else None
        self.d_bias = work.zeros(weight.shape[0]) if need_bias else None
        self.d_ah = work.zeros(work.padded, work.rank) if need_ah else None
        self.d_aw = work.zeros(weight.shape[0], work.rank) if need_aw else None
        self.sums = workers.Sums(work.padded // work.tile_rows, work.kept_products())  # of d_hidden and d_ah, by chunk

    def add_slab(self, parts: list[Part]) -> None:
        """Recompute the logits of one slab, and add what their gradients contribute to all others."""
        work, (low, high) = self.work, parts[0].slab
        weight = work.weight_slab(low, high)
        d_weight = None if self.d_weight is None else self.d_weight[low:high]
        # Added up over all rows in full precision, then rounded and written once.
        total = d_weight if d_weight is None or d_weight.dtype == work.dtype else work.zeros(*d_weight.shape)
        for part in parts:
            columns = slice(part.first - low, part.last - low)
            self._add_part(part, weight, weight[columns], None if total is None else total[columns])
        if d_weight is not None and total is not None and total is not d_weight:
            d_weight.copy_(total)

    def _add_part(self, part: Part, slab_weight: Tensor, weight: Tensor, d_weight: Tensor | None) -> None:
        work, up = self.work, self.up
        _, rows, first, last, turn = part
        d_z = up.d_logits(rows, pad_columns(weight) if self.sparse else slab_weight, first, last)  # [R, columns]
        if self.d_bias is not None:
            self.d_bias[first:last] += d_z.sum(0)
        if self.d_aw is not None and work.adapter_hidden is not None:
            self.d_aw[first:last].addmm_(d_z.t(), work.adapter_hidden[rows])
        terms = []
        if self.d_ah is not None and work.adapter_weight is not None:
            terms.append((self.d_ah[rows], torch.mm(d_z, work.adapter_weight[first:last])))
        d_z = (d_z if up.boost is None else d_z.mul_(up.boost)).to(work.operand_dtype)
        if d_weight is not None:
            add_product_of_tile(d_weight, d_z.t(), work.hidden_rows(rows), up.boost)
        if self.d_hidden is not None:
            terms.append((self.d_hidden[rows], product_of_tile(d_z, weight, up.boost)))
        if terms:
            self.sums.add(rows.start // work.tile_rows, turn, partial(_add_all, terms))

    def scattered(self) -> HeadGradients:
        """Return the gradients in the shapes and dtypes of what they are gradients of."""
        work, head = self.work, self.work.head
        return HeadGradients(
            None if self.d_hidden is None else work.scatter(self.d_hidden, head.hidden.dtype),
            self.d_weight,
            None if self.d_bias is None or head.bias is None else self.d_bias.to(head.bias.dtype),
            None
            if self.d_ah is None or head.adapter_hidden is None
            else work.scatter(self.d_ah, head.adapter_hidden.dtype),
            None if self.d_aw is None or head.adapter_weight is None else self.d_aw.to(head.adapter_weight.dtype),
        )


def _add_all(terms: list[tuple[Tensor, Tensor]]) -> None:
    """Add the second tensor of each pair to the first."""
    for total, term in terms:
        total += term


class GradientRows:
    """Per-row inputs of the backward, and the gradient of a tile of logits."""

    def __init__(self, work: Tiles, result: HeadResult, d_log_probs: Tensor, d_entropy: Tensor | None) -> None:
        self.work = work
        self.shift, self.log_total = work.gather(result.shift), work.gather(result.log_total)
        self.shift[work.count :] = math.inf  # padding rows get p = 0
        self.d_log_probs, self.log_probs = work.gather(d_log_probs), work.gather(result.log_probs)
        self.at_target = self.d_log_probs * -torch.expm1(self.log_probs)  # d_log_prob (1 - p), nothing cancels
        self.d_entropy = self.entropy = None
        if d_entropy is not None:
            self.d_entropy, self.entropy = work.gather(d_entropy), work.gather(result.entropy)
            log_p = self.log_probs.clamp(min=LOG_OF_NOTHING)
            self.at_target = self.at_target - self.d_entropy * log_p.exp() * (log_p + self.entropy)
        self.boost = None
        if work.operand_dtype == torch.float16:
            slope = work.head.logit_scale / (1 if work.temperature is None else work.temperature)
            live = self.shift < math.inf  # padding rows are not
            self.boost = power_of_two(self.at_target * slope, self.d_entropy, live)

    def d_logits(self, rows: slice, weight: Tensor, low: int, high: int) -> Tensor:
        """d(loss) / d(h W^T + bias) of one tile, [R, columns]."""
        z = self.work.logits(rows, weight, low, high)
        slope = self.work.tail_slope(rows, z)
        log_p = z.sub_(self.shift[rows, None]).sub_(self.log_total[rows, None])
        toward = -self.d_log_probs[rows, None]
        if self.d_entropy is not None and self.entropy is not None:
            p = log_p.clamp_(min=LOG_OF_NOTHING).exp()
            d_z = log_p.add_(self.entropy[rows, None]).mul_(-self.d_entropy[rows, None]).add_(toward).mul_(p)
        else:
            d_z = log_p.exp_().mul_(toward)
        in_slab, column = self.work.target_columns(rows, low, high)
        d_z.scatter_(1, column, torch.where(in_slab[:, None], self.at_target[rows, None], d_z.gather(1, column)))
        return d_z if slope is None else d_z.mul_(slope)
