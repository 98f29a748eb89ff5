"""Products and sums of (row, id) pairs: gathered rows are multiplied in registers, and never stored.

    products   z_i = left[row_i] . right[id_i]               2 H operations and 2 H operand elements a pair
    sums       out[to_g] = sum of factor_i matrix[index_i]   2 H operations and H operand elements a pair

A program of `multiply_pairs` has a few pairs, whatever their rows, so that a row with thousands of ids does not wait
alone. A program of `sum_pairs` has a range of columns of one group, whose pairs it adds in their order. There are no
atomics, and a pair and a row have the same bits in any batch.

Must match the torch backend's `pairs.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...layout import accumulator
from ..rows import Groups, Pairs
from .launch import launch
from .logit_tile import triton_type
from .tuning import pair_config


@triton.jit
def load_rows(at, alive, h, width, ACC: tl.constexpr, RAGGED: tl.constexpr):
    """Load a block of gathered rows, 0 in rows that are not alive and from column `width` on."""
    mask = alive[:, None]
    if RAGGED:
        mask = mask & (h < width)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(ACC)


@triton.jit(do_not_specialize=["n_pairs"])
def multiply_pairs(
    left,  # [N, H]
    right,  # [V, H]
    rows,  # this and the next: fields of `Pairs`
    ids,
    out,  # [K] in ACC
    n_pairs: tl.int64,
    width: tl.int32,  # H
    stride_left_row: tl.int64,
    stride_left_column,
    stride_right_row: tl.int64,
    stride_right_column,
    ACC: tl.constexpr,
    RAGGED: tl.constexpr,  # H is not a multiple of BLOCK_H
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the product of left[row] and right[id] of each pair, and 0 for negative ids."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    v = tl.load(ids + i, mask=i < n_pairs, other=-1)
    alive = v >= 0
    acc = tl.zeros([BLOCK_P, BLOCK_H], ACC)
    if tl.max(alive.to(tl.int32), 0) > 0:
        a_at = left + tl.load(rows + i, mask=alive, other=0)[:, None] * stride_left_row
        b_at = right + v[:, None] * stride_right_row
        for start in range(0, width, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            k = h.to(tl.int64)[None, :]
            a = load_rows(a_at + k * stride_left_column, alive, h, width, ACC=ACC, RAGGED=RAGGED)
            b = load_rows(b_at + k * stride_right_column, alive, h, width, ACC=ACC, RAGGED=RAGGED)
            acc += a * b
    tl.store(out + i, tl.sum(acc, 1), mask=i < n_pairs)


@triton.jit
def sum_pairs(
    factors,  # [K] in ACC
    matrix,  # [M, H]
    index,  # [K] int64: row of `matrix` of each pair
    order,  # this and the next two: fields of `Groups`
    begin,
    to,
    out,  # [count, H]
    width: tl.int32,  # H
    stride_matrix_row: tl.int64,
    stride_matrix_column,
    ACC: tl.constexpr,
    RAGGED: tl.constexpr,  # H is not a multiple of BLOCK_H
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum one group's terms, for BLOCK_H columns."""
    h_blocks = (width + BLOCK_H - 1) // BLOCK_H
    group = (tl.program_id(0) // h_blocks).to(tl.int64)
    h = (tl.program_id(0) % h_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    first, end = tl.load(begin + group), tl.load(begin + group + 1)
    if first < end:
        acc = tl.zeros([BLOCK_P, BLOCK_H], ACC)
        columns = h.to(tl.int64)[None, :] * stride_matrix_column
        for start in range(first, end, BLOCK_P):
            i = start + tl.arange(0, BLOCK_P)
            if order is not None:
                pair = tl.load(order + i, mask=i < end, other=0)
            else:
                pair = i
            factor = tl.load(factors + pair, mask=i < end, other=0.0)
            alive = factor != 0
            at = matrix + tl.load(index + pair, mask=alive, other=0)[:, None] * stride_matrix_row + columns
            acc += factor[:, None] * load_rows(at, alive, h, width, ACC=ACC, RAGGED=RAGGED)
        row = group
        if to is not None:
            row = tl.load(to + group)
        tl.store(out + row * width + h, tl.sum(acc, 0).to(out.dtype.element_ty), mask=h < width)


def pair_products(left: Tensor, right: Tensor, pairs: Pairs) -> Tensor:
    """Dot product of left[row] and right[id] for each pair, [K]; 0 for negative ids. The host reads no values."""
    config = pair_config("products", left.dtype)
    out = left.new_empty(pairs.ids.shape[0], dtype=accumulator(left.dtype))
    launch(
        multiply_pairs,
        -(-out.shape[0] // config.block_n),
        config,
        left=left,
        right=right,
        rows=pairs.rows,
        ids=pairs.ids,
        out=out,
        n_pairs=out.shape[0],
        width=left.shape[1],
        stride_left_row=left.stride(0),
        stride_left_column=left.stride(1),
        stride_right_row=right.stride(0),
        stride_right_column=right.stride(1),
        ACC=triton_type(out.dtype),
        RAGGED=left.shape[1] % config.block_h != 0,
        BLOCK_P=config.block_n,
        BLOCK_H=config.block_h,
    )
    return out


def pair_sums(factors: Tensor, matrix: Tensor, index: Tensor, groups: Groups, count: int) -> Tensor:
    """Sum factors[i] * matrix[index[i]] over the pairs i of each group, [count, width] in the dtype of `matrix`.

    The host reads no values.
    """
    config = pair_config("sums", factors.dtype)
    out = matrix.new_zeros(count, matrix.shape[1])
    launch(
        sum_pairs,
        (groups.begin.shape[0] - 1) * -(-matrix.shape[1] // config.block_h),
        config,
        factors=factors,
        matrix=matrix,
        index=index,
        order=groups.order,
        begin=groups.begin,
        to=groups.to,
        out=out,
        width=matrix.shape[1],
        stride_matrix_row=matrix.stride(0),
        stride_matrix_column=matrix.stride(1),
        ACC=triton_type(factors.dtype),
        RAGGED=matrix.shape[1] % config.block_h != 0,
        BLOCK_P=config.block_n,
        BLOCK_H=config.block_h,
    )
    return out
