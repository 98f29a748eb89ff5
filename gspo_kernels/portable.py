"""The torch backend: the same mathematics as the kernels, tile by tile, wherever torch runs.

Rows are gathered before any matrix product: unmasked rows in the forward, rows with a gradient in the backward. They
are cut into tiles of a fixed number of rows (the last one padded with zeros) and of vocabulary columns. The shape of a
tile depends on device, dtype, H, V and GSPO_WORKSPACE_MIB and never on the batch, because a matrix product of another
shape rounds differently: so a row's log-prob has the same bits alone and in any batch, and with equal weights the
first importance ratio is exactly 1.

On a CPU each thread computes tiles alone (`workers.py`). Logits are fp32 (fp64 for fp64 inputs) and never rounded. For
half-precision inputs the operands are upcast slab by slab, or on CUDA multiplied on tensor cores with an fp32 result.
Reading the number of gathered rows makes the host wait on CUDA, once per pass.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import workers
from .closed_form import closed_form as policy_forward
from .layout import HeadResult, HeadRows
from .live_tiles import LiveTiles, TileShares
from .portable_tiles import Part, Runs, Tiles, add_product_of_tile, cell_shape, product_of_tile
from .precision import exact_products, power_of_two, whole_columns

__all__ = ["cell_shape", "forward_with_shares", "head_backward", "head_forward", "policy_forward"]

_LOG_OF_NOTHING = -1000.0  # exp of it is 0 in fp32 and fp64, and 0 * it is 0


def head_forward(head: HeadRows) -> HeadResult:
    """Log-probs (and entropies) of the target ids."""
    return forward_with_shares(head)[0]


def forward_with_shares(head: HeadRows, wanted: bool = False) -> tuple[HeadResult, TileShares | None]:
    """Run `head_forward`; if wanted, also return the probability of each tile of columns."""
    work = Tiles(head, head.mask.nonzero()[:, 0])
    block_rows, columns = cell_shape(head)
    share = work.zeros(-(-head.vocab_size // columns) if wanted else 0, max(work.padded, 1))
    totals = _SlabTotals(work, columns, share)
    with exact_products(work.device):
        workers.run(totals.reduce, work.tasks(), work.threads)
    top, target_logit = totals.top, work.at_slab_of_target(totals.at_target)
    largest = _finite(top.amax(0))
    slab_share = torch.where(top == -math.inf, -math.inf, top - largest + totals.log_mass)
    others = slab_share.logsumexp(0)  # log-sum-exp of the logits except the target's, less the largest of them
    # Not target_logit - lse: that loses 1 - p altogether on peaked rows.
    over, lost = _difference(target_logit, largest)
    margin, lost_too = _difference(torch.where(target_logit == math.inf, math.nan, over), others)
    # log p = log sigmoid(margin), rounded once: two more roundings would show in the mean of a short sequence.
    lost = (lost + lost_too) * F.sigmoid(-margin)
    log_probs = margin.clamp(max=0) + (lost - margin.abs().neg().exp().log1p())
    entropy = _entropy(log_probs, margin, slab_share - others, totals.entropy) if head.entropy else None
    shift = torch.maximum(largest, target_logit)
    log_total = torch.logaddexp(others + (largest - shift), target_logit - shift)
    entropy = work.zeros(0) if entropy is None else work.scatter(entropy)
    result = HeadResult(work.scatter(log_probs), entropy, work.scatter(shift), work.scatter(log_total))
    if not wanted:
        return result, None
    in_slab = (top - shift - log_total).exp_().repeat_interleave(work.tile_columns // columns, 0)
    share[:, : work.padded].mul_(in_slab[: len(share)])
    place = torch.zeros(head.hidden.shape[0], dtype=torch.int64, device=work.device)
    place[work.index] = torch.arange(work.count, device=work.device)
    return result, TileShares(share, place, block_rows, columns)


class _SlabTotals:
    """Per slab and row, with the target's column left out, what the log-sum-exp over all columns is made of."""

    def __init__(self, work: Tiles, cell_columns: int, share: Tensor) -> None:
        self.work, self.cell_columns, self.slabs = work, cell_columns, work.slabs()
        shape = len(self.slabs), work.padded
        self.top, self.log_mass = work.zeros(*shape), work.zeros(*shape)  # largest logit; log of sum exp(z - largest)
        self.entropy = work.zeros(*shape) if work.head.entropy else work.zeros(0, work.padded)  # of the slab's softmax
        self.at_target = work.zeros(*shape)  # the logit at `target_columns`
        self.share = share  # [cells, padded] sum exp(z - largest of the slab) per cell; no rows if not wanted

    def reduce(self, task: tuple[int, list[slice]]) -> None:
        """Compute the logits of one slab for some chunks of rows, and reduce them."""
        s, chunks = task
        low, high = self.slabs[s]
        work, columns, entropy = self.work, self.cell_columns, self.work.head.entropy
        weight = work.weight_slab(low, high)
        for rows in chunks:
            z = work.logits(rows, weight, low, high)  # [R, columns of the slab]
            here, column = work.target_columns(rows, low, high)
            logit = z.gather(1, column)
            self.at_target[s, rows] = logit[:, 0]
            z.scatter_(1, column, torch.where(here[:, None], -math.inf, logit))
            largest = z.amax(1)
            z.sub_(_finite(largest)[:, None])
            weights = z.exp() if entropy else z.exp_()
            cells = F.pad(weights, (0, -weights.shape[1] % columns)).reshape(len(weights), -1, columns).sum(2)
            if len(self.share):
                self.share[low // columns : low // columns + cells.shape[1], rows] = cells.t()
            mass = cells.sum(1)
            self.top[s, rows], self.log_mass[s, rows] = largest, mass.log()
            if entropy:
                mean = weights.mul_(z.clamp_(min=_LOG_OF_NOTHING)).sum(1)
                self.entropy[s, rows] = torch.where(mass > 0, mass.log() - mean / mass, 0)


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
    runs = Runs(work, live.cells if live and sparse else None)
    gradients = _Gradients(work, _Upstream(work, result, d_log_probs, d_entropy), needs, runs.sparse)
    with exact_products(work.device):
        workers.run(gradients.add_slab, runs.by_slab(), work.threads, gradients.sums)
    return gradients.scattered()


class _Gradients:
    """The gradients as they are added up: over slabs for hidden states, over chunks of rows for the head."""

    def __init__(self, work: Tiles, up: _Upstream, needs: tuple[bool, ...], sparse: bool) -> None:
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
            here = slice(part.first - low, part.last - low)
            self._add_part(part, weight, weight[here], None if total is None else total[here])
        if d_weight is not None and total is not None and total is not d_weight:
            d_weight.copy_(total)

    def _add_part(self, part: Part, slab_weight: Tensor, weight: Tensor, d_weight: Tensor | None) -> None:
        work, up = self.work, self.up
        _, rows, first, last, turn = part
        d_z = up.d_logits(rows, whole_columns(weight) if self.sparse else slab_weight, first, last)  # [R, columns]
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

    def scattered(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the shapes and dtypes of what they are gradients of."""
        work, head = self.work, self.work.head
        return (
            None if self.d_hidden is None else work.scatter(self.d_hidden, head.hidden.dtype),
            self.d_weight,
            None if self.d_bias is None or head.bias is None else self.d_bias.to(head.bias.dtype),
            None if self.d_ah is None or head.adapter_hidden is None
            else work.scatter(self.d_ah, head.adapter_hidden.dtype),
            None if self.d_aw is None or head.adapter_weight is None else self.d_aw.to(head.adapter_weight.dtype),
        )  # fmt: skip


def _add_all(terms: list[tuple[Tensor, Tensor]]) -> None:
    """Add the second tensor of each pair to the first."""
    for total, term in terms:
        total += term


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
