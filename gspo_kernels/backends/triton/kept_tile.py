"""The kernel of the backward for tiles whose exponentials the forward kept: it computes d_logits without a product.

Formulas: `backward.py`. Must match the torch backend's `kept_tiles.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from .elementary import KEPT_FACTOR, LOG_OF_NOTHING
from .gradient_tile import RowInputs, gradient_of_target, row_slope, store_tile
from .logit_tile import HeadArguments, HeadStrides, grouped, in_tile, target_column


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
        "stride_top",
        "vocab_size",
    ]
)  # fmt: skip  # a list of names
def kept_tile(
    exponentials,  # [C, columns]: this and the next two are fields of `Kept`
    top,
    place,
    n_kept,  # []: only row blocks before this row are computed
    temperature,  # [] or [N], or None
    target_ids,  # [N] int64
    index,  # [n] int64: rows of the batch
    log_probs,  # [N], as are the next five
    shift,
    log_total,
    d_log_probs,
    entropy,  # or None
    d_entropy,  # or None
    boost,  # []: d_logits are multiplied by it before they are rounded; or None
    by_tile,  # as in `gradient_tile`, as are the next seven
    d_logits,
    n_rows: tl.int64,
    row_blocks: tl.int32,
    column_blocks: tl.int32,
    low: tl.int32,
    high: tl.int32,
    width: tl.int64,
    first_row: tl.int64,
    first_cell: tl.int64,
    part_row_blocks: tl.int32,
    stride_exponentials: tl.int64,
    stride_top: tl.int64,
    stride_temperature: tl.int64,
    vocab_size: tl.int32,
    logit_scale: tl.float64,
    logit_softcap: tl.float64,
    HEAD: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Write d_logits of a tile, as `gradient_tile` does, from the kept exponentials E: p = E exp(top - log-sum-exp).

    For a slab of C columns, n C values are read and n C written.
    """
    ACC: tl.constexpr = HEAD.ACC
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    if by_tile is not None:
        cell = tl.load(by_tile + first_cell + tl.program_id(0))
        row_block, tile = cell % part_row_blocks, cell // part_row_blocks
    else:
        row_block, tile = grouped(tl.program_id(0), row_blocks, column_blocks, GROUP=CONFIG.group)
    if first_row + tl.minimum((row_block + 1).to(tl.int64) * BLOCK_N, n_rows) > tl.load(n_kept):
        return
    n = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(index + tl.minimum(n, n_rows - 1))
    first_column = low + tile * BLOCK_V
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
    has_gradient = tl.load(d_log_probs + rows) != 0.0
    if d_entropy is not None:
        has_gradient |= tl.load(d_entropy + rows) != 0.0
    # Rows without a gradient may hold NaN, and may not be kept. Columns are padded to full tiles, so none is masked.
    at = tl.where(has_gradient, tl.load(place + rows), 0)
    columns = first_column + tl.arange(0, BLOCK_V)[None, :]
    to = exponentials + at[:, None] * stride_exponentials + columns
    e = tl.load(to, mask=has_gradient[:, None], other=0.0).to(ACC)
    if exponentials.dtype.element_ty == tl.float16:
        e *= 1.0 / KEPT_FACTOR
    tile_top = tl.load(top + (first_column // BLOCK_V).to(tl.int64) * stride_top + at)
    d = _gradient_of_kept(
        e=e,
        tile_top=tile_top,
        has_gradient=has_gradient,
        head=HeadArguments(
            hidden=None,
            weight=None,
            bias=None,
            adapter_hidden=None,
            adapter_weight=None,
            temperature=temperature,
            strides=HeadStrides(
                hidden_row=0,
                weight_row=0,
                weight_column=0,
                bias=0,
                adapter_hidden_row=0,
                adapter_hidden_column=0,
                adapter_weight_row=0,
                adapter_weight_column=0,
                temperature=stride_temperature,
            ),
            hidden_size=0,
            vocab_size=vocab_size,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
        ),
        rows=rows,
        first_column=first_column,
        row_inputs=row_inputs,
        HEAD=HEAD,
        BLOCK_V=BLOCK_V,
    )
    store_tile(
        d=d,
        d_logits=d_logits,
        is_cell=by_tile is not None,
        row_block=row_block,
        tile=tile,
        n_rows=n_rows,
        low=low,
        high=high,
        width=width,
        CONFIG=CONFIG,
    )


@triton.jit
def _gradient_of_kept(
    e, tile_top, has_gradient, head, rows, first_column, row_inputs, HEAD: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Return d_logits of a tile of exponentials `e`, which are 0 in rows without a gradient."""
    shift = tl.where(has_gradient, tl.load(row_inputs.shift + rows), 0.0)
    log_total = tl.where(has_gradient, tl.load(row_inputs.log_total + rows), 0.0)
    # At most 0, except for a tile that consists of the target's column, where e is 0.
    log_scale = tl.minimum((tile_top - shift) - log_total, 0.0)
    log_scale = tl.where(has_gradient, log_scale, 0.0)
    slope = row_slope(head=head, rows=rows, boost=row_inputs.boost, ACC=HEAD.ACC)
    minus_d = -tl.load(row_inputs.d_log_probs + rows) * slope
    scale = tl.exp(log_scale)
    target = target_column(target=tl.load(row_inputs.target_ids + rows), vocab_size=head.vocab_size)
    _, tile_has_target = in_tile(target, first_column, BLOCK_V=BLOCK_V)
    is_target = (first_column + tl.arange(0, BLOCK_V))[None, :] == target[:, None]
    if HEAD.HAS_SOFTCAP or row_inputs.d_entropy is not None:
        log_p = tl.where(e > 0, tl.log(e), LOG_OF_NOTHING) + log_scale[:, None]
    if row_inputs.d_entropy is not None:
        h = tl.where(has_gradient, tl.load(row_inputs.entropy + rows), 0.0)
        minus_d_h = -tl.load(row_inputs.d_entropy + rows) * slope
        d = e * scale[:, None] * (minus_d[:, None] + minus_d_h[:, None] * (log_p + h[:, None]))
    else:
        d = e * (scale * minus_d)[:, None]
    if tile_has_target:
        d_target = gradient_of_target(row_inputs=row_inputs, rows=rows, has_gradient=has_gradient)
        d = tl.where(is_target, (d_target * slope)[:, None], d)
    if HEAD.HAS_SOFTCAP:
        # Nothing is kept of the target's logit. Logits whose exponentials were rounded to 0 have d = 0.
        target_log_p = tl.where(has_gradient, tl.load(row_inputs.log_probs + rows), 0.0)
        capped = tl.where(is_target, target_log_p[:, None], log_p) + (shift + log_total)[:, None]
        capped /= tl.full([], head.logit_softcap, HEAD.ACC)
        if head.temperature is not None:
            capped *= tl.load(head.temperature + rows * head.strides.temperature)[:, None]
        d *= 1.0 - capped * capped
    return d
