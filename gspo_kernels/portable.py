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
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import HeadResult, HeadRows
from .validation import workspace_bytes

# Tiles of logits alive at the worst moment: logits, probabilities, soft-cap factor, one temporary.
_LIVE_TILES = 4
_ROWS = {"cpu": 256}  # enough rows to keep two cores busy on one slab of the head
_ROWS_ON_ACCELERATORS = 2048
_COLUMNS = 16384  # more would only leave the caches
_LOG_OF_NOTHING = -1000.0  # exp of it is 0 in fp32 and fp64, and 0 * it is 0


def tile_shape(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """(rows, columns) of a tile of logits, so that all live tiles together fit the workspace."""
    elements = workspace_bytes() // (_LIVE_TILES * dtype.itemsize)
    rows = _ROWS.get(device.type, _ROWS_ON_ACCELERATORS)
    return rows, min(_COLUMNS, max(elements // rows, 1))


def head_forward(head: HeadRows) -> HeadResult:
    """Log-probs (and entropies) of the target ids."""
    work = _Tiles(head, head.mask)
    n = work.padded
    slabs = work.slabs()
    lse = work.empty(len(slabs), n)  # log-sum-exp of each slab, the target's column left out
    slab_entropy = work.empty(len(slabs) if head.entropy else 0, n)  # of the slab's softmax, the target left out
    target_logit = work.empty(n).fill_(math.nan)  # stays NaN for an id outside the vocabulary
    with _exact_products(work.device):
        for s, (low, high) in enumerate(slabs):
            weight = work.weight_slab(low, high)
            for rows in work.chunks():
                z = work.logits(rows, weight, low, high)
                here, column = work.target_columns(rows, low, high)
                found = z.gather(1, column)
                target_logit[rows] = torch.where(here, found[:, 0], target_logit[rows])
                z.scatter_(1, column, torch.where(here[:, None], -math.inf, found))
                top = z.amax(1, keepdim=True)
                top.masked_fill_(top == -math.inf, 0)  # nothing but -inf in this slab
                z.sub_(top)
                weights = z.exp() if head.entropy else z.exp_()
                mass = weights.sum(1)
                lse[s, rows] = mass.log() + top[:, 0]
                if head.entropy:
                    mean = weights.mul_(z.clamp_(min=_LOG_OF_NOTHING)).sum(1)
                    slab_entropy[s, rows] = torch.where(mass > 0, mass.log() - mean / mass, 0)
    lse_others = lse.logsumexp(0)
    margin = target_logit - lse_others
    # Not z_y - lse: that loses 1 - p altogether on peaked rows.
    log_probs = F.logsigmoid(margin)
    entropy = _entropy(log_probs, margin, lse, lse_others, slab_entropy) if head.entropy else work.empty(0)
    return HeadResult(
        work.scatter(log_probs), work.scatter(entropy) if head.entropy else entropy,
        work.scatter(lse_others), work.scatter(target_logit),
    )  # fmt: skip


def _entropy(log_probs: Tensor, margin: Tensor, lse: Tensor, lse_others: Tensor, slab_entropy: Tensor) -> Tensor:
    """Entropy by the chain rule (is it the target? which slab? which column?): positive terms, nothing cancels."""
    log_share = torch.where(lse == -math.inf, _LOG_OF_NOTHING, lse - lse_others)
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
    moved = d_log_probs != 0
    if d_entropy is not None:
        moved = moved | (d_entropy != 0)
    work = _Tiles(head, head.mask & moved)
    lse_others, target_logit = work.gather(result.lse_others), work.gather(result.target_logit)
    lse = torch.logaddexp(lse_others, target_logit)
    lse[work.count :] = math.inf  # padding rows get p = 0
    rest = torch.sigmoid(lse_others - target_logit)  # 1 - p of the target, without cancellation
    d_lp = work.gather(d_log_probs)
    d_ent = None if d_entropy is None else work.gather(d_entropy)
    entropy = None if d_entropy is None else work.gather(result.entropy)
    log_probs = work.gather(result.log_probs)
    boost = _power_of_two(d_lp, d_ent) if work.operand_dtype == torch.float16 else None

    need_hidden, need_weight, need_bias, need_ah, need_aw = needs
    d_hidden = work.zeros(work.padded, head.hidden.shape[1]) if need_hidden else None
    d_weight = torch.zeros_like(head.weight) if need_weight else None
    d_bias = work.zeros(head.weight.shape[0]) if need_bias else None
    d_ah = work.zeros(work.padded, work.rank) if need_ah else None
    d_aw = work.zeros(head.weight.shape[0], work.rank) if need_aw else None
    with _exact_products(work.device):
        for low, high in work.slabs():
            weight = work.weight_slab(low, high)
            d_weight_slab = work.zeros(high - low, weight.shape[1]) if need_weight else None
            for rows in work.chunks():
                z = work.logits(rows, weight, low, high)
                slope = work.tail_slope(rows, z)
                here, column = work.target_columns(rows, low, high)
                log_p = z.sub_(lse[rows, None])
                up = -d_lp[rows, None]
                at_target = d_lp[rows] * rest[rows]
                if d_ent is not None and entropy is not None:
                    log_p.clamp_(min=_LOG_OF_NOTHING)
                    p = log_p.exp()
                    d_z = log_p.add_(entropy[rows, None]).mul_(-d_ent[rows, None]).add_(up).mul_(p)
                    own = log_probs[rows].clamp(min=_LOG_OF_NOTHING)
                    at_target = at_target - d_ent[rows] * own.exp() * (own + entropy[rows])
                else:
                    d_z = log_p.exp_().mul_(up)
                d_z.scatter_(1, column, torch.where(here[:, None], at_target[:, None], d_z.gather(1, column)))
                if slope is not None:
                    d_z.mul_(slope)
                if d_bias is not None:
                    d_bias[low:high] += d_z.sum(0)
                if d_ah is not None and work.adapter_weight is not None:
                    d_ah[rows].addmm_(d_z, work.adapter_weight[low:high])
                if d_aw is not None and work.adapter_hidden is not None:
                    d_aw[low:high].addmm_(d_z.t(), work.adapter_hidden[rows])
                d_z = (d_z if boost is None else d_z * boost).to(work.operand_dtype)
                if d_hidden is not None:
                    _add_product(d_hidden[rows], d_z, weight, boost)
                if d_weight_slab is not None:
                    _add_product(d_weight_slab, d_z.t(), work.hidden[rows], boost)
            if d_weight is not None and d_weight_slab is not None:
                d_weight[low:high] = d_weight_slab
    return (
        None if d_hidden is None else work.scatter(d_hidden).to(head.hidden.dtype),
        d_weight,
        None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype),
        None if d_ah is None or head.adapter_hidden is None else work.scatter(d_ah).to(head.adapter_hidden.dtype),
        None if d_aw is None or head.adapter_weight is None else d_aw.to(head.adapter_weight.dtype),
    )


class _Tiles:
    """The rows that count, gathered, and the tiles they are computed in."""

    def __init__(self, head: HeadRows, keep: Tensor) -> None:
        self.head, self.device = head, head.hidden.device
        self.dtype = torch.float64 if head.hidden.dtype == torch.float64 else torch.float32
        on_tensor_cores = self.device.type == "cuda" and head.hidden.dtype.itemsize == 2 and torch.version.hip is None
        self.operand_dtype = head.hidden.dtype if on_tensor_cores else self.dtype
        self.tile_rows, self.tile_columns = tile_shape(self.device, self.dtype)
        self.index = keep.nonzero()[:, 0]
        self.count = self.index.shape[0]
        self.padded = -(-self.count // self.tile_rows) * self.tile_rows
        self.hidden = self.gather(head.hidden, self.operand_dtype)
        self.target_ids = self.gather(head.target_ids, torch.int64)
        self.temperature = head.temperature
        if self.temperature is not None and self.temperature.ndim:
            self.temperature = self.gather(self.temperature)
            self.temperature[self.count :] = 1
        self.adapter_hidden = self.adapter_weight = None
        self.rank = 0
        if head.adapter_hidden is not None and head.adapter_weight is not None:
            self.adapter_hidden = self.gather(head.adapter_hidden)
            self.adapter_weight = head.adapter_weight.to(self.dtype)
            self.rank = self.adapter_weight.shape[1]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def gather(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[N, ...] -> [padded, ...], zeros after the rows that count."""
        out = torch.zeros((self.padded, *x.shape[1:]), dtype=dtype or self.dtype, device=self.device)
        out[: self.count] = x[self.index]
        return out

    def scatter(self, x: Tensor) -> Tensor:
        """[padded, ...] -> [N, ...], zeros at the rows that do not count."""
        out = self.zeros(self.head.hidden.shape[0], *x.shape[1:])
        out[self.index] = x[: self.count]
        return out

    def slabs(self) -> list[tuple[int, int]]:
        return [
            (low, min(low + self.tile_columns, self.head.vocab_size))
            for low in range(0, self.head.vocab_size, self.tile_columns)
        ]

    def chunks(self) -> Iterator[slice]:
        return (slice(low, low + self.tile_rows) for low in range(0, self.padded, self.tile_rows))

    def weight_slab(self, low: int, high: int) -> Tensor:
        return self.head.weight[low:high].to(self.operand_dtype)

    def target_columns(self, rows: slice, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Which rows have their target in this slab, [R]; and at which of its columns, [R, 1] (0 for the others)."""
        ids = self.target_ids[rows]
        here = (ids >= low) & (ids < high)
        return here, torch.where(here, ids - low, 0)[:, None]

    def logits(self, rows: slice, weight: Tensor, low: int, high: int) -> Tensor:
        """[R, columns] in fp32 or fp64, the whole head applied."""
        head = self.head
        z = _product(self.hidden[rows], weight.t())
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
            capped = (
                z / head.logit_softcap
                if self.temperature is None
                else z * (self._temperature(rows) / head.logit_softcap)
            )
            slope = capped.square_().neg_().add_(1).mul_(head.logit_scale)
        if self.temperature is not None:
            slope = slope / self._temperature(rows)
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


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """fp32 products in fp32: neither autocast nor a global request for TF32 or bf16 products reaches the logits."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    backend = backend.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        backend.fp32_precision = before
