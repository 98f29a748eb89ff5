"""The logits of a tile, in fp32 registers, for the forward and backward kernels, and the arguments of these kernels.

A kernel takes a head's tensors, strides and numbers as separate arguments, because fields of a tuple argument cannot be
typed: floats would be fp32, and strides could not be int64. Inside a kernel they are grouped as `HeadPointers`. There
are two compile-time constants, `HeadConstants` and `tuning.Config`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...layout import accumulator
from ..rows import HeadRows
from .elementary import INTERPRETED, operands, tanh
from .tuning import Config

__all__ = [
    "INTERPRETED",
    "HeadConstants",
    "HeadPointers",
    "HeadStrides",
    "gather_rows",
    "grouped",
    "in_tile",
    "logit_tile",
    "straighten",
    "target_column",
    "tile_arguments",
    "triton_type",
]  # fmt: skip  # a list of names


class HeadStrides(NamedTuple):
    """Strides in elements, int64; 0 for tensors that are absent or read by descriptors."""

    hidden_row: Any
    weight_row: Any
    weight_column: Any
    bias: Any
    adapter_hidden_row: Any
    adapter_hidden_column: Any
    adapter_weight_row: Any
    adapter_weight_column: Any
    temperature: Any


class HeadPointers(NamedTuple):
    """A head inside a kernel. Tensors are pointers, or None if absent."""

    hidden: Any  # [n, H]: gathered, contiguous rows; a tensor descriptor if Config.descriptors
    weight: Any  # [V, H]; a tensor descriptor if Config.descriptors
    bias: Any  # [V]
    adapter_hidden: Any  # [N, R]
    adapter_weight: Any  # [V, R]
    temperature: Any  # [N], or [1] with stride 0
    strides: HeadStrides
    hidden_size: Any  # int32
    vocab_size: Any  # int32, without padding
    logit_scale: Any  # fp64
    logit_softcap: Any  # fp64


class HeadConstants(NamedTuple):
    """Compile-time constants of a head."""

    R: int  # rank of the adapter, 0 without
    ACC: tl.dtype  # dtype of sums: fp32 or fp64
    HAS_SCALE: bool  # logit_scale is not 1
    HAS_SOFTCAP: bool
    RAGGED: bool  # H is not a multiple of block_h, and no descriptors add the missing zeros


@triton.jit
def logit_tile(
    head,  # HeadPointers
    rows,  # [block_n] int64: indices of the tile's rows in the batch
    first_row,  # int32: index of the tile's first row in `head.hidden`
    first_column,  # int32
    n_rows,  # int64: number of rows of `head.hidden`
    HEAD: tl.constexpr,  # HeadConstants
    CONFIG: tl.constexpr,
):
    """Compute softcap(logit_scale * (h W^T + a B^T + bias)) / temperature, [block_n, block_v] in ACC, never rounded.

    At ragged edges, row and column indices are clamped, so that loads in the main loop need no mask. The caller masks
    these rows and columns. Indices are converted to int64 before they are multiplied by a stride.
    """
    ACC: tl.constexpr = HEAD.ACC  # some functions need a constexpr, and `HEAD.ACC` is not one
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    columns = tl.minimum(first_column + tl.arange(0, BLOCK_V), head.vocab_size - 1).to(tl.int64)
    tl.assume(head.hidden_size > 0)  # else the compiler guards against an empty main loop
    z = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    if CONFIG.descriptors:  # the tensor memory accelerator of Hopper and later copies full tiles
        for start in range(0, head.hidden_size, CONFIG.block_h):
            a, b = head.hidden.load([first_row, start]), head.weight.load([first_column, start])
            a, b = operands(a, b, ACC)
            z = tl.dot(a, tl.trans(b), z, input_precision="ieee", out_dtype=ACC)
    else:
        z = _product_by_pointers(
            head=head, z=z, columns=columns, first_row=first_row, n_rows=n_rows, HEAD=HEAD, CONFIG=CONFIG
        )
    if head.adapter_hidden is not None:
        z = _add_adapter(head=head, z=z, rows=rows, columns=columns, HEAD=HEAD, BLOCK_R=CONFIG.block_r)
    if head.bias is not None:
        z += tl.load(head.bias + columns * head.strides.bias)[None, :].to(ACC)
    if HEAD.HAS_SCALE:
        z *= tl.full([], head.logit_scale, ACC)
    if HEAD.HAS_SOFTCAP:
        cap = tl.full([], head.logit_softcap, ACC)
        z = cap * tanh(z / cap)
    if head.temperature is not None:
        z *= (1.0 / tl.load(head.temperature + rows * head.strides.temperature))[:, None]  # one division per row
    return z


@triton.jit
def _product_by_pointers(head, z, columns, first_row, n_rows, HEAD: tl.constexpr, CONFIG: tl.constexpr):
    """Add h W^T to z."""
    H = head.hidden_size
    ACC: tl.constexpr = HEAD.ACC
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    BLOCK_H: tl.constexpr = CONFIG.block_h
    CHAIN: tl.constexpr = CONFIG.chain
    k = tl.arange(0, BLOCK_H).to(tl.int64)
    step = tl.full([], BLOCK_H, tl.int64) * head.strides.weight_column
    n = tl.minimum(first_row.to(tl.int64) + tl.arange(0, BLOCK_N), n_rows - 1)
    a_at = head.hidden + n[:, None] * head.strides.hidden_row + k[None, :]
    b_at = head.weight + columns[:, None] * head.strides.weight_row + k[None, :] * head.strides.weight_column
    if CHAIN == 0:
        for start in range(0, H, BLOCK_H):
            a, b = _load_operands(a_at=a_at, b_at=b_at, remaining=H - start, HEAD=HEAD, BLOCK_H=BLOCK_H)
            z = tl.dot(a, tl.trans(b), z, input_precision="ieee", out_dtype=ACC)
            a_at += BLOCK_H
            b_at += step
    else:  # without tensor cores, a sum of shorter sums rounds less than one long sum
        for begin in range(0, H, CHAIN):
            chain = tl.zeros([BLOCK_N, BLOCK_V], ACC)
            for start in range(begin, tl.minimum(begin + CHAIN, H), BLOCK_H):
                a, b = _load_operands(a_at=a_at, b_at=b_at, remaining=H - start, HEAD=HEAD, BLOCK_H=BLOCK_H)
                chain = tl.dot(a, tl.trans(b), chain, input_precision="ieee", out_dtype=ACC)
                a_at += BLOCK_H
                b_at += step
            z += chain
    return z


@triton.jit
def _load_operands(a_at, b_at, remaining, HEAD: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load one block of each operand, zero beyond the `remaining` elements of H."""
    if HEAD.RAGGED:
        inside = tl.arange(0, BLOCK_H)[None, :] < remaining
        a, b = tl.load(a_at, mask=inside, other=0.0), tl.load(b_at, mask=inside, other=0.0)
    else:
        a, b = tl.load(a_at), tl.load(b_at)
    return operands(a, b, HEAD.ACC)


