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

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import HeadResult, HeadRows, accumulator
from .precision import exact_products
from .validation import workspace_bytes

_LIVE_TILES = 4  # at the worst moment: logits, probabilities, soft-cap factor, one temporary
_TILE_ON_CPU = (128, 4096)  # rows enough to make a slab of the head worth reading, columns that stay in the caches
_TILE_ELSEWHERE = (2048, 65536)
_LOG_OF_NOTHING = -1000.0  # exp of it is 0 in fp32 and fp64, and 0 * it is 0


def tile_shape(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """(rows, columns) of a tile of logits, so that all live tiles together fit the workspace."""
    elements = workspace_bytes() // (_LIVE_TILES * dtype.itemsize)
    rows, columns = _TILE_ON_CPU if device.type == "cpu" else _TILE_ELSEWHERE
    return rows, min(columns, max(elements // rows, 1))


def operand_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operands are multiplied; half only where the product comes out in fp32."""
    tensor_cores = device.type == "cuda" and torch.version.hip is None
    return dtype if tensor_cores and dtype.itemsize == 2 else accumulator(dtype)


def head_forward(head: HeadRows) -> HeadResult:
    """Log-probs (and entropies) of the target ids."""
    work = _Tiles(head, head.mask)
    slabs, n = work.slabs(), work.padded
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
                mass = weights.sum(1)
                top[s, rows], log_mass[s, rows] = largest, mass.log()
                if head.entropy:
                    mean = weights.mul_(z.clamp_(min=_LOG_OF_NOTHING)).sum(1)
                    slab_entropy[s, rows] = torch.where(mass > 0, mass.log() - mean / mass, 0)
    largest = _finite(top.amax(0))
    slab_share = torch.where(top == -math.inf, -math.inf, top - largest + log_mass)
    others = slab_share.logsumexp(0)  # log-sum-exp of the logits except the target's, less the largest of them
    # Not target_logit - lse: that loses 1 - p altogether on peaked rows.
    margin = (target_logit - largest) - others
    log_probs = F.logsigmoid(margin)
    entropy = _entropy(log_probs, margin, slab_share - others, slab_entropy) if head.entropy else None
    shift = torch.maximum(largest, target_logit)
    log_total = torch.logaddexp(others + (largest - shift), target_logit - shift)
    entropy = work.zeros(0) if entropy is None else work.scatter(entropy)
    return HeadResult(work.scatter(log_probs), entropy, work.scatter(shift), work.scatter(log_total))


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
    head: HeadRows, result: HeadResult, d_log_probs: Tensor, d_entropy: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of (hidden, weight, bias, adapter_hidden, adapter_weight), None where `needs` is False.

    d_logits = d_log_prob (onehot - p) - d_entropy p (log p + entropy), times the derivative of the head's tail.
    """
    moved = d_log_probs != 0 if d_entropy is None else (d_log_probs != 0) | (d_entropy != 0)
    work = _Tiles(head, head.mask & moved)
    up = _Upstream(work, result, d_log_probs, d_entropy)
    need_hidden, need_weight, need_bias, need_ah, need_aw = needs
    d_hidden = work.zeros(work.padded, head.hidden.shape[1]) if need_hidden else None
    d_weight = torch.zeros_like(head.weight) if need_weight else None
    d_bias = work.zeros(head.weight.shape[0]) if need_bias else None
    d_ah = work.zeros(work.padded, work.rank) if need_ah else None
    d_aw = work.zeros(head.weight.shape[0], work.rank) if need_aw else None
    with exact_products(work.device):
        for low, high in work.slabs():
            weight = work.weight_slab(low, high)
            d_weight_slab = None  # accumulated over all rows in full precision, then rounded and written once
            if d_weight is not None:
                full = d_weight.dtype == work.dtype
                d_weight_slab = d_weight[low:high] if full else work.zeros(high - low, weight.shape[1])
            for rows in work.chunks():
                d_z = up.d_logits(rows, weight, low, high)
                if d_bias is not None:
                    d_bias[low:high] += d_z.sum(0)
                if d_ah is not None and work.adapter_weight is not None:
                    d_ah[rows].addmm_(d_z, work.adapter_weight[low:high])
                if d_aw is not None and work.adapter_hidden is not None:
                    d_aw[low:high].addmm_(d_z.t(), work.adapter_hidden[rows])
                d_z = (d_z if up.boost is None else d_z.mul_(up.boost)).to(work.operand_dtype)
                if d_hidden is not None:
                    _add_product(d_hidden[rows], d_z, weight, up.boost)
                if d_weight_slab is not None:
                    _add_product(d_weight_slab, d_z.t(), work.hidden_rows(rows), up.boost)
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


class _Upstream:
    """What the backward knows of each live row, and the gradient of a tile of logits from it."""

    def __init__(self, work: _Tiles, result: HeadResult, d_log_probs: Tensor, d_entropy: Tensor | None) -> None:
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
        is_fp16 = work.operand_dtype == torch.float16
        self.boost = _power_of_two(self.d_log_probs, self.d_entropy) if is_fp16 else None

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


class _Tiles:
    """The rows that count, gathered, and the tiles they are computed in."""

    def __init__(self, head: HeadRows, keep: Tensor) -> None:
        self.head, self.device = head, head.hidden.device
        self.dtype = accumulator(head.hidden.dtype)
        self.operand_dtype = operand_dtype(self.device, head.hidden.dtype)
        self.tile_rows, self.tile_columns = tile_shape(self.device, self.dtype)
        self.index = keep.nonzero()[:, 0]
        self.count = self.index.shape[0]
        self.padded = -(-self.count // self.tile_rows) * self.tile_rows
        self.hidden = self.gather(head.hidden, head.hidden.dtype)
        self.target_ids = self.gather(head.target_ids, torch.int64)
        self.temperature = head.temperature
        if self.temperature is not None and self.temperature.ndim:
            self.temperature = self.gather(self.temperature)
            self.temperature[self.count :] = 1
        self.adapter_hidden, self.adapter_weight, self.rank = None, None, 0
        if head.adapter_hidden is not None and head.adapter_weight is not None:
            self.adapter_hidden = self.gather(head.adapter_hidden)
            self.adapter_weight = head.adapter_weight.to(self.dtype)
            self.rank = self.adapter_weight.shape[1]

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def gather(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[N, ...] -> [padded, ...], zeros after the rows that count."""
        out = torch.zeros((self.padded, *x.shape[1:]), dtype=dtype or self.dtype, device=self.device)
        out[: self.count] = x[self.index]
        return out

    def scatter(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[padded, ...] -> [N, ...], zeros at the rows that do not count."""
        out = torch.zeros((self.head.hidden.shape[0], *x.shape[1:]), dtype=dtype or self.dtype, device=self.device)
        out[self.index] = x[: self.count].to(out.dtype)
        return out

    def slabs(self) -> list[tuple[int, int]]:
        vocab, width = self.head.vocab_size, self.tile_columns
        return [(low, min(low + width, vocab)) for low in range(0, vocab, width)]

    def chunks(self) -> Iterator[slice]:
        return (slice(low, low + self.tile_rows) for low in range(0, self.padded, self.tile_rows))

    def weight_slab(self, low: int, high: int) -> Tensor:
        return self.head.weight[low:high].to(self.operand_dtype)

    def hidden_rows(self, rows: slice) -> Tensor:
        return self.hidden[rows].to(self.operand_dtype)

    def target_columns(self, rows: slice, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Which rows have their target in this slab, [R]; and at which of its columns, [R, 1] (0 for the others)."""
        ids = self.target_ids[rows]
        here = (ids >= low) & (ids < high)
        return here, torch.where(here, ids - low, 0)[:, None]

    def logits(self, rows: slice, weight: Tensor, low: int, high: int) -> Tensor:
        """[R, columns] in fp32 or fp64, the whole head applied."""
        head = self.head
        z = _product(self.hidden_rows(rows), weight.t())
        if self.adapter_hidden is not None and self.adapter_weight is not None:
            z.addmm_(self.adapter_hidden[rows], self.adapter_weight[low:high].t())
        if head.bias is not None:
            z.add_(head.bias[low:high])
        if head.logit_scale != 1:
            z.mul_(head.logit_scale)
        if head.logit_softcap is not None:
            z.div_(head.logit_softcap).tanh_().mul_(head.logit_softcap)
        if self.temperature is not None:
            z.div_(self._temperature(rows))
        return z

    def tail_slope(self, rows: slice, z: Tensor) -> Tensor | float | None:
        """d(logit) / d(h W^T + bias): a tile, a column, a number, or None for 1."""
        head = self.head
        slope: Tensor | float = head.logit_scale
        if head.logit_softcap is not None:
            t = 1 if self.temperature is None else self._temperature(rows)
            slope = (z * (t / head.logit_softcap)).square_().neg_().add_(1).mul_(head.logit_scale)
        if self.temperature is not None:
            t = self._temperature(rows)
            slope = slope.div_(t) if isinstance(slope, Tensor) else slope / t
        return None if isinstance(slope, float | int) and slope == 1 else slope

    def _temperature(self, rows: slice) -> Tensor:
        assert self.temperature is not None
        return self.temperature[rows, None] if self.temperature.ndim else self.temperature


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in fp32 (fp64 for fp64)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype.itemsize == 2 else torch.mm(a, b)


def _add_product(into: Tensor, a: Tensor, b: Tensor, boost: Tensor | None) -> None:
    if a.dtype.itemsize == 2:
        product = _product(a, b)
        into.add_(product if boost is None else product / boost)
    else:
        into.addmm_(a, b)


def _power_of_two(*gradients: Tensor | None) -> Tensor:
    """Brings the largest gradient near 1 before it is rounded to fp16, which has no exponents below 2^-24."""
    largest = torch.stack([g.abs().amax() for g in gradients if g is not None and g.numel()] or [torch.ones(())]).amax()
    return torch.where((largest > 0) & largest.isfinite(), torch.exp2(-torch.ceil(torch.log2(largest))), 1.0)
