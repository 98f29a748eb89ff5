"""Steps shared by the dense and the sparse backward: gather rows, compute d_logits, scatter rows.

A slab is a range of vocabulary columns, a chunk is a range of rows. `cells/` defines cells and parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...layout import accumulator
from ..live_tiles import is_captured, leading
from ..precision import add_product, power_of_two
from ..rows import Cached, HeadResult, HeadRows
from .cached_tile import launch_cached_tile
from .gradient_tile import gradient_tile
from .launch import launch
from .logit_tile import INTERPRETED, gather_rows, tile_arguments
from .split import slab_of, split_rows
from .tuning import Config

# Compiled variants of `gradient_tile` for cells, once the kernels of the corresponding dense backward are loaded.
_ready_for_capture: set[Any] = {None}  # None if kernels are interpreted


class CellRange(NamedTuple):
    """Cells whose d_logits are computed at once, and places in the list of cells."""

    by_tile: Tensor  # `CellLists.by_tile`
    row_blocks: int  # `CellLists.row_blocks`
    first_cell: int  # index of the first cell in `by_tile`
    cells: int  # number of cells


@dataclass(frozen=True)
class GradientRows:
    """Per-row inputs of the backward, not yet gathered, and the index of the rows to gather.

    The torch backend's counterpart is `LogitGradients`, which gathers them.
    """

    head: HeadRows
    result: HeadResult
    d_log_probs: Tensor  # [N], 0 where masked
    d_entropy: Tensor | None  # [N]
    has_gradient: Tensor  # [N] bool
    index: Tensor  # [n] rows to gather, ascending; for selected cells, ordered by mass
    index_is_all_rows: bool  # True only if the host knows that index is 0 ... N - 1
    boost: Tensor | None  # [] power of two that lifts fp16 gradients above fp16's smallest exponent
    cached: Cached | None  # exponentials that the forward cached, if any
    n_cached: Tensor | None  # []: number of leading rows of `index` whose exponentials are cached, if any are

    def hidden(self, rows: slice) -> Tensor:
        """Gather the hidden states of a chunk, `index[rows]`, [rows, H], or their parts if they are split."""
        if self.index_is_all_rows:
            hidden = gather_rows(self.head.hidden[rows], None)
        else:
            hidden = self.zero_rows_without_gradient(gather_rows(self.head.hidden, self.index[rows]), rows)
        return split_rows(hidden, self.head.split)

    def slab(self, low: int, high: int, config: Config) -> GradientRows:
        """`split.slab_of`, with its part of the cache."""
        if not self.head.split:
            return self
        cached = self.cached
        if cached is not None:
            top = cached.top[low // config.block_v :]
            cached = cached._replace(exponentials=cached.exponentials[:, low:], top=top)
        return replace(self, head=slab_of(self.head, low, high), cached=cached)

    def zero_rows_without_gradient(self, x: Tensor, rows: slice) -> Tensor:
        """Set gathered rows without a gradient to 0, in place, because they may hold NaN.

        Such rows are gathered only if the host must not read values.
        """
        return x if may_read(x) else x.masked_fill_(~self.has_gradient[self.index[rows], None], 0)


def gradient_rows(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    index: Tensor | None = None,
    ascending: bool = True,
    cached: Cached | None = None,
) -> GradientRows:
    """Collect the per-row inputs of the backward, and find the rows to gather.

    Args:
        d_log_probs, d_entropy: [N], 0 where masked.
        index: rows to gather, [n]; None: rows with a gradient.
        ascending: whether `index` ascends; True if it is None.
    """
    dtype = accumulator(head.hidden.dtype)
    d_log_probs = d_log_probs.to(dtype)
    has_gradient = d_log_probs != 0
    if d_entropy is not None:
        d_entropy = d_entropy.to(dtype)
        has_gradient = has_gradient | (d_entropy != 0)
    n = has_gradient.shape[0]
    if index is None:
        index = has_gradient.nonzero()[:, 0] if may_read(has_gradient) else torch.arange(n, device=has_gradient.device)
    if not may_read(has_gradient):  # all rows are computed, and rows without a gradient may hold NaN
        head = _zero_dead_rows(head, has_gradient)
    boost = None
    if head.hidden.dtype == torch.float16:
        # Entries of d_logits are at most |d_log_prob| (1 - p) slope, and its entropy term at most about
        # |d_entropy| slope.
        slope = head.logit_scale / (1 if head.temperature is None else head.temperature)
        boost = power_of_two(d_log_probs * torch.expm1(result.log_probs), d_entropy, has_gradient, slope)
    index_is_all_rows = ascending and may_read(has_gradient) and index.shape[0] == n
    cached = None if cached is None or not cached.exponentials.numel() else cached
    n_cached = None if cached is None else leading(((cached.place < cached.n_cached) | ~has_gradient)[index])
    return GradientRows(
        head, result, d_log_probs, d_entropy, has_gradient, index, index_is_all_rows, boost, cached, n_cached
    )


def _zero_dead_rows(head: HeadRows, has_gradient: Tensor) -> HeadRows:
    """Make temperature and adapter_hidden finite in rows without a gradient."""
    temperature, adapter_hidden = head.temperature, head.adapter_hidden
    if temperature is not None and temperature.ndim:
        temperature = torch.where(has_gradient, temperature, 1)
    if adapter_hidden is not None:
        adapter_hidden = torch.where(has_gradient[:, None], adapter_hidden, 0)
    return head._replace(temperature=temperature, adapter_hidden=adapter_hidden)


def torch_rounds(head: HeadRows) -> bool:
    """True if torch must round d_logits, because Triton's interpreter truncates to bf16."""
    return INTERPRETED and head.kernel_dtype == torch.bfloat16


