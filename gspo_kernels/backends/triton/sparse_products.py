"""d_hidden and d_weight from the d_logits of some cells: block-sparse products, each output tile in one fixed order.

No atomics and no locks: a program owns a tile of the result and walks the list of its cells.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
# Triton types its kernels' arguments in a language of its own.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...layout import accumulator
from ..rows import HeadRows
from .cells import Part
from .launch import launch
from .logit_tile import INTERPRETED, triton_type
from .tuning import product_config


@triton.jit(do_not_specialize=["n_rows", "low", "first", "begin_at"])
def hidden_product(
    d_logits,  # [cells of the part, ROWS, COLUMNS]
    weight,  # [V, H]
    block_tile,
    block_place,
    block_begin,
    order,  # [n_rows] int64: rows of the batch, those of the part
    sums,  # in and out [N, H]
    n_rows: tl.int32,
    low: tl.int32,  # the part's first column
    first: tl.int64,  # where the part begins in the lists
    begin_at: tl.int64,  # ... and in block_begin
    stride_weight_row: tl.int64,
    stride_weight,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """sums[rows] += d_logits W over the live tiles of a block of rows: 2 ROWS COLUMNS H operations a cell."""
    parts: tl.constexpr = ROWS // BLOCK_N
    h_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    block, within = pid // (h_blocks * parts), (pid // h_blocks) % parts
    h = (pid % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    n = within * BLOCK_N + tl.arange(0, BLOCK_N)  # of the block
    k = tl.arange(0, BLOCK_K)
    begin, end = tl.load(block_begin + begin_at + block), tl.load(block_begin + begin_at + block + 1)
    if begin < end:
        left = tl.minimum(h, H - 1).to(tl.int64) * stride_weight
        steps: tl.constexpr = COLUMNS // BLOCK_K
        acc = tl.zeros([BLOCK_N, BLOCK_H], ACC)
        for i in range(begin * steps, end * steps):
            j, start = first + i // steps, (i % steps) * BLOCK_K
            place, tile = tl.load(block_place + j).to(tl.int64), tl.load(block_tile + j)
            v = tl.minimum(low + tile * COLUMNS + start + k, V - 1).to(tl.int64)  # d_logits are 0 beyond V
            a = tl.load(d_logits + (place * ROWS + n)[:, None] * COLUMNS + (start + k)[None, :])
            b = tl.load(weight + v[:, None] * stride_weight_row + left[None, :])
            if UPCAST:  # Triton's interpreter multiplies bf16 operands as if they were integers
                a, b = a.to(ACC), b.to(ACC)
            if a.dtype == ACC:  # one chain of additions per entry: broken, it rounds less
                acc += tl.dot(a, b, input_precision="ieee", out_dtype=ACC)
            else:
                acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
        row = block * ROWS + n
        rows = tl.load(order + tl.minimum(row, n_rows - 1))
        at = sums + rows[:, None] * H + h[None, :]
        ok = (row[:, None] < n_rows) & (h[None, :] < H)
        tl.store(at, tl.load(at, mask=ok, other=0.0) + acc, mask=ok)


@triton.jit(do_not_specialize=["n_rows", "columns", "first", "begin_at", "blocks"])
def weight_product(
    d_logits,  # [cells of the part, ROWS, COLUMNS]
    hidden,  # [n_rows, H]: those of the part
    by_tile,
    tile_begin,
    sums,  # in and out [columns, H]: those of the part
    n_rows: tl.int32,
    columns: tl.int32,
    first: tl.int64,  # where the part begins in by_tile
    begin_at: tl.int64,  # ... and in tile_begin
    blocks: tl.int32,  # R of `CellLists`
    stride_hidden_row: tl.int64,
    stride_sums_row: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """sums[columns] += d_logits' h over the live blocks of rows of a tile: 2 ROWS COLUMNS H operations a cell."""
    parts: tl.constexpr = COLUMNS // BLOCK_V
    h_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    tile, within = pid // (h_blocks * parts), (pid // h_blocks) % parts
    h = (pid % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    v = within * BLOCK_V + tl.arange(0, BLOCK_V)  # of the tile
    k = tl.arange(0, BLOCK_K)
    begin, end = tl.load(tile_begin + begin_at + tile), tl.load(tile_begin + begin_at + tile + 1)
    if begin < end:
        right = tl.minimum(h, H - 1)[None, :]
        steps: tl.constexpr = ROWS // BLOCK_K
        acc = tl.zeros([BLOCK_V, BLOCK_H], ACC)
        for i in range(begin * steps, end * steps):
            j, start = i // steps, (i % steps) * BLOCK_K
            block = tl.load(by_tile + first + j) % blocks
            row = tl.minimum(block * ROWS + start + k, n_rows - 1).to(tl.int64)  # d_logits are 0 beyond n_rows
            a = tl.load(d_logits + (j * ROWS + start + k).to(tl.int64)[:, None] * COLUMNS + v[None, :])
            b = tl.load(hidden + row[:, None] * stride_hidden_row + right)
            if UPCAST:
                a, b = a.to(ACC), b.to(ACC)
            if a.dtype == ACC:
                acc += tl.dot(tl.trans(a), b, input_precision="ieee", out_dtype=ACC)
            else:
                acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee", out_dtype=ACC)
        column = tile * COLUMNS + v
        at = sums + column.to(tl.int64)[:, None] * stride_sums_row + h[None, :]
        ok = (column[:, None] < columns) & (h[None, :] < H)
        tl.store(at, tl.load(at, mask=ok, other=0.0) + acc, mask=ok)


def add_products(
    d_logits: Tensor,
    hidden: Tensor,
    head: HeadRows,
    part: Part,
    order: Tensor,
    d_hidden: Tensor | None,
    d_slab: Tensor | None,
) -> None:
    """d_hidden[order] += d_logits W, d_slab += d_logits' h over the cells of a part.

    Args: d_logits [cells, ROWS, COLUMNS]; hidden [n, H] the part's rows, which are rows `order` [n] of the batch;
    d_hidden [N, H]; d_slab [columns, H] of the part's columns.
    """
    _, rows, columns = d_logits.shape
    n, width = hidden.shape
    config, weight = product_config(d_logits.dtype), head.weight
    h_blocks = -(-width // config.block_v)
    common: dict[str, Any] = dict(
        d_logits=d_logits, n_rows=n, first=part.first, ROWS=rows, COLUMNS=columns, H=width, BLOCK_H=config.block_v,
        ACC=triton_type(accumulator(hidden.dtype)), UPCAST=INTERPRETED,
    )  # fmt: skip
    if d_hidden is not None:
        block_n, row_blocks = min(config.block_n, rows), -(-n // rows)
        launch(
            hidden_product,
            row_blocks * (rows // block_n) * h_blocks,
            config,
            **common,
            weight=weight,
            block_tile=part.lists.block_tile,
            block_place=part.lists.block_place,
            block_begin=part.lists.block_begin,
            begin_at=part.number * part.lists.block_begin.shape[2],
            order=order,
            sums=d_hidden,
            low=part.low,
            stride_weight_row=weight.stride(0),
            stride_weight=weight.stride(1),
            V=head.vocab_size,
            BLOCK_N=block_n,
            BLOCK_K=min(config.block_h, columns),
        )
    if d_slab is not None:
        block_v, tiles = min(config.block_n, columns), -(-d_slab.shape[0] // columns)
        launch(
            weight_product,
            tiles * (columns // block_v) * h_blocks,
            config,
            **common,
            hidden=hidden,
            by_tile=part.lists.by_tile,
            tile_begin=part.lists.tile_begin,
            begin_at=part.number * part.lists.tile_begin.shape[2],
            sums=d_slab,
            columns=d_slab.shape[0],
            blocks=part.lists.blocks,
            stride_hidden_row=hidden.stride(0),
            stride_sums_row=d_slab.stride(0),
            BLOCK_V=block_v,
            BLOCK_K=min(config.block_h, rows),
        )