@triton.jit
def _add_adapter(head, z, rows, columns, HEAD: tl.constexpr, BLOCK_R: tl.constexpr):
    """Add a B^T to z."""
    ACC: tl.constexpr = HEAD.ACC
    strides = head.strides
    r = tl.arange(0, BLOCK_R)
    for start in range(0, HEAD.R, BLOCK_R):
        inside = r[None, :] < HEAD.R - start
        k = (start + r)[None, :].to(tl.int64)
        a_at = head.adapter_hidden + rows[:, None] * strides.adapter_hidden_row + k * strides.adapter_hidden_column
        b_at = head.adapter_weight + columns[:, None] * strides.adapter_weight_row + k * strides.adapter_weight_column
        a = tl.load(a_at, mask=inside, other=0.0).to(ACC)
        b = tl.load(b_at, mask=inside, other=0.0).to(ACC)
        z = tl.dot(a, tl.trans(b), z, input_precision="ieee", out_dtype=ACC)
    return z


@triton.jit
def target_column(target, vocab_size):
    """Target ids as int32 columns, -1 for ids outside the vocabulary."""
    return tl.where((target >= 0) & (target < vocab_size), target, -1).to(tl.int32)


@triton.jit
def in_tile(target, first_column, BLOCK_V: tl.constexpr):
    """Mark the rows whose target is in the tile, [block_n] bool, and say whether there are any."""
    inside = (target >= first_column) & (target < first_column + BLOCK_V)
    return inside, tl.max(inside.to(tl.int32), 0) > 0