def may_read(x: Tensor) -> bool:
    """False for meta tensors and while a CUDA graph is captured: the host then cannot read values of `x`."""
    return not x.is_meta and not is_captured(x.device)


def gradient_of_tiles(
    rows: GradientRows,
    hidden: Tensor,
    chunk: slice,
    low: int,
    high: int,
    config: Config,
    unrounded: bool,
    part: CellRange | None = None,
) -> Tensor:
    """Compute d_logits for a chunk of rows and columns low to high, or for the cells of a part.

    Args:
        hidden: [n, H], hidden states of the chunk.
        unrounded: return fp32 or fp64. Otherwise multiply by `rows.boost` and round to the operands' dtype.

    Returns:
        [n, high - low], or for a part [cells, block_n, block_v].
    """
    head = rows.head
    result = rows.result
    columns = high - low
    n = hidden.shape[0]
    dtype = rows.d_log_probs.dtype if unrounded else hidden.dtype
    row_blocks, column_blocks = -(-n // config.block_n), -(-columns // config.block_v)
    shape = (n, -(-columns // 16) * 16) if part is None else (part.cells, config.block_n, config.block_v)
    d_logits = torch.empty(shape, dtype=dtype, device=hidden.device)
    programs = row_blocks * column_blocks if part is None else part.cells
    operands = tile_arguments(head, hidden, config)
    shared: dict[str, Any] = dict(
        target_ids=head.target_ids,
        index=rows.index[chunk],
        log_probs=result.log_probs,
        shift=result.shift,
        log_total=result.log_total,
        d_log_probs=rows.d_log_probs,
        entropy=None if rows.d_entropy is None else result.entropy,
        d_entropy=rows.d_entropy,
        boost=None if unrounded else rows.boost,
        row_blocks=row_blocks,
        column_blocks=column_blocks,
        low=low,
        high=high,
        width=d_logits.shape[1],
        by_tile=None if part is None else part.by_tile,
        n_cached=rows.n_cached,
        first_row=chunk.start,
        first_cell=0 if part is None else part.first_cell,
        part_row_blocks=0 if part is None else part.row_blocks,
    )
    if rows.cached is not None:
        launch_cached_tile(rows.cached, programs, config, operands | shared, d_logits)
    out: Any = d_logits
    if config.descriptors and part is None:
        out = TensorDescriptor.from_tensor(d_logits, [config.block_n, config.block_v])
    compiled = launch(gradient_tile, programs, config, **operands, **shared, d_logits=out, ROUNDED=dtype.itemsize == 2)
    if part is not None and compiled not in _ready_for_capture:
        _ready_for_capture.add(compiled)
        _load_dense_kernels(rows, config)
    return d_logits[:, :columns] if part is None else d_logits


def _load_dense_kernels(rows: GradientRows, config: Config) -> None:
    """Load the kernels of the dense backward by computing one entry of d_logits and one product.

    While a CUDA graph is captured, a step with a budget takes the dense backward. A capture cannot load kernels or
    create cuBLAS handles, and earlier steps may have computed cells only.
    """
    slab = rows.slab(0, 1, config)
    d_z = gradient_of_tiles(slab, rows.hidden(slice(0, 1)), slice(0, 1), 0, 1, config, unrounded=False)
    width = rows.head.hidden.shape[1]
    add_product(rows.d_log_probs.new_empty(1, width), d_z, slab.head.weight[:1, -width:], first=True)


def round_to_operands(d_logits: Tensor, rows: GradientRows) -> Tensor:
    """Multiply unrounded d_logits by `rows.boost`, in place, and round them to the operands' dtype."""
    return (d_logits if rows.boost is None else d_logits.mul_(rows.boost)).to(rows.head.kernel_dtype)


def scatter_in_place(sums: Tensor, rows: GradientRows, chunk: int) -> Tensor:
    """Move the gathered rows' sums to d_hidden, [N, H] in the dtype of hidden; other rows get 0. Overwrites `sums`.

    The gathered rows' sums are the last n rows of `sums` [N, H]. A result in another dtype that does not fit the
    workspace is written into the memory of `sums`. Row N - n + k then moves to row index[k], in ascending k. The index
    ascends, so index[k] <= N - n + k, and no row overwrites one that has not moved yet.
    """
    dtype = rows.head.hidden.dtype
    n_rows, width = sums.shape
    n = rows.index.shape[0]
    fits = dtype != sums.dtype and (n_rows + chunk) * width * dtype.itemsize <= rows.head.workspace
    if rows.index_is_all_rows and (fits or dtype == sums.dtype):
        return (sums if rows.boost is None else sums.div_(rows.boost)).to(dtype)
    out = sums.view(-1).view(dtype)[: n_rows * width].view(n_rows, width)
    if fits:
        out = torch.zeros_like(out)
    for start in range(0, n, chunk):
        chunk_sums = sums[n_rows - n + start : n_rows - n + min(start + chunk, n)]
        if not fits:
            chunk_sums = chunk_sums.clone()
        out[rows.index[start : start + chunk]] = (chunk_sums if rows.boost is None else chunk_sums.div_(rows.boost)).to(
            dtype
        )
    if not fits and not rows.index_is_all_rows:
        out.masked_fill_(~rows.has_gradient[:, None], 0)
    return out


def scatter(x: Tensor, rows: GradientRows, like: Tensor) -> Tensor:
    """Scatter gathered rows [n, ...] to the shape and dtype of `like` [N, ...]; other rows are 0."""
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return out.index_put_((rows.index,), x.to(like.dtype))
