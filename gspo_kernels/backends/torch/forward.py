"""Log-probs and entropies of a head, tile by tile. Must match the Triton backend's `forward.py`.

Logits are fp32 (fp64 for fp64 inputs) and never rounded. Each slab of the vocabulary leaves, per row and without the
target's column, its largest logit and its mass; a reduction in a fixed order adds them up.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..precision import exact_products
from ..rows import HeadResult, HeadRows, TileShares
from . import workers
from .tiles import LOG_OF_NOTHING, Tiles, cell_shape


def head_forward(head: HeadRows) -> HeadResult:
    """Compute log-probs (and entropies) of the target ids."""
    return forward_with_shares(head)[0]


def forward_with_shares(head: HeadRows, wanted: bool = False) -> tuple[HeadResult, TileShares | None]:
    """Run `head_forward`; if wanted, also return the probability mass of each vocabulary tile."""
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
            in_slab, column = work.target_columns(rows, low, high)
            logit = z.gather(1, column)
            self.at_target[s, rows] = logit[:, 0]
            z.scatter_(1, column, torch.where(in_slab[:, None], -math.inf, logit))
            largest = z.amax(1)
            z.sub_(_finite(largest)[:, None])
            weights = z.exp() if entropy else z.exp_()
            cells = F.pad(weights, (0, -weights.shape[1] % columns)).reshape(len(weights), -1, columns).sum(2)
            if len(self.share):
                self.share[low // columns : low // columns + cells.shape[1], rows] = cells.t()
            mass = cells.sum(1)
            self.top[s, rows], self.log_mass[s, rows] = largest, mass.log()
            if entropy:
                mean = weights.mul_(z.clamp_(min=LOG_OF_NOTHING)).sum(1)
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
    log_share = torch.where(log_share > LOG_OF_NOTHING, log_share, LOG_OF_NOTHING)  # also if there are no others
    of_others = (log_share.exp() * (slab_entropy - log_share)).sum(0)
    log_p_others = F.logsigmoid(-margin).clamp(min=LOG_OF_NOTHING)
    return log_p_others.exp() * (of_others - log_p_others) - log_probs.exp() * log_probs.clamp(min=LOG_OF_NOTHING)
