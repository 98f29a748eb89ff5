"""The torch backend: the same mathematics as the kernels, tile by tile, wherever torch runs.

Rows that do not count are gathered out before any matrix product: masked ones in the forward, and in the backward also
those whose gradient is zero. What is left is cut into tiles of a fixed number of rows (the last one padded with zeros)
and of vocabulary columns. The tile shape depends on device, dtype and GSPO_WORKSPACE_MIB and never on the batch,
because a matrix product of another shape rounds differently: so a row's log-prob is the same bits alone and in any
batch, and with equal weights the first importance ratio is exactly 1.

Logits are fp32 (fp64 for fp64 inputs) and never rounded. For half-precision inputs the operands are upcast slab by
slab, or on CUDA multiplied on tensor cores with an fp32 result. Reading how many rows count makes the host wait on
CUDA, once per pass.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .closed_form import closed_form as policy_forward
from .layout import HeadResult, HeadRows
from .live_tiles import LiveTiles, TileShares
from .portable_tiles import Tiles, add_product_of_tile, cell_shape
from .precision import exact_products, power_of_two, whole_columns

__all__ = ["cell_shape", "forward_with_shares", "head_backward", "head_forward", "policy_forward"]

_LOG_OF_NOTHING = -1000.0  # exp of it is 0 in fp32 and fp64, and 0 * it is 0


def head_forward(head: HeadRows) -> HeadResult:
    """Log-probs (and entropies) of the target ids."""
    return forward_with_shares(head)[0]


def forward_with_shares(head: HeadRows, wanted: bool = False) -> tuple[HeadResult, TileShares | None]:
    """The same, and if wanted the probabilities of tiles of columns."""
    work = Tiles(head, head.mask.nonzero()[:, 0])
    slabs, n = work.slabs(), work.padded
    block_rows, columns = cell_shape(head)
    share = work.zeros(-(-head.vocab_size // columns) if wanted else 0, max(n, 1))  # also if nothing counts
    # Of each slab, the target's column left out: largest logit, log of the sum relative to it, entropy of its softmax.
    top, log_mass = work.zeros(len(slabs), n), work.zeros(len(slabs), n)
    slab_entropy = work.zeros(len(slabs) if head.entropy else 0, n)
    target_logit = work.zeros(n).fill_(math.nan)  # stays NaN for an id outside the vocabulary
    with exact_products(work.device):
        for s, (low, high) in enumerate(slabs):
            weight = work.weight_slab(low, high)
            for rows in work.chunks():
                z = work.logits(rows, weight, low, high)
                here, column = work.target_columns(rows, low, high)
                found = z.gather(1, column)
                target_logit[rows] = torch.where(here, found[:, 0], target_logit[rows])
                z.scatter_(1, column, torch.where(here[:, None], -math.inf, found))
                largest = z.amax(1)
                z.sub_(_finite(largest)[:, None])
                weights = z.exp() if head.entropy else z.exp_()
                cells = F.pad(weights, (0, -weights.shape[1] % columns)).reshape(len(weights), -1, columns).sum(2)
                if wanted:
                    share[low // columns : low // columns + cells.shape[1], rows] = cells.t()
                mass = cells.sum(1)
                top[s, rows], log_mass[s, rows] = largest, mass.log()
                if head.entropy:
                    mean = weights.mul_(z.clamp_(min=_LOG_OF_NOTHING)).sum(1)
                    slab_entropy[s, rows] = torch.where(mass > 0, mass.log() - mean / mass, 0)
    largest = _finite(top.amax(0))
    slab_share = torch.where(top == -math.inf, -math.inf, top - largest + log_mass)
    others = slab_share.logsumexp(0)  # log-sum-exp of the logits except the target's, less the largest of them
    # Not target_logit - lse: that loses 1 - p altogether on peaked rows.
    over, lost = _difference(target_logit, largest)
    margin, lost_too = _difference(torch.where(target_logit == math.inf, math.nan, over), others)
    # log p = log sigmoid(margin), rounded once: two more roundings would show in the mean of a short sequence.
    lost = (lost + lost_too) * F.sigmoid(-margin)
    log_probs = margin.clamp(max=0) + (lost - margin.abs().neg().exp().log1p())
    entropy = _entropy(log_probs, margin, slab_share - others, slab_entropy) if head.entropy else None
    shift = torch.maximum(largest, target_logit)
    log_total = torch.logaddexp(others + (largest - shift), target_logit - shift)
    entropy = work.zeros(0) if entropy is None else work.scatter(entropy)
    result = HeadResult(work.scatter(log_probs), entropy, work.scatter(shift), work.scatter(log_total))
    if not wanted:
        return result, None
    in_slab = (top - shift - log_total).exp_().repeat_interleave(work.tile_columns // columns, 0)
    share[:, :n].mul_(in_slab[: len(share)])
    place = torch.zeros(head.hidden.shape[0], dtype=torch.int64, device=work.device)
    place[work.index] = torch.arange(work.count, device=work.device)
    return result, TileShares(share, place, block_rows, columns)


def _difference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a - b, and what its rounding lost (D. E. Knuth); nothing is lost where it is not finite."""
    d = a - b
    back = d - a
    return d, ((a - (d - back)) - (b + back)).nan_to_num(0, 0, 0)


