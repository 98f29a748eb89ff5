"""Block-sparse products: d_hidden and d_weight from the d_logits of selected cells.

Each program computes one tile of the result and sums its cells in the order of the list, without atomics or locks.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....layout import accumulator
from ...rows import HeadRows
from ..elementary import operands
from ..launch import launch
from ..logit_tile import triton_type
from ..tuning import product_config
from .lists import Part


@triton.jit
def load_columns(at, h, width, RAGGED: tl.constexpr):
    """Load the columns `h` of a tile, 0 beyond `width`. Clamped indices would load element by element."""
    if RAGGED:
        return tl.load(at, mask=h[None, :] < width, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def write(out, inside, acc, boost, ADD: tl.constexpr):
    """Write a tile of a product to `out`, in its dtype. If ADD, add the tile; else divide it by `boost` first."""
    if ADD:
        acc += tl.load(out, mask=inside, other=0.0)
    elif boost is not None:
        acc *= 1.0 / tl.load(boost)  # exact, because it is a power of two
    tl.store(out, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "tiles", "first_tile", "end_tile", "first_block", "first_cell", "vocab"])
def hidden_product(
    d_logits,  # [cells of the part, ROWS, COLUMNS]
    weight,  # [V, H]
    block_tile,  # this and the next two: fields of `CellLists`
    block_place,
    block_begin,
    order,  # [n_rows] int64: indices of the part's rows in the batch
    out,  # [N, H]
    boost,  # []: d_logits are scaled by it, so the product is divided by it; or None. Must be None with ADD
    n_rows: tl.int32,
    tiles: tl.int32,  # of the vocabulary
    first_tile: tl.int32,  # of the part
    end_tile: tl.int32,
    first_block: tl.int32,  # the part's first row block
    first_cell: tl.int32,  # index of the part's first cell in the list by tile
    width: tl.int32,  # H
    vocab: tl.int32,  # V
    stride_weight_row: tl.int64,
    stride_weight_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr,  # H is not a multiple of BLOCK_H
    ACC: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write d_logits W of a row block's cells to out[rows]; if ADD, add it. 2 ROWS COLUMNS H operations per cell."""
    n_blocks: tl.constexpr = ROWS // BLOCK_N  # programs along the rows of a cell
    h_blocks = (width + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    block, within = pid // (h_blocks * n_blocks), (pid // h_blocks) % n_blocks
    h = (pid % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    n = within * BLOCK_N + tl.arange(0, BLOCK_N)  # rows of the row block
    k = tl.arange(0, BLOCK_K)
    begin_of_block = block_begin + (first_block + block) * tiles
    begin, end = tl.load(begin_of_block + first_tile), tl.load(begin_of_block + end_tile)
    if begin < end:
        left = h.to(tl.int64)[None, :] * stride_weight_column
        steps: tl.constexpr = COLUMNS // BLOCK_K
        acc = tl.zeros([BLOCK_N, BLOCK_H], ACC)
        of_cell = tl.zeros([BLOCK_N, BLOCK_H], ACC)
        for i in range(begin * steps, end * steps):
            j, start = i // steps, (i % steps) * BLOCK_K
            place, tile = (tl.load(block_place + j) - first_cell).to(tl.int64), tl.load(block_tile + j)
            v = tl.minimum(tile * COLUMNS + start + k, vocab - 1).to(tl.int64)  # d_logits are 0 from column V on
            a = tl.load(d_logits + (place * ROWS + n)[:, None] * COLUMNS + (start + k)[None, :])
            b = load_columns(weight + v[:, None] * stride_weight_row + left, h, width, RAGGED=RAGGED)
            a, b = operands(a, b, ACC)
            if a.dtype == tl.float32:  # no tensor cores: a sum of a sum per cell rounds less than one sum of V terms
                of_cell += tl.dot(a, b, input_precision="ieee", out_dtype=ACC)
                complete = start == COLUMNS - BLOCK_K
                acc = tl.where(complete, acc + of_cell, acc)
                of_cell = tl.where(complete, 0.0, of_cell)
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        row = block * ROWS + n
        rows = tl.load(order + tl.minimum(row, n_rows - 1))
        inside = (row[:, None] < n_rows) & (h[None, :] < width)
        write(out + rows[:, None] * width + h[None, :], inside, acc, boost, ADD=ADD)


@triton.jit(do_not_specialize=["n_rows", "columns", "begin_at", "first_cell", "row_blocks"])
def weight_product(
    d_logits,  # [cells of the part, ROWS, COLUMNS]
    hidden,  # [n_rows, H]: the part's rows
    by_tile,  # this and the next: fields of `CellLists`
    tile_begin,
    out,  # [columns, H]: the part's columns
    boost,  # as in `hidden_product`
    n_rows: tl.int32,
    columns: tl.int32,
    begin_at: tl.int32,  # index in tile_begin of the part's first tile
    first_cell: tl.int32,  # index of the part's first cell in by_tile
    row_blocks: tl.int32,  # of a chunk
    width: tl.int32,  # H
    stride_hidden_row: tl.int64,
    stride_out_row: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr,  # H is not a multiple of BLOCK_H
    ACC: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write d_logits^T h of a tile's cells to out[columns]; if ADD, add it. 2 ROWS COLUMNS H operations per cell.

    Without ADD, a tile without cells writes 0.
    """
    v_blocks: tl.constexpr = COLUMNS // BLOCK_V  # programs along the columns of a cell
    h_blocks = (width + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    tile, within = pid // (h_blocks * v_blocks), (pid // h_blocks) % v_blocks
    h = (pid % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = within * BLOCK_V + tl.arange(0, BLOCK_V)  # columns of the tile
    k = tl.arange(0, BLOCK_K)
    begin_of_tile = tile_begin + begin_at + tile * row_blocks
    begin, end = tl.load(begin_of_tile), tl.load(begin_of_tile + row_blocks)
    if begin < end or not ADD:
        steps: tl.constexpr = ROWS // BLOCK_K
        acc = tl.zeros([BLOCK_V, BLOCK_H], ACC)
        for i in range(begin * steps, end * steps):
            j, start = i // steps, (i % steps) * BLOCK_K
            block = tl.load(by_tile + j) % row_blocks
            row = tl.minimum(block * ROWS + start + k, n_rows - 1).to(tl.int64)  # d_logits are 0 from row n_rows on
            a = tl.load(d_logits + v[:, None] + ((j - first_cell) * ROWS + start + k).to(tl.int64)[None, :] * COLUMNS)
            b = load_columns(hidden + row[:, None] * stride_hidden_row + h[None, :], h, width, RAGGED=RAGGED)
            a, b = operands(a, b, ACC)
            if a.dtype == ACC:
                acc += tl.dot(a, b, input_precision="ieee", out_dtype=ACC)
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        column = tile * COLUMNS + v
        inside = (column[:, None] < columns) & (h[None, :] < width)
        at = out + column.to(tl.int64)[:, None] * stride_out_row + h[None, :]
        write(at, inside, acc, boost, ADD=ADD)


def product_of_hidden(
    out: Tensor,
    d_logits: Tensor,
    head: HeadRows,
    first_tile: int,
    part: Part,
    order: Tensor,
    boost: Tensor | None,
    add: bool,
) -> None:
    """Multiply the cells of a part by W. If `add`, add the product to out[order]; else write it, divided by `boost`.

    Args:
        out: [N, H].
        d_logits: [cells, ROWS, COLUMNS].
        head: its weight begins with the columns of `first_tile`. If it is split, its last part is multiplied.
        order: [n], the part's rows.
        boost: [] or None.
    """
    _, rows, columns = d_logits.shape
    config = product_config(d_logits.dtype, d_logits.device)
    lists = part.lists
    n = order.shape[0]
    block_n = min(config.block_n, rows)
    launch(
        hidden_product,
        -(-n // rows) * (rows // block_n) * -(-out.shape[1] // config.block_v),
        config,
        **_shared_arguments(d_logits, out, part, boost, add),
        weight=head.weight[:, -out.shape[1] :],
        block_tile=lists.block_tile - first_tile if first_tile else lists.block_tile,
        block_place=lists.block_place,
        block_begin=lists.block_begin,
        order=order,
        n_rows=n,
        tiles=lists.tiles,
        first_tile=part.first_tile,
        end_tile=part.end_tile,
        first_block=part.chunk * lists.row_blocks,
        stride_weight_row=head.weight.stride(0),
        stride_weight_column=head.weight.stride(1),
        vocab=head.vocab_size,
        BLOCK_N=block_n,
        BLOCK_K=min(config.block_h, columns),
    )


def product_of_weight(
    out: Tensor, d_logits: Tensor, hidden: Tensor, part: Part, boost: Tensor | None, add: bool
) -> None:
    """Compute d_logits^T h from the cells of a part. If `add`, add it to `out`; else write it, divided by `boost`.

    Args:
        out: [columns, H], the part's columns of d_weight.
        d_logits: [cells, ROWS, COLUMNS].
        hidden: [n, H], the part's rows.
        boost: [] or None.
    """
    _, rows, columns = d_logits.shape
    config = product_config(d_logits.dtype, d_logits.device)
    lists = part.lists
    block_v = min(config.block_n, columns)
    launch(
        weight_product,
        (part.end_tile - part.first_tile) * (columns // block_v) * -(-out.shape[1] // config.block_v),
        config,
        **_shared_arguments(d_logits, out, part, boost, add),
        hidden=hidden,
        by_tile=lists.by_tile,
        tile_begin=lists.tile_begin,
        n_rows=hidden.shape[0],
        columns=out.shape[0],
        begin_at=(part.chunk * lists.tiles + part.first_tile) * lists.row_blocks,
        row_blocks=lists.row_blocks,
        stride_hidden_row=hidden.stride(0),
        stride_out_row=out.stride(0),
        BLOCK_V=block_v,
        BLOCK_K=min(config.block_h, rows),
    )


def _shared_arguments(d_logits: Tensor, out: Tensor, part: Part, boost: Tensor | None, add: bool) -> dict[str, Any]:
    """Arguments that both products share, by name."""
    _, rows, columns = d_logits.shape
    block_h = product_config(d_logits.dtype, d_logits.device).block_v
    return dict(
        d_logits=d_logits,
        out=out,
        boost=None if add else boost,
        first_cell=part.first_cell,
        ROWS=rows,
        COLUMNS=columns,
        width=out.shape[1],
        RAGGED=out.shape[1] % block_h != 0,
        BLOCK_H=block_h,
        ACC=triton_type(accumulator(d_logits.dtype)),
        ADD=add,
    )
