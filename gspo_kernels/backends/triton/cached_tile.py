"""The backward kernel for tiles with cached exponentials: compute d_logits without a matrix product.

Formulas: `backward.py`. Must match the torch backend's `cached_tile.py`.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..rows import Cached
from .elementary import CACHED_FACTOR, LOG_OF_NOTHING, at_most
from .gradient_tile import RowInputs, gradient_of_target, row_slope
from .launch import launch
from .logit_tile import grouped, target_column
from .tuning import CACHED_STEP, Config


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
def cached_tile(
    exponentials,  # [C, columns]: this and the next two are fields of `Cached`
    top,
    place,
    n_cached,  # []: only the row blocks before this row are computed
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
    by_tile,  # as in `gradient_tile`, as are the next eight
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
    STEP: tl.constexpr,  # columns computed at a time
):
    """Write d_logits of a tile, as `gradient_tile` does, from the cached exponentials E: p = E exp(top - log-sum-exp).

    Cost of a slab of C columns: n C values read, n C written.
    """
    ACC: tl.constexpr = HEAD.ACC
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_V: tl.constexpr = CONFIG.block_v
    if by_tile is not None:
        cell = tl.load(by_tile + first_cell + tl.program_id(0))
        row_block, tile = cell % part_row_blocks, cell // part_row_blocks
    else:
        row_block, tile = grouped(tl.program_id(0), row_blocks, column_blocks, GROUP=CONFIG.group)
    if first_row + tl.minimum((row_block + 1).to(tl.int64) * BLOCK_N, n_rows) > tl.load(n_cached):
        return
    n = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(index + tl.minimum(n, n_rows - 1))
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
    has_gradient &= n < n_rows
    at = tl.where(has_gradient, tl.load(place + rows), 0)  # rows without a gradient may not be cached
    shift_of_row = tl.where(has_gradient, tl.load(shift + rows), 0.0)
    log_total_of_row = tl.where(has_gradient, tl.load(log_total + rows), 0.0)
    tile_of_forward = low // BLOCK_V + tile
    tile_top = tl.load(top + tile_of_forward.to(tl.int64) * stride_top + at)
    # At most 0, unless the target's column is the only one of the tile. Then the exponentials are 0.
    log_scale = at_most((tile_top - shift_of_row) - log_total_of_row, 0.0)
    log_scale = tl.where(has_gradient, log_scale, 0.0)
    slope = row_slope(logit_scale, temperature, stride_temperature, rows=rows, boost=boost, ACC=ACC)
    target = target_column(target=tl.load(target_ids + rows), vocab_size=vocab_size)
    target = tl.where(has_gradient, target, -1)
    d_target = slope * gradient_of_target(row_inputs=row_inputs, rows=rows, has_gradient=has_gradient)
    for start in range(0, BLOCK_V, STEP):
        columns = tile_of_forward * BLOCK_V + start + tl.arange(0, STEP)
        # Columns are padded to full tiles. Rows without a gradient are not read, because they may hold NaN.
        to = exponentials + at[:, None] * stride_exponentials + columns[None, :]
        e = tl.load(to, mask=has_gradient[:, None], other=0.0).to(ACC)
        if exponentials.dtype.element_ty == tl.float16:
            e *= 1.0 / CACHED_FACTOR
        is_target = columns[None, :] == target[:, None]
        if HEAD.HAS_SOFTCAP or d_entropy is not None:
            log_p = tl.where(e > 0, tl.log(e), LOG_OF_NOTHING) + log_scale[:, None]
        scale = -tl.load(d_log_probs + rows) * slope
        if d_entropy is not None:
            h = tl.where(has_gradient, tl.load(entropy + rows), 0.0)
            scale_h = -tl.load(d_entropy + rows) * slope
            d = e * tl.exp(log_scale)[:, None] * (scale[:, None] + scale_h[:, None] * (log_p + h[:, None]))
        else:
            d = e * (tl.exp(log_scale) * scale)[:, None]
        d = tl.where(is_target, d_target[:, None], d)
        if HEAD.HAS_SOFTCAP:
            # The target's logit is not cached. Where an exponential was rounded to 0, d is 0.
            target_log_p = tl.where(has_gradient, tl.load(log_probs + rows), 0.0)
            capped = tl.where(is_target, target_log_p[:, None], log_p) + (shift_of_row + log_total_of_row)[:, None]
            capped /= tl.full([], logit_softcap, ACC)
            if temperature is not None:
                capped *= tl.load(temperature + rows * stride_temperature)[:, None]
            d *= 1.0 - capped * capped
        d = d.to(d_logits.dtype.element_ty)
        if by_tile is not None:
            cell_at = tl.program_id(0).to(tl.int64) * (BLOCK_N * BLOCK_V) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_V
            tl.store(d_logits + cell_at + start + tl.arange(0, STEP)[None, :], d)
        else:
            column = tile * BLOCK_V + start + tl.arange(0, STEP)[None, :]
            slab_at = d_logits + n[:, None] * width + column
            tl.store(slab_at, d, mask=(n[:, None] < n_rows) & (column < width))


def launch_cached_tile(
    cached: Cached, programs: int, config: Config, arguments: dict[str, Any], d_logits: Tensor
) -> None:
    """Launch `cached_tile` with the arguments of `gradient_tile`, from which the head's operands are removed."""
    matrices = ("hidden", "weight", "bias", "adapter_hidden", "adapter_weight", "hidden_size")
    unused = {name for name in arguments if name.startswith(tuple(f"stride_{x}" for x in matrices)) or name in matrices}
    launch(
        cached_tile,
        programs,
        config,
        exponentials=cached.exponentials,
        top=cached.top,
        place=cached.place,
        stride_exponentials=cached.exponentials.stride(0),
        stride_top=cached.top.stride(0),
        d_logits=d_logits,
        STEP=CACHED_STEP,
        **{name: x for name, x in arguments.items() if name not in unused},
    )
