"""Tiles of the torch backend: their shape, the rows that take part, the work list, and the logits of one tile.

The shape depends on device, dtype, H, V and GSPO_WORKSPACE_MIB and never on the batch, because a matrix product of
another shape rounds differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import accumulator
from ..precision import COLUMN_MULTIPLE, pad_columns
from ..rows import HeadRows
from ..workspace import workspace_bytes

LOG_OF_NOTHING = -1000.0  # exp of it is 0 in fp32 and fp64, and 0 * it is 0
_LIVE_TILES = 4  # at the worst moment: logits, probabilities, soft-cap factor, one temporary
_TILE_ON_CPU = (128, 4032)  # rows enough to make a slab of the head worth reading, columns that stay in the caches
_TILE_ELSEWHERE = (2048, 65536)
_SLABS = 12  # at least, on a CPU, of a vocabulary of more than one tile
_SLAB_BYTES = 16 * 2**20  # largest fp32 copy of a slab of the head on a CPU, and of products waiting to be added
_CELL_ON_CPU, _CELL_ELSEWHERE = 168, 1024  # columns that a backward may leave out


def tile_shape(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Return (rows, columns) of a tile of logits, so that all live tiles together fit the workspace."""
    elements = workspace_bytes() // (_LIVE_TILES * dtype.itemsize)
    rows, columns = _TILE_ON_CPU if device.type == "cpu" else _TILE_ELSEWHERE
    multiple = COLUMN_MULTIPLE if device.type == "cpu" else 1
    return rows, max(min(columns, elements // rows) // multiple, 1) * multiple


def operand_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which operands are multiplied: half precision only where products accumulate in fp32."""
    tensor_cores = device.type == "cuda" and torch.version.hip is None
    return dtype if tensor_cores and dtype.itemsize == 2 else accumulator(dtype)


def slab_columns(head: HeadRows) -> int:
    """Return the columns of a tile: those of `tile_shape`, or on a CPU fewer, because its threads share work by slabs.

    There are then enough slabs for all threads, and where operands are copied to fp32 each thread's copies are small.
    """
    device, dtype = head.hidden.device, accumulator(head.hidden.dtype)
    columns = tile_shape(device, dtype)[1]
    if device.type != "cpu" or columns % _CELL_ON_CPU or head.vocab_size <= columns:
        return columns
    cells = -(-head.vocab_size // (_SLABS * _CELL_ON_CPU))
    if head.hidden.dtype != dtype:
        cells = min(cells, _SLAB_BYTES // (head.hidden.shape[1] * dtype.itemsize * _CELL_ON_CPU))
    return min(max(cells, 1) * _CELL_ON_CPU, columns)


def cell_shape(head: HeadRows) -> tuple[int, int]:
    """Return (rows, columns) of the cells that a backward may leave out. A slab is a whole number of cells."""
    rows, columns = tile_shape(head.hidden.device, accumulator(head.hidden.dtype))[0], slab_columns(head)
    cell = _CELL_ON_CPU if head.hidden.device.type == "cpu" else _CELL_ELSEWHERE
    return rows, cell if columns % cell == 0 else columns


class Tiles:
    """Gathered rows, and the tiles in which their logits are computed."""

    def __init__(self, head: HeadRows, index: Tensor) -> None:
        self.head, self.device = head, head.hidden.device
        self.dtype = accumulator(head.hidden.dtype)
        self.operand_dtype = operand_dtype(self.device, head.hidden.dtype)
        self.tile_rows, self.tile_columns = tile_shape(self.device, self.dtype)[0], slab_columns(head)
        self.threads = self._threads()
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

    def _threads(self) -> int:
        """Return how many threads compute tiles: as many as PyTorch has, if their tiles fit the workspace.

        1 means no threads of ours: PyTorch splits each operation over its own. So it is where there is only one slab.
        """
        if self.device.type != "cpu" or self.head.vocab_size <= self.tile_columns:
            return 1
        width, size = self.head.hidden.shape[1], self.dtype.itemsize
        tiles = size * self.tile_rows * (_LIVE_TILES * self.tile_columns + width)
        copies = 0 if self.head.weight.dtype == self.dtype else 2 * size * self.tile_columns * width
        fit = (workspace_bytes() - _SLAB_BYTES) // (tiles + copies)
        return max(min(torch.get_num_threads(), fit), 1)

    def kept_products(self) -> int:
        """Return how many products [R, H] may wait to be added to d_hidden."""
        return max(_SLAB_BYTES // (self.tile_rows * self.hidden.shape[1] * self.dtype.itemsize), 1)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def gather(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Gather rows: [N, ...] -> [padded, ...], zeros after the last row."""
        out = torch.zeros((self.padded, *x.shape[1:]), dtype=dtype or self.dtype, device=self.device)
        out[: self.count] = x[self.index]
        return out

    def scatter(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Scatter rows back: [padded, ...] -> [N, ...], zeros at all other rows."""
        out = torch.zeros((self.head.hidden.shape[0], *x.shape[1:]), dtype=dtype or self.dtype, device=self.device)
        out[self.index] = x[: self.count].to(out.dtype)
        return out

    def slabs(self) -> list[tuple[int, int]]:
        vocab, width = self.head.vocab_size, self.tile_columns
        return [(low, min(low + width, vocab)) for low in range(0, vocab, width)]

    def chunks(self) -> Iterator[slice]:
        return (slice(low, low + self.tile_rows) for low in range(0, self.padded, self.tile_rows))

    def tasks(self) -> list[tuple[int, list[slice]]]:
        """Split the forward into independent tasks (slab, chunks of rows), enough to keep all threads busy."""
        slabs, chunks = len(self.slabs()), list(self.chunks())
        parts = min(-(-4 * self.threads // slabs), len(chunks))  # of the rows
        return [(s, chunks[part::parts]) for s in range(slabs) for part in range(parts)]

    def at_slab_of_target(self, x: Tensor) -> Tensor:
        """Pick the slab that holds each row's target: [slabs, padded] -> [padded], NaN if none does."""
        known = (self.target_ids >= 0) & (self.target_ids < self.head.vocab_size)
        slab = torch.where(known, self.target_ids // self.tile_columns, 0)
        return torch.where(known, x.gather(0, slab[None])[0], math.nan)

    def weight_slab(self, low: int, high: int) -> Tensor:
        return pad_columns(self.head.weight[low:high].to(self.operand_dtype))

    def hidden_rows(self, rows: slice) -> Tensor:
        return self.hidden[rows].to(self.operand_dtype)

    def target_columns(self, rows: slice, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return which rows have their target in this slab [R], and in which of its columns [R, 1], else 0."""
        ids = self.target_ids[rows]
        in_slab = (ids >= low) & (ids < high)
        return in_slab, torch.where(in_slab, ids - low, 0)[:, None]

    def logits(self, rows: slice, weight: Tensor, low: int, high: int) -> Tensor:
        """Compute the logits of a tile, [R, columns] in fp32 or fp64, with all options of the head applied."""
        head = self.head
        z = _product(self.hidden_rows(rows), weight.t())
        if self.adapter_hidden is not None and self.adapter_weight is not None:
            z.addmm_(self.adapter_hidden[rows], pad_columns(self.adapter_weight[low:high]).t())
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
        """Return d(logit) / d(h W^T + bias): a tile, a column, a number, or None for 1."""
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


class Part(NamedTuple):
    """Columns of one slab that are computed for one chunk of rows."""

    slab: tuple[int, int]
    rows: slice
    first: int  # column
    last: int  # column + 1
    turn: int  # how many parts of the same rows come before it


class Runs:
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

    def by_slab(self) -> list[list[Part]]:
        """Return the parts to compute, by slab of columns; slabs without any are left out."""
        turns: dict[int, int] = {}
        slabs = []
        for low, high in self.work.slabs():
            parts = []
            for rows, first, last in self._of_slab(low, high):
                turn = turns[rows.start] = turns.get(rows.start, -1) + 1
                parts.append(Part((low, high), rows, first, last, turn))
            if parts:
                slabs.append(parts)
        return slabs

    def _of_slab(self, low: int, high: int) -> list[tuple[slice, int, int]]:
        """Return (rows, first column, last column + 1) of each chunk: all columns of the slab, or its live cells."""
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


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in fp32 (fp64 for fp64)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.dtype.itemsize == 2 else torch.mm(a, b)


def product_of_tile(a: Tensor, b: Tensor, boost: Tensor | None) -> Tensor:
    """a @ b in fp32 (fp64 for fp64), divided by `boost` if there is one."""
    product = _product(a, b)
    return product if boost is None or a.dtype.itemsize != 2 else product / boost


def add_product_of_tile(into: Tensor, a: Tensor, b: Tensor, boost: Tensor | None) -> None:
    """into += a @ b, divided by `boost` if there is one."""
    if a.dtype.itemsize == 2:
        into.add_(product_of_tile(a, b, boost))
    else:
        into.addmm_(a, b)