@triton.jit
def grouped(program, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Map a program to (row block, column block), in an order that keeps GROUP row blocks in the L2 cache.

    Consecutive programs read the same columns of the head, for each row block of a group in turn.
    """
    group = program // (GROUP * column_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    return group * GROUP + within % height, within // height


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """The Triton dtype in which products of `dtype` operands are summed: fp64 for fp64, else fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def gather_rows(hidden: Tensor, index: Tensor | None) -> Tensor:
    """Gather `hidden[index]` (None: all rows) with contiguous rows aligned to 16 bytes, as the kernels require."""
    n = hidden.shape[0] if index is None else index.shape[0]
    width = hidden.shape[1]
    if index is None and _aligned(hidden):
        return hidden
    padded = -(-width * hidden.itemsize // 16) * 16 // hidden.itemsize
    out = torch.empty(n, padded, dtype=hidden.dtype, device=hidden.device)[:, :width]
    return out.copy_(hidden) if index is None else torch.index_select(hidden, 0, index, out=out)


def _aligned(x: Tensor) -> bool:
    """True if rows are contiguous, do not overlap, and start at multiples of 16 bytes."""
    return (
        x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    )


def straighten(head: HeadRows, config: Config) -> HeadRows:
    """Make target ids contiguous, align the rows of a weight that is read by descriptors, and widen a 16-bit bias."""
    align = config.descriptors and not head.split  # `split.py` aligns the parts
    weight = gather_rows(head.weight[: head.vocab_size], None) if align else head.weight
    bias = None if head.bias is None else head.bias.to(accumulator(head.bias.dtype))  # loads of two bytes are slow
    return head._replace(weight=weight, bias=bias, target_ids=head.target_ids.contiguous())


def tile_arguments(head: HeadRows, hidden: Tensor, config: Config) -> dict[str, Any]:
    """The tile kernels' arguments that describe the head. `hidden` [n, H] holds the gathered rows."""
    weight, temperature = head.weight, head.temperature
    hidden_row, (weight_row, weight_column) = hidden.stride(0), weight.stride()
    adapter_hidden_row, adapter_hidden_column = _strides(head.adapter_hidden)
    adapter_weight_row, adapter_weight_column = _strides(head.adapter_weight)
    matrices: dict[str, Any] = dict(hidden=hidden, weight=weight)
    if config.descriptors:
        matrices = dict(
            hidden=TensorDescriptor.from_tensor(hidden, [config.block_n, config.block_h]),
            weight=TensorDescriptor.from_tensor(weight[: head.vocab_size], [config.block_v, config.block_h]),
        )
        hidden_row = weight_row = weight_column = 0
    return dict(
        **matrices,
        bias=head.bias,
        adapter_hidden=head.adapter_hidden,
        adapter_weight=head.adapter_weight,
        temperature=temperature,
        n_rows=hidden.shape[0],
        stride_hidden_row=hidden_row,
        stride_weight_row=weight_row,
        stride_weight_column=weight_column,
        stride_bias=0 if head.bias is None else head.bias.stride(0),
        stride_adapter_hidden_row=adapter_hidden_row,
        stride_adapter_hidden_column=adapter_hidden_column,
        stride_adapter_weight_row=adapter_weight_row,
        stride_adapter_weight_column=adapter_weight_column,
        stride_temperature=0 if temperature is None or temperature.ndim == 0 else temperature.stride(0),
        hidden_size=hidden.shape[1],
        vocab_size=head.vocab_size,
        logit_scale=head.logit_scale,
        logit_softcap=head.logit_softcap or 0.0,
        HEAD=HeadConstants(
            R=0 if head.adapter_weight is None else head.adapter_weight.shape[1],
            ACC=triton_type(hidden.dtype),
            HAS_SCALE=head.logit_scale != 1.0,
            HAS_SOFTCAP=head.logit_softcap is not None,
            RAGGED=hidden.shape[1] % config.block_h != 0 and not config.descriptors,
        ),
        CONFIG=config,
    )


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a matrix; zeros for None."""
    return (0, 0) if x is None else x.stride()
