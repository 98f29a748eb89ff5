"""What both routes of the backward share: the rows that take part, d_logits of tiles, and rows back in their places."""

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
class Upstream:
    """What the backward knows of the rows."""

    head: HeadRows
    result: HeadResult
    d_log_probs: Tensor  # [N], 0 where masked
    d_entropy: Tensor | None
    live: Tensor  # [N] bool
    index: Tensor  # [n]: the live rows, or all of them; ascending but for a list of cells
    all_live: bool  # known to be
    boost: Tensor | None  # [] what lifts fp16 gradients over its smallest exponent

    def hidden_rows(self, rows: slice) -> Tensor:
        """Gathered hidden states."""
        if self.all_live:
            return gather_rows(self.head.hidden[rows], None)
        return self.live_only(gather_rows(self.head.hidden, self.index[rows]), rows)

    def live_only(self, x: Tensor, rows: slice) -> Tensor:
        """Gathered rows, in place 0 where a row takes part without being live: what it holds may be NaN."""
        return x if counted(x) else x.masked_fill_(~self.live[self.index[rows], None], 0)


def make_upstream(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    index: Tensor | None = None,
    ascending: bool = True,
) -> Upstream:
    """`index`: the rows that take part, where that is known already."""
    dtype = accumulator(head.hidden.dtype)
    d_log_probs = torch.where(head.mask, d_log_probs, 0).to(dtype)
    live = d_log_probs != 0
    if d_entropy is not None:
        d_entropy = torch.where(head.mask, d_entropy, 0).to(dtype)
        live = live | (d_entropy != 0)
    rows = live.shape[0]
    if index is None:
        index = live.nonzero()[:, 0] if counted(live) else torch.arange(rows, device=live.device)
    boost = None
    if (
        head.hidden.dtype == torch.float16
    ):  # no entry of a row exceeds |d_log_prob| (1 - p) slope, but for the entropy's
        slope = head.logit_scale / (1 if head.temperature is None else head.temperature)
        boost = power_of_two(d_log_probs * torch.expm1(result.log_probs) * slope, d_entropy, live)
    all_live = ascending and counted(live) and index.shape[0] == rows
    return Upstream(head, result, d_log_probs, d_entropy, live, index, all_live, boost)


def rounds_later(head: HeadRows) -> bool:
    """Whether torch must round d_logits: Triton's interpreter truncates to bf16."""
    return INTERPRETED and head.hidden.dtype == torch.bfloat16


def counted(x: Tensor) -> bool:
    """Whether the host may read how many rows are live."""
    return not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def part_shape(head: HeadRows, n: int, config: Config, in_full: bool) -> tuple[int, int]:
    """(rows of a chunk, columns of a slab): what is alive at once fits the workspace."""
    size, width = head.hidden.dtype.itemsize, head.hidden.shape[1]
    space = workspace_bytes() * 15 // 16  # the rest is for vectors over rows
    per_element = size if size >= 4 or not in_full else 4 + size
    rows = min(space // 4 // (width * size), space // 2 // (config.block_v * per_element))
    rows = max(min(rows // config.block_n * config.block_n, _ROWS_AT_ONCE, n), min(config.block_n, n), 1)
    per_column = rows * per_element + (4 * width if size == 2 else 0)  # d_logits, and the slab of d_weight
    columns = (space - rows * width * size) // per_column // config.block_v * config.block_v
    return rows, max(columns, config.block_v)


def gradient_of_tiles(
    up: Upstream,
    hidden: Tensor,
    rows: slice,
    low: int,
    high: int,
    config: Config,
    in_full: bool,
    part: Part | None = None,
) -> Tensor:
    """d_logits of some rows and of columns low to high; in fp32 or fp64 if `in_full`, else as operands and boosted.

    With a `part` only of its cells, one after the other: [cells, block_n, block_v].
    """
    head, result, columns = up.head, up.result, high - low
    n, dtype = hidden.shape[0], up.d_log_probs.dtype if in_full else hidden.dtype
    row_blocks, column_blocks = -(-n // config.block_n), -(-columns // config.block_v)
    shape = (n, -(-columns // 8) * 8) if part is None else (part.cells, config.block_n, config.block_v)
    d_logits = torch.empty(shape, dtype=dtype, device=hidden.device)
    launch(
        gradient_tile,
        row_blocks * column_blocks if part is None else part.cells,
        config,
        **tile_arguments(head, hidden, config),
        target_ids=head.target_ids,
        index=up.index[rows],
        log_probs=result.log_probs,
        shift=result.shift,
        log_total=result.log_total,
        d_log_probs=up.d_log_probs,
        entropy=None if up.d_entropy is None else result.entropy,
        d_entropy=up.d_entropy,
        boost=None if in_full else up.boost,
        d_logits=d_logits,
        row_blocks=row_blocks,
        column_blocks=column_blocks,
        low=low,
        high=high,
        width=d_logits.shape[1],
        by_tile=None if part is None else part.lists.by_tile,
        first=0 if part is None else part.first,
        blocks=0 if part is None else part.lists.blocks,
    )
    return d_logits[:, :columns] if part is None else d_logits


def spread(sums: Tensor, up: Upstream, chunk: int) -> Tensor:
    """d_hidden in its own dtype, inside the memory of its sums.

    The sums of the n live rows lie last in `sums`. The row that goes to place i of N lies at N - n + (its rank), which
    is never below i: written in ascending order, no row overwrites one that has not been moved yet. Where there is room
    the result is copied out, not to hold twice its memory for longer.
    """
    dtype, (rows, width), n = up.head.hidden.dtype, sums.shape, up.index.shape[0]
    if dtype == sums.dtype and up.all_live:
        return sums
    out = sums.view(-1).view(dtype)[: rows * width].view(rows, width)
    for start in range(0, n, chunk):
        some = sums[rows - n + start : rows - n + min(start + chunk, n)]
        some = some.clone() if up.boost is None else some / up.boost
        out[up.index[start : start + chunk]] = some.to(dtype)
    if not up.all_live:
        out.masked_fill_(~up.live[:, None], 0)
    return out.clone() if dtype != sums.dtype and out.nbytes <= workspace_bytes() else out


def scatter(x: Tensor, up: Upstream, like: Tensor) -> Tensor:
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return out.index_put_((up.index,), x.to(like.dtype))
