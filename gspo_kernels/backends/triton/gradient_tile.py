"""The backward kernel: recompute a tile of logits and write its gradient, d_logits.

Formulas: `backward.py`. Must match `LogitGradients.d_logits` of the torch backend's `backward.py`. Tiles whose
exponentials the forward cached are computed by `cached_tile.py` instead.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .elementary import LOG2_E, LOG_OF_NOTHING, at_least, expm1, fast_exp
from .logit_tile import HeadPointers, HeadStrides, grouped, in_tile, logit_tile, target_column


class RowInputs(NamedTuple):
    """Per-row inputs of a tile, [N] except for boost; None if absent."""

    target_ids: Any
    log_probs: Any
    shift: Any
    log_total: Any
    d_log_probs: Any
    entropy: Any
    d_entropy: Any
    boost: Any  # []


@triton.jit(
    do_not_specialize=[
        "n_rows",
        "row_blocks",
        "column_blocks",
        "low",
        "high",
        "first_row",
        "first_cell",
        "part_row_blocks",
        "stride_temperature",
        "vocab_size",
    ]
)  # fmt: skip  # a list of names
def gradient_tile(
    hidden,  # [n, H]: gathered by `index`; this and the next five are fields of `HeadPointers`
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
    boost,  # []: d_logits are multiplied by it before they are rounded; or None
    by_tile,  # `CellLists.by_tile` if only the cells of a part are computed, or None
    n_cached,  # []: `cached_tile` computes the row blocks before this row; or None
    d_logits,  # out [n, width], or for a part [cells, BLOCK_N, BLOCK_V]
    n_rows: tl.int64,
    row_blocks: tl.int32,
    column_blocks: tl.int32,
    low: tl.int32,  # the slab's first column
    high: tl.int32,  # the slab's last column + 1
    width: tl.int64,
    first_row: tl.int64,  # number of rows before the chunk
    first_cell: tl.int64,  # index of the part's first cell in by_tile
    part_row_blocks: tl.int32,
    stride_hidden_row: tl.int64,
    stride_weight_row: tl.int64,
    stride_weight_column,  # strides that are mostly 1 have no type: Triton makes 1 a constant only if untyped
    stride_bias,
    stride_adapter_hidden_row: tl.int64,
    stride_adapter_hidden_column,
    stride_adapter_weight_row: tl.int64,
    stride_adapter_weight_column,
    stride_temperature: tl.int64,
    hidden_size: tl.int32,
    vocab_size: tl.int32,
    logit_scale: tl.float64,
    logit_softcap: tl.float64,
    HEAD: tl.constexpr,
    CONFIG: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Write d_logits = [d_log_prob (onehot - p) - d_entropy p (log p + entropy)] times the slope of the head's tail.

    Cost of a slab of C columns: 2 n C H operations, n H + C H operand elements read, n C written.
    """
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    if by_tile is not None:
        cell = tl.load(by_tile + first_cell + tl.program_id(0))
        row_block, tile = cell % part_row_blocks, cell // part_row_blocks
    else:
        row_block, tile = grouped(tl.program_id(0), row_blocks, column_blocks, GROUP=CONFIG.group)
    if n_cached is not None:
        if first_row + tl.minimum((row_block + 1).to(tl.int64) * BLOCK_N, n_rows) <= tl.load(n_cached):
            return
    n = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(index + tl.minimum(n, n_rows - 1))
    first_column = low + tile * BLOCK_V
    head = HeadPointers(
        hidden=hidden,
        weight=weight,
        bias=bias,
        adapter_hidden=adapter_hidden,
        adapter_weight=adapter_weight,
        temperature=temperature,
        strides=HeadStrides(
            hidden_row=stride_hidden_row,
            weight_row=stride_weight_row,
            weight_column=stride_weight_column,
            bias=stride_bias,
            adapter_hidden_row=stride_adapter_hidden_row,
            adapter_hidden_column=stride_adapter_hidden_column,
            adapter_weight_row=stride_adapter_weight_row,
            adapter_weight_column=stride_adapter_weight_column,
            temperature=stride_temperature,
        ),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
    z = logit_tile(
        head, rows, first_row=row_block * BLOCK_N, first_column=first_column, n_rows=n_rows, HEAD=HEAD, CONFIG=CONFIG
    )
    row_inputs = RowInputs(
        target_ids=target_ids,
        log_probs=log_probs,
        shift=shift,
        log_total=log_total,
        d_log_probs=d_log_probs,
        entropy=entropy,
        d_entropy=d_entropy,
        boost=boost,
    )
    d = _gradient_of_logits(
        z=z,
        head=head,
        rows=rows,
        first_column=first_column,
        row_inputs=row_inputs,
        ROUNDED=ROUNDED,
        HEAD=HEAD,
        BLOCK_V=BLOCK_V,
    )
    if first_column + BLOCK_V > high:  # columns beyond the slab or, for a cell, beyond the vocabulary
        d = tl.where((first_column + tl.arange(0, BLOCK_V))[None, :] < high, d, 0.0)
    column = tl.arange(0, BLOCK_V)[None, :]
    if by_tile is not None:  # block-sparse products read all entries of a cell
        at = tl.program_id(0).to(tl.int64) * (BLOCK_N * BLOCK_V) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_V + column
        if (row_block + 1).to(tl.int64) * BLOCK_N > n_rows:
            d = tl.where(n[:, None] < n_rows, d, 0.0)
        tl.store(d_logits + at, d.to(d_logits.dtype.element_ty))
    elif CONFIG.descriptors:
        d_logits.store([row_block * BLOCK_N, tile * BLOCK_V], d.to(d_logits.dtype))
    else:
        column = tile * BLOCK_V + column
        at = d_logits + n[:, None] * width + column
        tl.store(at, d.to(d_logits.dtype.element_ty), mask=(n[:, None] < n_rows) & (column < width))


@triton.jit
def _gradient_of_logits(
    z, head, rows, first_column, row_inputs, ROUNDED: tl.constexpr, HEAD: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Compute d_logits from the logits `z` of a tile; 0 in rows without a gradient."""
    ACC: tl.constexpr = HEAD.ACC
    d_log_p = tl.load(row_inputs.d_log_probs + rows)
    has_gradient = d_log_p != 0.0
    if HEAD.HAS_SOFTCAP:
        capped = z / tl.full([], head.logit_softcap, ACC)  # tanh of the logits before the soft-cap
    # Scale and temperature are one factor per row, so they multiply the row's gradients, not the tile.
    slope = row_slope(
        head.logit_scale, head.temperature, head.strides.temperature, rows=rows, boost=row_inputs.boost, ACC=ACC
    )
    if HEAD.HAS_SOFTCAP and head.temperature is not None:
        capped *= tl.load(head.temperature + rows * head.strides.temperature)[:, None]
    if row_inputs.d_entropy is not None:
        d_h, h = tl.load(row_inputs.d_entropy + rows), tl.load(row_inputs.entropy + rows)
        has_gradient |= d_h != 0.0
        h = tl.where(has_gradient, h, 0.0)
    # A row without a gradient may hold NaN. Make its probabilities 0 with one select per row, not per entry.
    log_total = tl.where(has_gradient, tl.load(row_inputs.log_total + rows), float("inf"))
    z -= tl.where(has_gradient, tl.load(row_inputs.shift + rows), 0.0)[:, None]
    if row_inputs.d_entropy is not None:
        z -= log_total[:, None]
        d = fast_exp(z) * (
            -(d_log_p * slope)[:, None] - (d_h * slope)[:, None] * (tl.maximum(z, LOG_OF_NOTHING) + h[:, None])
        )
    elif ROUNDED:  # rounding log_total in base 2 costs less accuracy than rounding d_logits
        d = tl.exp2(tl.fma(z, LOG2_E, -log_total[:, None] * LOG2_E)) * -(d_log_p * slope)[:, None]
    else:
        d = fast_exp(z - log_total[:, None]) * -(d_log_p * slope)[:, None]
    target = target_column(target=tl.load(row_inputs.target_ids + rows), vocab_size=head.vocab_size)
    _, tile_has_target = in_tile(target, first_column, BLOCK_V=BLOCK_V)
    if tile_has_target:
        d_target = gradient_of_target(row_inputs=row_inputs, rows=rows, has_gradient=has_gradient)
        columns = first_column + tl.arange(0, BLOCK_V)
        d = tl.where(columns[None, :] == target[:, None], (d_target * slope)[:, None], d)
    if HEAD.HAS_SOFTCAP:
        d *= 1.0 - capped * capped
    return d


@triton.jit
def row_slope(logit_scale, temperature, stride_temperature, rows, boost, ACC: tl.constexpr):
    """Slope of the head's tail without its soft-cap, [BLOCK_N]: logit_scale / temperature * boost."""
    slope = tl.full([rows.shape[0]], logit_scale, ACC)
    if temperature is not None:
        slope /= tl.load(temperature + rows * stride_temperature)
    if boost is not None:
        slope *= tl.load(boost)
    return slope


@triton.jit
def gradient_of_target(row_inputs, rows, has_gradient):
    """d_logits at the targets, [BLOCK_N], without cancellation: d_log_prob (1 - p) - d_entropy p (log p + entropy)."""
    log_p = tl.where(has_gradient, tl.load(row_inputs.log_probs + rows), 0.0)
    d = tl.load(row_inputs.d_log_probs + rows) * -expm1(log_p)
    if row_inputs.d_entropy is not None:
        h = tl.where(has_gradient, tl.load(row_inputs.entropy + rows), 0.0)
        log_p = at_least(log_p, LOG_OF_NOTHING)
        d -= tl.load(row_inputs.d_entropy + rows) * tl.exp(log_p) * (log_p + h)
    return d
