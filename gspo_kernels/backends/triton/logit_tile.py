"""The tile every matrix kernel starts from: logits of some rows and some vocabulary columns, in fp32 registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..rows import HeadRows
from .elementary import tanh
from .tuning import Config


@triton.jit
def _operands(a_at, b_at, start, H: tl.constexpr, ACC: tl.constexpr, BLOCK_H: tl.constexpr, UPCAST: tl.constexpr):
    if H % BLOCK_H == 0:
        a, b = tl.load(a_at), tl.load(b_at)
    else:
        inside = tl.arange(0, BLOCK_H)[None, :] < H - start
        a, b = tl.load(a_at, mask=inside, other=0.0), tl.load(b_at, mask=inside, other=0.0)
    if UPCAST:  # Triton's interpreter multiplies bf16 operands as if they were integers
        a, b = a.to(ACC), b.to(ACC)
    return a, b


@triton.jit
def logit_tile(
    hidden,  # [n, H]: gathered, contiguous rows; a tensor descriptor if DESCRIPTORS
    weight,  # [V, H]; a tensor descriptor if DESCRIPTORS
    bias,  # [V] or None
    adapter_hidden,  # [N, R] or None
    adapter_weight,  # [V, R] or None
    temperature,  # [N], [1] with stride 0, or None
    first_row,  # int32: the tile's rows of `hidden` start here
    first_column,  # int32
    n_rows,  # int64: rows of `hidden`
    rows,  # [BLOCK_N] int64: which row of the batch each of them is
    stride_hidden_row,
    stride_weight_row,
    stride_weight,
    stride_bias,
    stride_adapter_hidden_row,
    stride_adapter_hidden,
    stride_adapter_weight_row,
    stride_adapter_weight,
    stride_temperature,
    logit_scale,
    logit_softcap,
    HAS_SOFTCAP: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHAIN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """softcap(logit_scale * (h W^T + a B^T + bias)) / temperature, [BLOCK_N, BLOCK_V] in ACC (fp32 or fp64).

    At ragged edges row and column numbers are clamped instead of masked, so that the main loop's loads need no mask;
    they are int64 before anything is multiplied by a stride. What such rows and columns hold is up to the caller.
    """
    columns = tl.minimum(first_column + tl.arange(0, BLOCK_V), V - 1).to(tl.int64)
    z = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    if DESCRIPTORS:  # the copy engine moves whole tiles: Hopper and later
        for start in range(0, H, BLOCK_H):
            a, b = hidden.load([first_row, start]), weight.load([first_column, start])
            if UPCAST:
                a, b = a.to(ACC), b.to(ACC)
            z = tl.dot(a, tl.trans(b), z, input_precision="ieee", out_dtype=ACC)
    else:
        k = tl.arange(0, BLOCK_H).to(tl.int64)
        step = tl.full([], BLOCK_H, tl.int64) * stride_weight
        n = tl.minimum(first_row.to(tl.int64) + tl.arange(0, BLOCK_N), n_rows - 1)
        a_at = hidden + n[:, None] * stride_hidden_row + k[None, :]
        b_at = weight + columns[:, None] * stride_weight_row + k[None, :] * stride_weight
        if CHAIN >= H:
            for start in range(0, H, BLOCK_H):
                a, b = _operands(a_at, b_at, start, H, ACC, BLOCK_H, UPCAST)
                z = tl.dot(a, tl.trans(b), z, input_precision="ieee", out_dtype=ACC)
                a_at += BLOCK_H
                b_at += step
        else:  # without tensor cores a product is one chain of additions per entry: broken, it rounds less
            for begin in range(0, H, CHAIN):
                part = tl.zeros([BLOCK_N, BLOCK_V], ACC)
                for start in range(begin, min(begin + CHAIN, H), BLOCK_H):
                    a, b = _operands(a_at, b_at, start, H, ACC, BLOCK_H, UPCAST)
                    part = tl.dot(a, tl.trans(b), part, input_precision="ieee", out_dtype=ACC)
                    a_at += BLOCK_H
                    b_at += step
                z += part
    if adapter_hidden is not None:
        r = tl.arange(0, BLOCK_R)
        for start in range(0, R, BLOCK_R):
            inside = r[None, :] < R - start
            at = (start + r)[None, :].to(tl.int64)
            left = adapter_hidden + rows[:, None] * stride_adapter_hidden_row + at * stride_adapter_hidden
            right = adapter_weight + columns[:, None] * stride_adapter_weight_row + at * stride_adapter_weight
            a = tl.load(left, mask=inside, other=0.0).to(ACC)
            b = tl.load(right, mask=inside, other=0.0).to(ACC)
            z = tl.dot(a, tl.trans(b), z, input_precision="ieee", out_dtype=ACC)
    if bias is not None:
        z += tl.load(bias + columns * stride_bias)[None, :].to(ACC)
    z *= tl.full([], logit_scale, ACC)
    if HAS_SOFTCAP:
        cap = tl.full([], logit_softcap, ACC)
        z = cap * tanh(z / cap)
    if temperature is not None:
        z *= (1.0 / tl.load(temperature + rows * stride_temperature))[:, None]  # one division a row
    return z


@triton.jit
def target_column(target, V: tl.constexpr):
    """Token ids as int32 columns; -1, which is none, outside the vocabulary."""
    return tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)


@triton.jit
def grouped(program, row_blocks, column_blocks, GROUP: tl.constexpr):
    """The (row block, column block) of a program, in an order that keeps GROUP row blocks in the L2 cache.

    A program that follows another reads the same columns of the head until its group of row blocks is done.
    """
    group = program // (GROUP * column_blocks)
    height = tl.minimum(row_blocks - group * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    return group * GROUP + within % height, within // height


# Set when the kernels were decorated; then nothing but the dtype of operands differs.
INTERPRETED = not isinstance(grouped, triton.JITFunction)


def triton_type(dtype: torch.dtype) -> Any:
    """The accumulator's dtype as a kernel's constant."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def gather_rows(hidden: Tensor, index: Tensor | None) -> Tensor:
    """Rows of `hidden` as the kernels read them: next to each other, each starting at a multiple of 16 bytes."""
    n, width = hidden.shape[0] if index is None else index.shape[0], hidden.shape[1]
    if index is None and _aligned(hidden):
        return hidden
    padded = -(-width * hidden.itemsize // 16) * 16 // hidden.itemsize
    out = torch.empty(n, padded, dtype=hidden.dtype, device=hidden.device)[:, :width]
    return out.copy_(hidden) if index is None else torch.index_select(hidden, 0, index, out=out)


def _aligned(x: Tensor) -> bool:
    return (
        x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    )


def straighten(head: HeadRows, config: Config) -> HeadRows:
    """Token ids next to each other; and where the copy engine reads, a weight that lies as it must."""
    weight = gather_rows(head.weight[: head.vocab_size], None) if config.descriptors else head.weight
    return head._replace(weight=weight, target_ids=head.target_ids.contiguous())


def tile_arguments(head: HeadRows, hidden: Tensor, config: Config) -> dict[str, Any]:
    """What `logit_tile` needs of a head and gathered rows, by the names its callers give it."""
    temperature, adapter_hidden, adapter_weight = head.temperature, head.adapter_hidden, head.adapter_weight
    weight = head.weight
    row, column = (0, 0) if adapter_hidden is None else adapter_hidden.stride()
    adapter_row, adapter_column = (0, 0) if adapter_weight is None else adapter_weight.stride()
    strides = dict(
        stride_hidden_row=hidden.stride(0), stride_weight_row=weight.stride(0), stride_weight=weight.stride(1)
    )
    operands: dict[str, Any] = dict(hidden=hidden, weight=weight)
    if config.descriptors:
        operands = dict(
            hidden=TensorDescriptor.from_tensor(hidden, [config.block_n, config.block_h]),
            weight=TensorDescriptor.from_tensor(weight[: head.vocab_size], [config.block_v, config.block_h]),
        )
        strides = dict.fromkeys(strides, 0)
    return dict(
        **operands,
        **strides,
        bias=head.bias,
        adapter_hidden=adapter_hidden,
        adapter_weight=adapter_weight,
        temperature=temperature,
        n_rows=hidden.shape[0],
        stride_bias=0 if head.bias is None else head.bias.stride(0),
        stride_adapter_hidden_row=row,
        stride_adapter_hidden=column,
        stride_adapter_weight_row=adapter_row,
        stride_adapter_weight=adapter_column,
        stride_temperature=0 if temperature is None or temperature.ndim == 0 else temperature.stride(0),
        logit_scale=head.logit_scale,
        logit_softcap=head.logit_softcap or 0.0,
        HAS_SOFTCAP=head.logit_softcap is not None,
        H=hidden.shape[1],
        R=0 if adapter_weight is None else adapter_weight.shape[1],
        V=head.vocab_size,
        ACC=triton_type(hidden.dtype),
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        BLOCK_H=config.block_h,
        BLOCK_R=config.block_r,
        CHAIN=config.chain or hidden.shape[1],
        GROUP=config.group,
        DESCRIPTORS=config.descriptors,
        UPCAST=INTERPRETED,
    )
