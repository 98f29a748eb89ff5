"""Block-sparse products: d_hidden and d_weight from the d_logits of selected cells.

Each program computes one tile of the result and adds up its cells in the order of their list, without atomics or locks.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...layout import accumulator
from ..rows import HeadRows
from .cells import Part
from .elementary import operands
from .launch import launch
from .logit_tile import triton_type
from .tuning import product_config


@triton.jit
def load_columns(at, h, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a tile with the columns `h`, 0 beyond H. Clamped column numbers would split the load into elements."""
    if H % BLOCK_H == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=h[None, :] < H, other=0.0)


@triton.jit(do_not_specialize=["n_rows", "low", "first_cell", "begin_at"])
def hidden_product(
    d_logits,  # [cells of the part, ROWS, COLUMNS]
    weight,  # [V, H]
    block_tile,  # this and the next two: fields of `CellLists`
    block_place,
    block_begin,
    order,  # [n_rows] int64: the part's rows, as rows of the batch
    sums,  # in and out [N, H]
    n_rows: tl.int32,
    low: tl.int32,  # the part's first column
    first_cell: tl.int64,  # index of the part's first cell in the lists
    begin_at: tl.int64,  # index of the part's first element in block_begin
    stride_weight_row: tl.int64,
    stride_weight_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add d_logits W over the cells of a row block to sums[rows]: 2 ROWS COLUMNS H operations per cell."""
    n_blocks: tl.constexpr = ROWS // BLOCK_N  # programs along the rows of a cell
    h_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    block, within = pid // (h_blocks * n_blocks), (pid // h_blocks) % n_blocks
    h = (pid % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    n = within * BLOCK_N + tl.arange(0, BLOCK_N)  # rows of the row block
    k = tl.arange(0, BLOCK_K)
    begin, end = tl.load(block_begin + begin_at + block), tl.load(block_begin + begin_at + block + 1)
    if begin < end:
        left = h.to(tl.int64)[None, :] * stride_weight_column
        steps: tl.constexpr = COLUMNS // BLOCK_K
        acc = tl.zeros([BLOCK_N, BLOCK_H], ACC)
        for i in range(begin * steps, end * steps):
            j, start = first_cell + i // steps, (i % steps) * BLOCK_K
            place, tile = tl.load(block_place + j).to(tl.int64), tl.load(block_tile + j)
            v = tl.minimum(low + tile * COLUMNS + start + k, V - 1).to(tl.int64)  # d_logits are 0 from column V on
            a = tl.load(d_logits + (place * ROWS + n)[:, None] * COLUMNS + (start + k)[None, :])
            b = load_columns(weight + v[:, None] * stride_weight_row + left, h, H=H, BLOCK_H=BLOCK_H)
            a, b = operands(a, b, ACC)
            if a.dtype == ACC:  # without tensor cores: a sum of shorter sums rounds less than one long sum
                acc += tl.dot(a, b, input_precision="ieee", out_dtype=ACC)
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        row = block * ROWS + n
        rows = tl.load(order + tl.minimum(row, n_rows - 1))
        at = sums + rows[:, None] * H + h[None, :]
        inside = (row[:, None] < n_rows) & (h[None, :] < H)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + acc, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "columns", "first_cell", "begin_at", "part_row_blocks"])
def weight_product(
    d_logits,  # [cells of the part, ROWS, COLUMNS]
    hidden,  # [n_rows, H]: the part's rows
    by_tile,  # this and the next: fields of `CellLists`
    tile_begin,
    sums,  # in and out [columns, H]: the part's columns
    n_rows: tl.int32,
    columns: tl.int32,
    first_cell: tl.int64,  # index of the part's first cell in by_tile
    begin_at: tl.int64,  # index of the part's first element in tile_begin
    part_row_blocks: tl.int32,
    stride_hidden_row: tl.int64,
    stride_sums_row: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add d_logits^T h over the cells of a tile to sums[columns]: 2 ROWS COLUMNS H operations per cell."""
    v_blocks: tl.constexpr = COLUMNS // BLOCK_V  # programs along the columns of a cell
    h_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    tile, within = pid // (h_blocks * v_blocks), (pid // h_blocks) % v_blocks
    h = (pid % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = within * BLOCK_V + tl.arange(0, BLOCK_V)  # columns of the tile
    k = tl.arange(0, BLOCK_K)
    begin, end = tl.load(tile_begin + begin_at + tile), tl.load(tile_begin + begin_at + tile + 1)
    if begin < end:
        steps: tl.constexpr = ROWS // BLOCK_K
        acc = tl.zeros([BLOCK_V, BLOCK_H], ACC)
        for i in range(begin * steps, end * steps):
            j, start = i // steps, (i % steps) * BLOCK_K
            block = tl.load(by_tile + first_cell + j) % part_row_blocks
            row = tl.minimum(block * ROWS + start + k, n_rows - 1).to(tl.int64)  # d_logits are 0 from row n_rows on
            a = tl.load(d_logits + v[:, None] + (j * ROWS + start + k).to(tl.int64)[None, :] * COLUMNS)
            b = load_columns(hidden + row[:, None] * stride_hidden_row + h[None, :], h, H=H, BLOCK_H=BLOCK_H)
            a, b = operands(a, b, ACC)
            if a.dtype == ACC:
                acc += tl.dot(a, b, input_precision="ieee", out_dtype=ACC)
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        column = tile * COLUMNS + v
        at = sums + column.to(tl.int64)[:, None] * stride_sums_row + h[None, :]
        inside = (column[:, None] < columns) & (h[None, :] < H)
        tl.store(at, tl.load(at, mask=inside, other=0.0) + acc, mask=inside)


def add_to_hidden(d_hidden: Tensor, d_logits: Tensor, head: HeadRows, part: Part, order: Tensor) -> None:
    """Add d_logits W to d_hidden[order] over the cells of a part.

    Args:
        d_hidden: [N, H].
        d_logits: [cells, ROWS, COLUMNS].
        order: [n], the part's rows.
    """
    _, rows, columns = d_logits.shape
    config, lists, n = product_config(d_logits.dtype), part.lists, order.shape[0]
    block_n = min(config.block_n, rows)
    launch(
        hidden_product,
        -(-n // rows) * (rows // block_n) * -(-d_hidden.shape[1] // config.block_v),
        config,
        **_shared_arguments(d_logits, d_hidden, part),
        weight=head.weight,
        block_tile=lists.block_tile,
        block_place=lists.block_place,
        block_begin=lists.block_begin,
        order=order,
        n_rows=n,
        low=part.low,
        begin_at=part.number * lists.block_begin.shape[2],
        stride_weight_row=head.weight.stride(0),
        stride_weight_column=head.weight.stride(1),
        V=head.vocab_size,
        BLOCK_N=block_n,
        BLOCK_K=min(config.block_h, columns),
    )


def add_to_weight(d_slab: Tensor, d_logits: Tensor, hidden: Tensor, part: Part) -> None:
    """Add d_logits^T h to d_slab over the cells of a part.

    Args:
        d_slab: [columns, H], the part's columns of d_weight.
        d_logits: [cells, ROWS, COLUMNS].
        hidden: [n, H], the part's rows.
    """
    _, rows, columns = d_logits.shape
    config, lists = product_config(d_logits.dtype), part.lists
    block_v = min(config.block_n, columns)
    launch(
        weight_product,
        -(-d_slab.shape[0] // columns) * (columns // block_v) * -(-d_slab.shape[1] // config.block_v),
        config,
        **_shared_arguments(d_logits, d_slab, part),
        hidden=hidden,
        by_tile=lists.by_tile,
        tile_begin=lists.tile_begin,
        n_rows=hidden.shape[0],
        columns=d_slab.shape[0],
        begin_at=part.number * lists.tile_begin.shape[2],
        part_row_blocks=lists.row_blocks,
        stride_hidden_row=hidden.stride(0),
        stride_sums_row=d_slab.stride(0),
        BLOCK_V=block_v,
        BLOCK_K=min(config.block_h, rows),
    )


def _shared_arguments(d_logits: Tensor, sums: Tensor, part: Part) -> dict[str, Any]:
    """Return the arguments that both products take."""
    _, rows, columns = d_logits.shape
    return dict(
        d_logits=d_logits,
        sums=sums,
        first_cell=part.first_cell,
        ROWS=rows,
        COLUMNS=columns,
        H=sums.shape[1],
        BLOCK_H=product_config(d_logits.dtype).block_v,
        ACC=triton_type(accumulator(d_logits.dtype)),
    )
