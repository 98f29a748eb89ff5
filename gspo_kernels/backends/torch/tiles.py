"""Tiles of the torch backend: their shape, the gathered rows, the logits of a tile, and products of tiles.

The shape of a tile depends on device, dtype, H, V and GSPO_WORKSPACE_MIB, but not on the batch, because matrix products
of other shapes may round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout import accumulator
from ...ranks.shards import columns_of_all_ranks
from ..precision import COLUMN_MULTIPLE, pad_columns, refuses_mixed_products
from ..rows import HeadRows
from . import workers

LOG_OF_NOTHING = -1000.0  # log-prob in place of -inf: its exp is 0 in fp32 and fp64, and 0 * -1000 is 0, not NaN
_TILES_IN_MEMORY = 4  # the most tiles that a thread holds: logits, probabilities, factor of the soft-cap, one temporary
# (rows, columns) of a tile: enough rows to pay for reading a slab of the weight; few enough columns that a tile stays
# in the caches
_TILE_ON_CPU = (128, 4032)
_TILE_ELSEWHERE = (2048, 65536)  # the default workspace reduces this to 8,192 columns in fp32
# The number of slabs to aim for on a CPU if the vocabulary has more than one tile. There can be fewer slabs, because a
# slab's width is rounded up to full cells (10 slabs for V = 5000). There can be more, because a slab is at most
# _TILE_ON_CPU wide and its fp32 copy at most _SLAB_BYTES large (38 slabs for V = 151,936).
_SLABS = 12
# On a CPU, the limit for a slab's fp32 copy. Also the limit for finished products that wait for their turn: d_hidden is
# summed in a fixed order (`workers.Sums`).
_SLAB_BYTES = 16 * 2**20
_CELL_ON_CPU, _CELL_ELSEWHERE = 168, 1024  # columns of a cell
# MKL splits a product with fewer columns by rows, and the order of additions then depends on the row's position. (Seen
# on Zen 4 with three and more threads, in fp32.)
_LEAST_SPLIT = 48
_LEAST_ON_GPU = 64  # fewest columns of a slab with half-precision operands, even beyond the workspace


class Tiling(NamedTuple):
    """How the torch backend divides the logits of a head. Every slab but the last consists of full cells."""

    dtype: torch.dtype  # of logits and sums: fp32, or fp64 for fp64 inputs
    operand_dtype: torch.dtype  # in which operands are multiplied
    rows: int  # of a tile, and of a cell
    columns: int  # of a tile, which is as wide as a slab
    cell_columns: int  # of a cell, the unit that a backward may leave out


def tiling(head: HeadRows) -> Tiling:
    """Decide how to divide the logits of a head.

    A tile is as wide as a slab: the columns of `tile_shape`, or fewer on a CPU, where threads divide the work by slabs.
    Narrower slabs give enough slabs to occupy all threads, and keep fp32 copies of half-precision slabs small.
    """
    device = head.hidden.device
    dtype = accumulator(head.hidden.dtype)
    operands = operand_dtype(device, head.hidden.dtype, dtype)
    rows, columns = tile_shape(device, dtype, head.workspace)
    if device.type != "cpu":
        if head.hidden.dtype != dtype:
            columns = min(columns, _columns_beside_sums(head, rows, dtype, operands))
        cell_columns = _CELL_ELSEWHERE if columns % _CELL_ELSEWHERE == 0 else columns
        return Tiling(dtype, operands, rows, columns, cell_columns)
    vocab = columns_of_all_ranks(head.shard, head.vocab_size) if head.shard else head.vocab_size
    if columns % _CELL_ON_CPU == 0 and vocab > columns:
        cells = -(-vocab // (_SLABS * _CELL_ON_CPU))
        if head.hidden.dtype != dtype:
            cells = min(cells, _SLAB_BYTES // (head.hidden.shape[1] * dtype.itemsize * _CELL_ON_CPU))
        columns = min(max(cells, 1) * _CELL_ON_CPU, columns)
    return Tiling(dtype, operands, rows, columns, _CELL_ON_CPU if columns % _CELL_ON_CPU == 0 else columns)


def tile_shape(device: torch.device, dtype: torch.dtype, workspace: int) -> tuple[int, int]:
    """Choose (rows, columns) of a tile of logits, so that the tiles of one thread fit the workspace.

    A thread holds at most _TILES_IN_MEMORY tiles. `_threads` limits the number of threads.
    """
    elements = workspace // (_TILES_IN_MEMORY * dtype.itemsize)
    rows, columns = _TILE_ON_CPU if device.type == "cpu" else _TILE_ELSEWHERE
    multiple = COLUMN_MULTIPLE if device.type == "cpu" else 1
    return rows, max(min(columns, elements // rows) // multiple, 1) * multiple


def operand_dtype(device: torch.device, dtype: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operands of dtype `dtype` are multiplied, for sums in `sum_dtype`.

    Operands stay in half precision only where the matmul accumulates in fp32.
    """
    tensor_cores = device.type == "cuda" and not refuses_mixed_products()
    return dtype if tensor_cores and dtype.itemsize == 2 else sum_dtype


