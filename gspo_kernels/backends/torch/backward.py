"""Gradients of a head. Logits are recomputed a slab of the vocabulary at a time.

    d_logits = [d_log_prob (onehot - p) - d_entropy p (log p + entropy)] * slope

This is the gradient with respect to h W^T + bias. p is the softmax of a row's logits, onehot is 1 in the target's
column and 0 elsewhere, and slope is the derivative of scale, soft-cap and temperature (`Tiles.tail_slope`). Must match
the Triton backend's `backward.py` and `gradient_tile.py`.

Only rows with a gradient are gathered. On a CPU a slab is computed by one thread. Each slab of d_weight is written
once, and d_hidden is summed in a fixed order.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import exact_products, multiplies_bf16, pad_columns, power_of_two
from ..rows import Cached, HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient
from . import workers
from .cached_tile import CachedTiles
from .tiles import LOG_OF_NOTHING, Tiles, add_product_of_tile, product_of_tile

# On a CPU with native bf16 matmul: the most bytes of d_logits that one bf16 product multiplies.
_D_LOGITS_BYTES = 16 * 2**20


def head_backward(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    needs: NeedsGradient,
    live_tiles: LiveTiles | None = None,
    cached: Cached | None = None,
) -> HeadGradients:
    """Compute the gradients of the head's operands, None where `needs` is False."""
    has_gradient = d_log_probs != 0 if d_entropy is None else (d_log_probs != 0) | (d_entropy != 0)  # [N]
    count, sparse = 0, False
    if live_tiles is not None and live_tiles.counts.numel():
        count, sparse = live_tiles.counts.tolist()
    if live_tiles is not None and sparse:
        index, cells = live_tiles.order[:count], live_tiles.cells
    else:
        index, cells = (head.mask & has_gradient).nonzero()[:, 0], None
    tiles = Tiles(head, index)
    work_list = WorkList(tiles, cells)
    logit_gradients = LogitGradients(tiles, result, d_log_probs, d_entropy, cached)
    gradients = _Gradients(tiles, logit_gradients, needs, work_list.sparse)
    with exact_products(tiles.device):
        tiles.run(gradients.add_slab, work_list.by_slab(), gradients.sums)
    return gradients.scattered()


class Run(NamedTuple):
    """Adjacent columns of one slab that the backward computes together, for one chunk of rows."""

    slab: tuple[int, int]  # (first column, last column + 1) of the slab
    rows: slice  # the chunk
    first: int  # first column of the run
    end: int  # last column of the run + 1
    turn: int  # number of earlier runs of the same chunk; d_hidden is summed in this order


