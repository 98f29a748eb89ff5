"""Shared by both routes of the backward: rows with a gradient, d_logits of tiles, and moving rows back to their places.

"Part" and "cell": `cells.py`. Slab: columns of the vocabulary computed at a time. Chunk: rows computed at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import accumulator
from ..precision import power_of_two
from ..rows import HeadResult, HeadRows
from ..workspace import workspace_bytes
from .cells import Part
from .gradient_tile import gradient_tile
from .launch import launch
from .logit_tile import INTERPRETED, gather_rows, tile_arguments
from .tuning import Config

_ROWS_AT_ONCE = 8192  # enough that adding up d_weight over chunks costs 3 % of the products (benchmarks/NOTES.md)


@dataclass(frozen=True)
class GradientRows:
    """Per-row inputs of the backward, and which of the N rows of the batch take part in it."""

    head: HeadRows
    result: HeadResult
    d_log_probs: Tensor  # [N], 0 where masked
    d_entropy: Tensor | None
    live: Tensor  # [N] bool: has a gradient
    index: Tensor  # [n]: the rows that take part: the live ones, or all; ascending but for a list of cells
    all_live: bool  # known on the host; False if unknown
    boost: Tensor | None  # [] power of two that lifts fp16 gradients above fp16's smallest exponent

    def hidden(self, rows: slice) -> Tensor:
        """Gather hidden states of rows `rows` of `index`."""
        if self.all_live:
            return gather_rows(self.head.hidden[rows], None)
        return self.zero_dead(gather_rows(self.head.hidden, self.index[rows]), rows)

    def zero_dead(self, x: Tensor, rows: slice) -> Tensor:
        """Zero gathered rows that take part without a gradient, in place: they may hold NaN."""
        return x if may_read(x) else x.masked_fill_(~self.live[self.index[rows], None], 0)


def gradient_rows(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    index: Tensor | None = None,
    ascending: bool = True,
) -> GradientRows:
    """Find the rows with a gradient; `index` names them where they are known already."""
    dtype = accumulator(head.hidden.dtype)
    d_log_probs = torch.where(head.mask, d_log_probs, 0).to(dtype)
    live = d_log_probs != 0
    if d_entropy is not None:
        d_entropy = torch.where(head.mask, d_entropy, 0).to(dtype)
        live = live | (d_entropy != 0)
    n = live.shape[0]
    if index is None:
        index = live.nonzero()[:, 0] if may_read(live) else torch.arange(n, device=live.device)
    boost = None
    if head.hidden.dtype == torch.float16:
        # No entry of a row exceeds |d_log_prob| (1 - p) slope, but for the entropy's.
        slope = head.logit_scale / (1 if head.temperature is None else head.temperature)
        boost = power_of_two(d_log_probs * torch.expm1(result.log_probs) * slope, d_entropy, live)
    all_live = ascending and may_read(live) and index.shape[0] == n
    return GradientRows(head, result, d_log_probs, d_entropy, live, index, all_live, boost)


def torch_rounds(head: HeadRows) -> bool:
    """Return whether torch must round d_logits: Triton's interpreter truncates to bf16."""
    return INTERPRETED and head.hidden.dtype == torch.bfloat16


