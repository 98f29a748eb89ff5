"""Tiles of the torch backend: their shape, the rows that take part, and the logits of one tile.

The shape depends on device, dtype and GSPO_WORKSPACE_MIB and never on the batch, because a matrix product of another
shape rounds differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .layout import HeadRows, accumulator
from .precision import COLUMN_MULTIPLE, whole_columns
from .validation import workspace_bytes

_LIVE_TILES = 4  # at the worst moment: logits, probabilities, soft-cap factor, one temporary
_TILE_ON_CPU = (128, 4032)  # rows enough to make a slab of the head worth reading, columns that stay in the caches
_TILE_ELSEWHERE = (2048, 65536)
_CELL_ON_CPU, _CELL_ELSEWHERE = 168, 1024  # columns that a backward may leave out


def tile_shape(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """(rows, columns) of a tile of logits, so that all live tiles together fit the workspace."""
    elements = workspace_bytes() // (_LIVE_TILES * dtype.itemsize)
    rows, columns = _TILE_ON_CPU if device.type == "cpu" else _TILE_ELSEWHERE
    multiple = COLUMN_MULTIPLE if device.type == "cpu" else 1
    return rows, max(min(columns, elements // rows) // multiple, 1) * multiple


def operand_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operands are multiplied; half only where the product comes out in fp32."""
    tensor_cores = device.type == "cuda" and torch.version.hip is None
    return dtype if tensor_cores and dtype.itemsize == 2 else accumulator(dtype)


def cell_shape(head: HeadRows) -> tuple[int, int]:
    """(rows, columns) of the cells that a backward may leave out: a slab is cut where it can be."""
    rows, columns = tile_shape(head.hidden.device, accumulator(head.hidden.dtype))
    cell = _CELL_ON_CPU if head.hidden.device.type == "cpu" else _CELL_ELSEWHERE
    return rows, cell if columns % cell == 0 else columns


class Tiles:
    """The rows that count, gathered, and the tiles they are computed in."""

    def __init__(self, head: HeadRows, index: Tensor) -> None:
        self.head, self.device = head, head.hidden.device
        self.dtype = accumulator(head.hidden.dtype)
        self.operand_dtype = operand_dtype(self.device, head.hidden.dtype)
        self.tile_rows, self.tile_columns = tile_shape(self.device, self.dtype)
        self.index = index
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
        return whole_columns(self.head.weight[low:high].to(self.operand_dtype))

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
            z.addmm_(self.adapter_hidden[rows], whole_columns(self.adapter_weight[low:high]).t())
        z = z[:, : high - low]
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


def add_product_of_tile(into: Tensor, a: Tensor, b: Tensor, boost: Tensor | None) -> None:
    if a.dtype.itemsize == 2:
        product = _product(a, b)
        into.add_(product if boost is None else product / boost)
    else:
        into.addmm_(a, b)