def _finite(largest: Tensor) -> Tensor:
    """A shift for exp: the largest logit, or 0 where there is none but -inf."""
    return torch.where(largest == -math.inf, 0, largest)


def _entropy(log_probs: Tensor, margin: Tensor, log_share: Tensor, slab_entropy: Tensor) -> Tensor:
    """Entropy by the chain rule (is it the target? which slab? which column?): positive terms, nothing cancels."""
    log_share = torch.where(log_share > _LOG_OF_NOTHING, log_share, _LOG_OF_NOTHING)  # also if there are no others
    of_others = (log_share.exp() * (slab_entropy - log_share)).sum(0)
    log_rest = F.logsigmoid(-margin).clamp(min=_LOG_OF_NOTHING)
    rest = log_rest.exp()
    return rest * (of_others - log_rest) - log_probs.exp() * log_probs.clamp(min=_LOG_OF_NOTHING)


def head_backward(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    needs: tuple[bool, ...],
    live: LiveTiles | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (hidden, weight, bias, adapter_hidden, adapter_weight), None where `needs` is False.

    d_logits = d_log_prob (onehot - p) - d_entropy p (log p + entropy), times the derivative of the head's tail.
    """
    moved = d_log_probs != 0 if d_entropy is None else (d_log_probs != 0) | (d_entropy != 0)
    count, sparse = live.counts.tolist() if live is not None and live.counts.numel() else (0, False)
    work = Tiles(head, live.order[:count] if live and sparse else (head.mask & moved).nonzero()[:, 0])
    runs = _Runs(work, live.cells if live and sparse else None)
    up = _Upstream(work, result, d_log_probs, d_entropy)
    need_hidden, need_weight, need_bias, need_ah, need_aw = needs
    d_hidden = work.zeros(work.padded, head.hidden.shape[1]) if need_hidden else None
    d_weight = torch.zeros_like(head.weight, memory_format=torch.contiguous_format) if need_weight else None
    d_bias = work.zeros(head.weight.shape[0]) if need_bias else None
    d_ah = work.zeros(work.padded, work.rank) if need_ah else None
    d_aw = work.zeros(head.weight.shape[0], work.rank) if need_aw else None
    with exact_products(work.device):
        for low, high in work.slabs():
            parts = runs.of_slab(low, high)
            if not parts:
                continue
            weight = work.weight_slab(low, high)
            d_weight_slab = None  # accumulated over all rows in full precision, then rounded and written once
            if d_weight is not None:
                full = d_weight.dtype == work.dtype
                d_weight_slab = d_weight[low:high] if full else work.zeros(high - low, weight.shape[1])
            for rows, first, last in parts:
                here = slice(first - low, last - low)
                d_z = up.d_logits(rows, whole_columns(weight[here]) if runs.sparse else weight, first, last)
                if d_bias is not None:
                    d_bias[first:last] += d_z.sum(0)
                if d_ah is not None and work.adapter_weight is not None:
                    d_ah[rows].addmm_(d_z, work.adapter_weight[first:last])
                if d_aw is not None and work.adapter_hidden is not None:
                    d_aw[first:last].addmm_(d_z.t(), work.adapter_hidden[rows])
                d_z = (d_z if up.boost is None else d_z.mul_(up.boost)).to(work.operand_dtype)
                if d_hidden is not None:
                    add_product_of_tile(d_hidden[rows], d_z, weight[here], up.boost)
                if d_weight_slab is not None:
                    add_product_of_tile(d_weight_slab[here], d_z.t(), work.hidden_rows(rows), up.boost)
                del d_z  # or it would still be alive beside the next tile
            if d_weight is not None and d_weight_slab is not None and d_weight.dtype != work.dtype:
                d_weight[low:high] = d_weight_slab
    return (
        None if d_hidden is None else work.scatter(d_hidden, head.hidden.dtype),
        d_weight,
        None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype),
        None if d_ah is None or head.adapter_hidden is None else work.scatter(d_ah, head.adapter_hidden.dtype),
        None if d_aw is None or head.adapter_weight is None else d_aw.to(head.adapter_weight.dtype),
    )


class _Runs:
    """The work list: which rows and columns are computed together."""

    def __init__(self, work: Tiles, cells: Tensor | None) -> None:
        self.work, self.sparse = work, cells is not None
        rows, self.columns = cell_shape(work.head)
        self.cells: list[list[bool]] = [] if cells is None else cells.tolist()
        shape = -(-work.head.hidden.shape[0] // rows), -(-work.head.vocab_size // self.columns)
        if cells is not None and tuple(cells.shape) != shape:
            raise RuntimeError(
                f"the forward cut d_logits into {tuple(cells.shape)} cells, the backward into {shape}: "
                "GSPO_WORKSPACE_MIB must not change between them"
            )

    def of_slab(self, low: int, high: int) -> list[tuple[slice, int, int]]:
        """(rows, first column, last column + 1) of a slab of columns: of each chunk of rows all, or its live cells."""
        if not self.sparse:
            return [(rows, low, high) for rows in self.work.chunks()]
        parts, columns = [], self.columns
        for rows, live in zip(self.work.chunks(), self.cells, strict=False):  # rows without a gradient have cells too
            at = low // columns
            for alive, run in itertools.groupby(live[at : -(-high // columns)]):
                end = at + len(list(run))
                if alive:
                    parts.append((rows, at * columns, min(end * columns, high)))
                at = end
        return parts


class _Upstream:
    """What the backward knows of each live row, and the gradient of a tile of logits from it."""

    def __init__(self, work: Tiles, result: HeadResult, d_log_probs: Tensor, d_entropy: Tensor | None) -> None:
        self.work = work
        self.shift, self.log_total = work.gather(result.shift), work.gather(result.log_total)
        self.shift[work.count :] = math.inf  # padding rows get p = 0
        self.d_log_probs, self.log_probs = work.gather(d_log_probs), work.gather(result.log_probs)
        self.at_target = self.d_log_probs * -torch.expm1(self.log_probs)  # d_log_prob (1 - p), nothing cancels
        self.d_entropy = self.entropy = None
        if d_entropy is not None:
            self.d_entropy, self.entropy = work.gather(d_entropy), work.gather(result.entropy)
            own = self.log_probs.clamp(min=_LOG_OF_NOTHING)
            self.at_target = self.at_target - self.d_entropy * own.exp() * (own + self.entropy)
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
            p = log_p.clamp_(min=_LOG_OF_NOTHING).exp()
            d_z = log_p.add_(self.entropy[rows, None]).mul_(-self.d_entropy[rows, None]).add_(toward).mul_(p)
        else:
            d_z = log_p.exp_().mul_(toward)
        here, column = self.work.target_columns(rows, low, high)
        d_z.scatter_(1, column, torch.where(here[:, None], self.at_target[rows, None], d_z.gather(1, column)))
        return d_z if slope is None else d_z.mul_(slope)