def may_read(x: Tensor) -> bool:
    """Return whether the host may read values of `x`: not of meta tensors, nor while a CUDA graph is captured."""
    return not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def part_shape(head: HeadRows, n: int, config: Config, unrounded: bool) -> tuple[int, int]:
    """Return (rows of a chunk, columns of a slab) whose tensors together fit the workspace."""
    size, width = head.hidden.dtype.itemsize, head.hidden.shape[1]
    space = workspace_bytes() * 15 // 16  # the remainder is for vectors over rows
    per_element = size if size >= 4 or not unrounded else 4 + size
    rows = min(space // 4 // (width * size), space // 2 // (config.block_v * per_element))
    rows = max(min(rows // config.block_n * config.block_n, _ROWS_AT_ONCE, n), min(config.block_n, n), 1)
    per_column = rows * per_element + (4 * width if size == 2 else 0)  # d_logits, and the slab of d_weight
    columns = (space - rows * width * size) // per_column // config.block_v * config.block_v
    return rows, max(columns, config.block_v)


def gradient_of_tiles(
    rows: GradientRows,
    hidden: Tensor,
    chunk: slice,
    low: int,
    high: int,
    config: Config,
    unrounded: bool,
    part: Part | None = None,
) -> Tensor:
    """Compute d_logits of a chunk of rows and of columns low to high, or with a `part` of its cells only.

    Args:
        hidden: [n, H], hidden states of the chunk.
        unrounded: in fp32 or fp64; else in the operands' dtype, boosted.

    Returns:
        [n, high - low], or the part's cells one after the other: [cells, block_n, block_v].
    """
    head, result, columns = rows.head, rows.result, high - low
    n, dtype = hidden.shape[0], rows.d_log_probs.dtype if unrounded else hidden.dtype
    row_blocks, column_blocks = -(-n // config.block_n), -(-columns // config.block_v)
    shape = (n, -(-columns // 8) * 8) if part is None else (part.cells, config.block_n, config.block_v)
    d_logits = torch.empty(shape, dtype=dtype, device=hidden.device)
    launch(
        gradient_tile,
        row_blocks * column_blocks if part is None else part.cells,
        config,
        **tile_arguments(head, hidden, config),
        target_ids=head.target_ids,
        index=rows.index[chunk],
        log_probs=result.log_probs,
        shift=result.shift,
        log_total=result.log_total,
        d_log_probs=rows.d_log_probs,
        entropy=None if rows.d_entropy is None else result.entropy,
        d_entropy=rows.d_entropy,
        boost=None if unrounded else rows.boost,
        d_logits=d_logits,
        row_blocks=row_blocks,
        column_blocks=column_blocks,
        low=low,
        high=high,
        width=d_logits.shape[1],
        by_tile=None if part is None else part.lists.by_tile,
        first_cell=0 if part is None else part.first_cell,
        part_row_blocks=0 if part is None else part.lists.row_blocks,
    )
    return d_logits[:, :columns] if part is None else d_logits


def round_to_operands(d_logits: Tensor, rows: GradientRows) -> Tensor:
    """Boost unrounded d_logits in place and round them to the operands' dtype."""
    return (d_logits if rows.boost is None else d_logits.mul_(rows.boost)).to(rows.head.hidden.dtype)


def scatter_in_place(sums: Tensor, rows: GradientRows, chunk: int) -> Tensor:
    """Return d_hidden [N, H] in its own dtype, inside the memory of its sums.

    The sums of the n rows that take part lie last in `sums` [N, H]. The row that goes to place i of N lies at
    N - n + (its rank), which is never below i: moved in ascending order, no row overwrites one that has not been moved
    yet. Where there is room the result is copied, so that twice its memory is not held for longer.
    """
    dtype, (n_rows, width), n = rows.head.hidden.dtype, sums.shape, rows.index.shape[0]
    if dtype == sums.dtype and rows.all_live:
        return sums
    out = sums.view(-1).view(dtype)[: n_rows * width].view(n_rows, width)
    for start in range(0, n, chunk):
        moved = sums[n_rows - n + start : n_rows - n + min(start + chunk, n)]
        moved = moved.clone() if rows.boost is None else moved / rows.boost
        out[rows.index[start : start + chunk]] = moved.to(dtype)
    if not rows.all_live:
        out.masked_fill_(~rows.live[:, None], 0)
    return out.clone() if dtype != sums.dtype and out.nbytes <= workspace_bytes() else out


def scatter(x: Tensor, rows: GradientRows, like: Tensor) -> Tensor:
    """Return `x` [n, ...] at its places among the N rows of a new tensor like `like`."""
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return out.index_put_((rows.index,), x.to(like.dtype))
