"""The backward's tile: logits recomputed, and the gradient of the loss with respect to them written out."""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# Triton types its kernels' arguments in a language of its own.

import triton
import triton.language as tl

from .elementary import LOG_OF_NOTHING, at_least, expm1
from .logit_tile import grouped, logit_tile, target_column


@triton.jit(
    do_not_specialize=[
        "n_rows", "row_blocks", "column_blocks", "low", "high", "width", "first", "blocks", "stride_temperature"
    ]
)  # fmt: skip
def gradient_tile(
    hidden,  # [n, H] in the order of `index`
    weight,
    bias,
    adapter_hidden,
    adapter_weight,
    temperature,
    target_ids,  # [N] int64
    index,  # [n] int64: rows of the batch
    log_probs,  # [N], as are the next five
    shift,
    log_total,
    d_log_probs,
    entropy,  # or None
    d_entropy,  # or None
    boost,  # [] what d_logits are multiplied by before they are rounded, or None
    by_tile,  # the cells of a part, as `cells.CellLists` has them, or None: all of them
    d_logits,  # out [n, width]; of cells [cells, BLOCK_N, BLOCK_V]
    n_rows: tl.int64,
    row_blocks: tl.int32,
    column_blocks: tl.int32,
    low: tl.int32,  # the slab's columns
    high: tl.int32,
    width: tl.int64,
    first: tl.int64,  # where the part's cells begin in by_tile
    blocks: tl.int32,  # of rows, in a part
    stride_hidden_row: tl.int64,
    stride_weight_row: tl.int64,
    stride_weight,  # untyped, as are the other strides that are mostly 1: a typed 1 would not become a constant
    stride_bias,
    stride_adapter_hidden_row: tl.int64,
    stride_adapter_hidden,
    stride_adapter_weight_row: tl.int64,
    stride_adapter_weight,
    stride_temperature: tl.int64,
    logit_scale: tl.float64,
    logit_softcap: tl.float64,
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
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """d_logits = [d_log_prob (onehot - p) - d_entropy p (log p + entropy)] times the slope of the head's tail.

    Two numbers for a slab of C columns: 2 n C H operations; n H + C H operand elements read, n C written.
    """
    if by_tile is not None:
        cell = tl.load(by_tile + first + tl.program_id(0))
        row_block, tile = cell % blocks, cell // blocks
    else:
        row_block, tile = grouped(tl.program_id(0), row_blocks, column_blocks, GROUP)
    n = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(index + tl.minimum(n, n_rows - 1))
    first = low + tile * BLOCK_V
    z = logit_tile(
        hidden, weight, bias, adapter_hidden, adapter_weight, temperature,
        row_block * BLOCK_N, first, n_rows, rows,
        stride_hidden_row, stride_weight_row, stride_weight, stride_bias,
        stride_adapter_hidden_row, stride_adapter_hidden, stride_adapter_weight_row, stride_adapter_weight,
        stride_temperature, logit_scale, logit_softcap,
        HAS_SOFTCAP, H, R, V, ACC, BLOCK_N, BLOCK_V, BLOCK_H, BLOCK_R, CHAIN, DESCRIPTORS, UPCAST,
    )  # fmt: skip
    d_log_p, log_p = tl.load(d_log_probs + rows), tl.load(log_probs + rows)
    live = d_log_p != 0.0
    if HAS_SOFTCAP:
        part = z / tl.full([], logit_softcap, ACC)
    # The slope of scale and temperature goes into what each row is multiplied by anyway.
    slope = tl.full([BLOCK_N], logit_scale, ACC)
    if temperature is not None:
        heat = tl.load(temperature + rows * stride_temperature)
        slope /= heat
        if HAS_SOFTCAP:
            part *= heat[:, None]
    if boost is not None:
        slope *= tl.load(boost)
    z = (z - tl.load(shift + rows)[:, None]) - tl.load(log_total + rows)[:, None]
    at_own = d_log_p * -expm1(log_p)  # d_log_prob (1 - p), nothing cancels
    d_log_p *= slope
    if d_entropy is not None:
        d_h, h = tl.load(d_entropy + rows), tl.load(entropy + rows)
        own = at_least(log_p, LOG_OF_NOTHING)
        at_own -= d_h * tl.exp(own) * (own + h)
        live |= d_h != 0.0
        d_h *= slope
        z = at_least(z, LOG_OF_NOTHING)
        d = tl.exp(z) * (-d_log_p[:, None] - d_h[:, None] * (z + h[:, None]))
    else:
        d = tl.exp(z) * -d_log_p[:, None]
    at_own *= slope
    v = first + tl.arange(0, BLOCK_V)
    target = target_column(tl.load(target_ids + rows), V)
    d = tl.where(v[None, :] == target[:, None], at_own[:, None], d)
    if HAS_SOFTCAP:
        d *= 1.0 - part * part
    d = tl.where(live[:, None], d, 0.0)
    inside = (n[:, None] < n_rows) & (v[None, :] < high)
    if by_tile is not None:  # products read whole cells
        at = tl.program_id(0).to(tl.int64) * (BLOCK_N * BLOCK_V)
        at += tl.arange(0, BLOCK_N)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        tl.store(d_logits + at, tl.where(inside, d, 0.0).to(d_logits.dtype.element_ty))
    else:
        at = n[:, None] * width + (v - low)[None, :]
        tl.store(d_logits + at, d.to(d_logits.dtype.element_ty), mask=inside)