class WorkList:
    """The runs of a backward: all slabs of all chunks, or with `cells` [row blocks, tiles] bool only the True cells."""

    def __init__(self, tiles: Tiles, cells: Tensor | None) -> None:
        self.tiles = tiles
        self.sparse = cells is not None
        self.columns = tiles.cell_columns
        self.cells: list[list[bool]] = [] if cells is None else cells.tolist()
        shape = -(-tiles.head.hidden.shape[0] // tiles.tile_rows), -(-tiles.head.vocab_size // self.columns)
        if cells is not None and tuple(cells.shape) != shape:
            raise RuntimeError(
                f"the forward divided d_logits into {tuple(cells.shape)} cells, the backward into {shape}: "
                "TunableOp must not be switched on or off between them"
            )

    def by_slab(self) -> list[list[Run]]:
        """Group the runs by slab, and leave out slabs without runs."""
        turns: dict[int, int] = {}
        slabs = []
        for low, high in self.tiles.slabs:
            runs = []
            for rows, first, end in self._columns(low, high):
                turn = turns[rows.start] = turns.get(rows.start, -1) + 1
                runs.append(Run((low, high), rows, first, end, turn))
            if runs:
                slabs.append(runs)
        return slabs

    def _columns(self, low: int, high: int) -> list[tuple[slice, int, int]]:
        """The runs of a slab, as (chunk, first column, last column + 1)."""
        if not self.sparse:
            return [(rows, low, high) for rows in self.tiles.chunks()]
        runs, columns = [], self.columns
        # `cells` covers all rows, sorted so that rows without a gradient come last. Those rows are not gathered, so
        # there may be fewer chunks than rows of `cells`; hence strict=False.
        for rows, cells in zip(self.tiles.chunks(), self.cells, strict=False):
            begin = low // columns
            for computed, group in itertools.groupby(cells[begin : -(-high // columns)]):
                end = begin + len(list(group))
                if computed:
                    runs.append((rows, begin * columns, min(end * columns, high)))
                begin = end
        return runs


class _Gradients:
    """Sums that become the gradients.

    The gradients of hidden states and adapter_hidden are sums over slabs. The gradients of weight, bias and
    adapter_weight are sums over chunks of rows.
    """

    def __init__(self, tiles: Tiles, logit_gradients: LogitGradients, needs: NeedsGradient, sparse: bool) -> None:
        self.tiles, self.logit_gradients, self.sparse = tiles, logit_gradients, sparse
        # On a CPU with native bf16 matmul, products are rounded to bf16, as in PyTorch.
        self.rounds = not sparse and multiplies_bf16(tiles.device) and tiles.head.hidden.dtype == torch.bfloat16
        self.product_dtype = torch.bfloat16 if self.rounds else tiles.operand_dtype
        need_hidden, need_weight, need_bias, need_ah, need_aw = needs
        weight = tiles.head.weight  # [V, H]
        self.d_hidden = tiles.zeros(tiles.padded, weight.shape[1]) if need_hidden else None
        self.d_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if need_weight else None
        self.d_bias = tiles.zeros(weight.shape[0]) if need_bias else None
        self.d_ah = tiles.zeros(tiles.padded, tiles.rank) if need_ah else None  # of adapter_hidden
        self.d_aw = tiles.zeros(weight.shape[0], tiles.rank) if need_aw else None  # of adapter_weight
        # Keeps the additions of several threads to d_hidden and d_ah in order. Each chunk of rows is one sum.
        self.sums = None
        if tiles.threads > 1:
            self.sums = workers.Sums(tiles.padded // tiles.tile_rows, tiles.waiting_products())

    def add_slab(self, runs: list[Run]) -> None:
        """Compute d_logits of the runs of one slab, and add their terms to all gradients."""
        tiles, (low, high) = self.tiles, runs[0].slab
        d_weight = None if self.d_weight is None else self.d_weight[low:high]
        weight = None  # the slab in the operands' dtype, unless all tiles are cached and multiplied in bf16
        if not self.rounds or not all(self.logit_gradients.keep(run.rows) for run in runs):
            weight = tiles.weight_slab(low, high)
        # If products are rounded to half precision, d_weight of several runs is one product.
        size = max(_D_LOGITS_BYTES // (2 * (high - low) * tiles.tile_rows), 1) if self.rounds else 1
        groups = [runs[i : i + size] for i in range(0, len(runs), size)]
        # The sum over rows, in fp32 or fp64. If d_weight is half precision, it is rounded once, at the end.
        total = d_weight
        if d_weight is not None and d_weight.dtype != tiles.dtype and not (self.rounds and len(groups) == 1):
            total = tiles.zeros(*d_weight.shape)
        for group in groups:
            columns = slice(group[0].first - low, group[0].end - low)
            self._add_group(group, weight, None if total is None else total[columns])
        if d_weight is not None and total is not None and total is not d_weight:
            d_weight.copy_(total)

    def _add_group(self, runs: list[Run], slab_weight: Tensor | None, d_weight: Tensor | None) -> None:
        """Add the terms of runs of the same columns. `d_weight` has these columns, `slab_weight` all of the slab."""
        tiles, boost, (low, _) = self.tiles, self.logit_gradients.boost, runs[0].slab
        first, end = runs[0].first, runs[0].end
        weight, tile_weight = tiles.head.weight[first:end], slab_weight
        if slab_weight is not None and not self.rounds:
            weight = slab_weight[first - low : end - low]
            tile_weight = pad_columns(weight) if self.sparse else slab_weight
        rounded = []
        for run in runs:
            d_z = self.logit_gradients.d_logits(run.rows, tile_weight, first, end)
            if self.d_bias is not None:
                self.d_bias[first:end] += d_z.sum(0)
            if self.d_aw is not None and tiles.adapter_hidden is not None:
                self.d_aw[first:end].addmm_(d_z.t(), tiles.adapter_hidden[run.rows])
            terms = []
            if self.d_ah is not None and tiles.adapter_weight is not None:
                terms.append((self.d_ah[run.rows], torch.mm(d_z, tiles.adapter_weight[first:end])))
            d_z = (d_z if boost is None else d_z.mul_(boost)).to(self.product_dtype)
            rounded.append(d_z)
            if self.d_hidden is not None:
                terms.append((self.d_hidden[run.rows], product_of_tile(d_z, weight, boost)))
            if self.sums is None:
                _add_all(terms)
            elif terms:
                self.sums.add(run.rows.start // tiles.tile_rows, run.turn, partial(_add_all, terms))
        if d_weight is not None:
            hidden = tiles.hidden[runs[0].rows.start : runs[-1].rows.stop].to(self.product_dtype)
            d_z = rounded[0] if len(rounded) == 1 else torch.cat(rounded)
            if d_weight.dtype == tiles.dtype:
                add_product_of_tile(d_weight, d_z.t(), hidden, boost)
            else:
                torch.mm(d_z.t(), hidden, out=d_weight)

    def scattered(self) -> HeadGradients:
        """Convert the sums to gradients in the shapes and dtypes of the head's operands."""
        tiles, head = self.tiles, self.tiles.head
        return HeadGradients(
            None if self.d_hidden is None else tiles.scatter(self.d_hidden, head.hidden.dtype),
            self.d_weight,
            None if self.d_bias is None or head.bias is None else self.d_bias.to(head.bias.dtype),
            None
            if self.d_ah is None or head.adapter_hidden is None
            else tiles.scatter(self.d_ah, head.adapter_hidden.dtype),
            None if self.d_aw is None or head.adapter_weight is None else self.d_aw.to(head.adapter_weight.dtype),
        )


def _add_all(terms: list[tuple[Tensor, Tensor]]) -> None:
    """Add the second tensor of each pair to the first."""
    for total, term in terms:
        total += term


class LogitGradients:
    """Computes d_logits tile by tile. The per-row tensors for this are gathered, [padded] each."""

    def __init__(
        self, tiles: Tiles, result: HeadResult, d_log_probs: Tensor, d_entropy: Tensor | None, cached: Cached | None
    ) -> None:
        self.tiles = tiles
        self.cached = CachedTiles(tiles, cached, result) if cached is not None and len(cached.exponentials) else None
        per_row = torch.stack([result.shift, result.log_total, result.log_probs, d_log_probs.to(tiles.dtype)], 1)
        self.shift, self.log_total, self.log_probs, self.d_log_probs = tiles.gather(per_row).t().contiguous()
        self.shift[tiles.count :] = math.inf  # padding rows get p = 0
        # d_logits in the target's column: d_log_prob (1 - p) without cancellation.
        self.at_target = self.d_log_probs * -torch.expm1(self.log_probs)
        self.d_entropy = self.entropy = None
        if d_entropy is not None:
            self.d_entropy, self.entropy = tiles.gather(d_entropy), tiles.gather(result.entropy)
            log_p = self.log_probs.clamp(min=LOG_OF_NOTHING)
            self.at_target = self.at_target - self.d_entropy * log_p.exp() * (log_p + self.entropy)
        self.boost = None  # [] power of two by which d_logits are multiplied before they are rounded to fp16
        if tiles.operand_dtype == torch.float16:
            slope = tiles.head.logit_scale / (1 if tiles.temperature is None else tiles.temperature)
            is_row = self.shift < math.inf  # False for padding rows
            self.boost = power_of_two(self.at_target, self.d_entropy, is_row, slope)

    def keep(self, rows: slice) -> bool:
        """True if the forward cached the exponentials of a chunk of rows."""
        return self.cached is not None and self.cached.hold(rows)

    def d_logits(self, rows: slice, weight: Tensor | None, low: int, high: int) -> Tensor:
        """Compute d(loss) / d(h W^T + bias) of one tile, [rows, high - low].

        `weight` holds the columns of the tile, or of the entire slab. It is not used if the forward cached the tile.
        """
        cached = self.cached
        minus_d = -self.d_log_probs[rows, None]
        softcap = self.tiles.head.logit_softcap
        in_slab, column = self.tiles.target_columns(rows, low, high)
        if cached is not None and cached.hold(rows) and self.d_entropy is None and softcap is None:
            tile = cached.tile(rows, low, high)
            d_z = tile * minus_d.mul_(cached.scale(rows, low).exp()[:, None])
            slope = self.tiles.tail_slope(rows, tile)
        else:
            log_p, slope = self._log_p_and_slope(rows, weight, low, high)
            if self.d_entropy is not None and self.entropy is not None:
                p = log_p.clamp_(min=LOG_OF_NOTHING).exp()
                d_z = log_p.add_(self.entropy[rows, None]).mul_(-self.d_entropy[rows, None]).add_(minus_d).mul_(p)
            else:
                d_z = log_p.exp_().mul_(minus_d)
        d_z.scatter_(1, column, torch.where(in_slab[:, None], self.at_target[rows, None], d_z.gather(1, column)))
        return d_z if slope is None else d_z.mul_(slope)

    def _log_p_and_slope(
        self, rows: slice, weight: Tensor | None, low: int, high: int
    ) -> tuple[Tensor, Tensor | float | None]:
        """Compute log p of a tile, [rows, high - low], and the slope of the head's tail at its logits."""
        cached, softcap = self.cached, self.tiles.head.logit_softcap
        if cached is None or not cached.hold(rows):
            assert weight is not None
            z = self.tiles.logits(rows, weight, low, high)
            slope = self.tiles.tail_slope(rows, z)
            return z.sub_(self.shift[rows, None]).sub_(self.log_total[rows, None]), slope
        log_p = cached.tile(rows, low, high).to(self.tiles.dtype, copy=True).log_()
        log_p.add_(cached.scale(rows, low)[:, None])
        log_p.clamp_(min=LOG_OF_NOTHING)  # exponentials that were rounded to 0
        if softcap is None:
            return log_p, self.tiles.tail_slope(rows, log_p)
        total = (self.shift + self.log_total)[rows, None]
        total = torch.where(total == math.inf, 0, total)  # padding rows
        z = log_p + total
        in_slab, column = self.tiles.target_columns(rows, low, high)  # the target's logit is not cached
        target_logit = self.log_probs[rows, None] + total
        z.scatter_(1, column, torch.where(in_slab[:, None], target_logit, z.gather(1, column)))
        return log_p, self.tiles.tail_slope(rows, z)