def _columns_beside_sums(head: HeadRows, rows: int, dtype: torch.dtype, operands: torch.dtype) -> int:
    """The most columns, in full cells, of a slab that fits the workspace on a GPU, for half-precision operands.

    The backward sums a slab of d_weight in fp32, and adds a product of the same size. Without tensor cores, a slab
    of the weight and a chunk of hidden states are also copied in fp32.
    """
    width = head.hidden.shape[1]
    wide = dtype.itemsize
    copies = operands != head.hidden.dtype
    of_rows = rows * width * wide * (1 + copies)  # a product added to d_hidden, the copy of hidden states
    of_logits = rows * wide * _TILES_IN_MEMORY + width * wide * (1 + copies)  # per column, while d_logits are computed
    of_products = rows * wide + width * wide * (2 + copies)  # and while they are multiplied
    columns = (head.workspace - of_rows) // max(of_logits, of_products)
    # Hidden states alone may fill the workspace, if H is large. Narrow slabs would copy them too often.
    return max(columns // _CELL_ELSEWHERE * _CELL_ELSEWHERE, min(columns, _CELL_ELSEWHERE), _LEAST_ON_GPU)


def cell_shape(head: HeadRows) -> tuple[int, int]:
    """Shape (rows, columns) of a cell, the unit that a backward may leave out."""
    tiles = tiling(head)
    return tiles.rows, tiles.cell_columns


class Tiles:
    """Gathered rows, and the tiles in which their logits are computed. Gathered tensors are padded to full tiles."""

    def __init__(self, head: HeadRows, index: Tensor) -> None:
        self.head = head
        self.device = head.hidden.device
        self.dtype, self.operand_dtype, self.tile_rows, self.tile_columns, self.cell_columns = tiling(head)
        vocab, width = head.vocab_size, self.tile_columns
        # First column and last column + 1 of each slab.
        self.slabs = [(low, min(low + width, vocab)) for low in range(0, vocab, width)]
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
        self.threads = self._threads()

    def _threads(self) -> int:
        """Number of threads that compute tiles: as many as PyTorch uses, or fewer if the workspace is too small.

        1 if the device is not a CPU or there is only one slab. On a CPU, PyTorch then splits each operation among its
        threads, but not products with fewer than _LEAST_SPLIT columns, whose bits then depend on the number of threads.
        """
        narrow = min(self.head.vocab_size, self.head.hidden.shape[1], self.rank or _LEAST_SPLIT) < _LEAST_SPLIT
        if self.device.type != "cpu" or (self.head.vocab_size <= self.tile_columns and not narrow):
            return 1
        width, size = self.head.hidden.shape[1], self.dtype.itemsize
        tiles = size * self.tile_rows * (_TILES_IN_MEMORY * self.tile_columns + width)
        copies = 0 if self.head.weight.dtype == self.dtype else 2 * size * self.tile_columns * width
        fit = (self.head.workspace - _SLAB_BYTES) // (tiles + copies)
        return max(min(torch.get_num_threads(), fit), 1)

    def run(
        self, function: Callable[[workers.Task], None], tasks: Sequence[workers.Task], sums: workers.Sums | None = None
    ) -> None:
        """Call `function` once per task, in the calling thread or in several threads."""
        if self.threads > 1:
            workers.run(function, tasks, self.threads, sums)
        else:
            for task in tasks:
                function(task)

    def waiting_products(self) -> int:
        """Limit on products [tile_rows, H] that wait for their turn to be added to d_hidden."""
        return max(_SLAB_BYTES // (self.tile_rows * self.hidden.shape[1] * self.dtype.itemsize), 1)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in fp32 (fp64 for fp64 inputs)."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def gather(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Gather rows: [N, ...] -> [padded, ...], zeros after the last row."""
        rows = x.index_select(0, self.index).to(dtype or self.dtype)
        return F.pad(rows, (0, 0) * (x.ndim - 1) + (0, self.padded - self.count))

    def scatter(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Scatter rows back: [padded, ...] -> [N, ...], zeros at rows that are not gathered."""
        out = torch.zeros((self.head.hidden.shape[0], *x.shape[1:]), dtype=dtype or self.dtype, device=self.device)
        return out.index_copy_(0, self.index, x[: self.count].to(out.dtype))

    def chunks(self) -> Iterator[slice]:
        """Divide the gathered rows into chunks of tile_rows."""
        return (slice(low, low + self.tile_rows) for low in range(0, self.padded, self.tile_rows))

    def tasks(self) -> list[tuple[int, list[slice]]]:
        """List independent tasks of the forward, (number of a slab, chunks of rows).

        If there are enough chunks, each thread gets at least 4 tasks.
        """
        slabs, chunks = len(self.slabs), list(self.chunks())
        tasks_per_slab = min(-(-4 * self.threads // slabs), len(chunks))
        return [(s, chunks[i::tasks_per_slab]) for s in range(slabs) for i in range(tasks_per_slab)]

    def at_slab_of_target(self, x: Tensor) -> Tensor:
        """Select each row's value in the slab of its target: `x` [slabs, padded] -> [padded].

        Rows whose target is outside the vocabulary get NaN.
        """
        in_vocab = (self.target_ids >= 0) & (self.target_ids < self.head.vocab_size)
        slab = torch.where(in_vocab, self.target_ids // self.tile_columns, 0)
        return torch.where(in_vocab, x.gather(0, slab[None])[0], math.nan)

    def weight_slab(self, low: int, high: int) -> Tensor:
        """The weight's rows for columns low to high, in the operands' dtype, [columns rounded up, H]."""
        return pad_columns(self.head.weight[low:high].to(self.operand_dtype))

    def target_columns(self, rows: slice, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Say whether each row's target lies in columns low to high, [rows] bool, and in which column, [rows, 1].

        The column is relative to `low`, and 0 if the target lies elsewhere.
        """
        ids = self.target_ids[rows]
        in_slab = (ids >= low) & (ids < high)
        return in_slab, torch.where(in_slab, ids - low, 0)[:, None]

    def logits(self, rows: slice, weight: Tensor, low: int, high: int) -> Tensor:
        """Compute the logits of a tile with all options of the head, [rows, high - low] in fp32 or fp64."""
        head = self.head
        z = _product(self.hidden[rows].to(self.operand_dtype), weight.t())
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
        """Slope of the head's tail (scale, soft-cap, temperature) at logits `z`: d(logit) / d(h W^T + bias).

        A tensor [rows, columns], [rows, 1] or [], a number, or None for a slope of 1.
        """
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
        """The temperature of a chunk, [] or [rows, 1]."""
        assert self.temperature is not None
        return self.temperature[rows, None] if self.temperature.ndim else self.temperature


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b in fp32 (fp64 for fp64 operands; on a CPU bf16 for bf16 operands)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype.itemsize == 2 else torch.mm(a, b)


def product_of_tile(a: Tensor, b: Tensor, boost: Tensor | None) -> Tensor:
    """Compute a @ b in fp32 (fp64 for fp64 operands; on a CPU bf16 for bf16 operands).

    If the operands are half precision and `boost` is not None, divide the product by `boost`, the factor by which
    d_logits were multiplied before they were rounded.
    """
    product = _product(a, b)
    return product if boost is None or a.dtype.itemsize != 2 else product.div_(boost)


def add_product_of_tile(out: Tensor, a: Tensor, b: Tensor, boost: Tensor | None) -> None:
    """Add `product_of_tile` to `out`."""
    if a.dtype.itemsize == 2:
        out.add_(product_of_tile(a, b, boost))
    else:
        out.addmm_(a, b)
