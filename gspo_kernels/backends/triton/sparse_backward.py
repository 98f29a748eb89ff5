"""The backward of a list of cells: d_logits of the live tiles, and block-sparse products of them.

As in the dense route slabs of columns are the outer loop, so that each slab of d_weight is rounded and written once,
and chunks of rows the inner one. Rows are in the order of their mass; d_hidden is summed at their places in the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import HeadGradients, HeadRows, LiveTiles, NeedsGradient
from .cells import CellLists, Part, cell_lists
from .gradient_rows import Upstream, gradient_of_tiles, part_shape, rounds_later, spread
from .sparse_products import add_products
from .tuning import Config


class Plan(NamedTuple):
    """What the host knows after its one look."""

    rows: int  # with a gradient
    sparse: bool  # whether only the cells are to be computed
    lists: CellLists
    counts: list[list[int]]  # cells of each [slab][chunk]
    columns: int  # of a slab
    chunk: int  # rows


def plan(head: HeadRows, live: LiveTiles, config: Config) -> Plan:
    """The only look of the host: how many rows there are, and how many cells of each part."""
    lists, columns, chunk = parts_of(head, live.cells, config)
    counts = lists.tile_begin[..., -1]
    rows, sparse, *found = torch.cat([live.counts, counts.flatten()]).tolist()
    by_slab = [found[at : at + counts.shape[1]] for at in range(0, len(found), counts.shape[1])]
    return Plan(rows, bool(sparse), lists, by_slab, columns, chunk)


def parts_of(head: HeadRows, cells: Tensor, config: Config) -> tuple[CellLists, int, int]:
    """Lists of `cells` [blocks, tiles] bool in parts that fit the workspace; columns of a slab, rows of a chunk."""
    chunk, columns = part_shape(head, head.hidden.shape[0], config, rounds_later(head))
    blocks = -(-chunk // config.block_n)
    return cell_lists(cells, columns // config.block_v, blocks), columns, blocks * config.block_n


def cell_backward(up: Upstream, rows_of_head: int, config: Config, needs: NeedsGradient, plan: Plan) -> HeadGradients:
    """Gradients of a head without bias and adapter, None where none is needed.

    `rows_of_head`: padding of the vocabulary included, which the copy of a weight may lack.
    """
    head, n, dtype = up.head, up.index.shape[0], up.d_log_probs.dtype
    width = head.hidden.shape[1]

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=head.hidden.device)

    d_hidden = zeros(*head.hidden.shape) if needs.hidden else None
    d_weight = zeros(rows_of_head, width, of=head.weight.dtype) if needs.weight else None
    first = 0
    for slab, counts in enumerate(plan.counts):
        low = slab * plan.columns
        high, d_slab = min(low + plan.columns, head.vocab_size), None
        if d_weight is not None and any(counts):
            d_slab = d_weight[low:high] if d_weight.dtype == dtype else zeros(high - low, width)
        for chunk, count in enumerate(counts):
            part = Part(plan.lists, slab * len(counts) + chunk, first, count, low)
            first += count
            if count:
                rows = slice(chunk * plan.chunk, min((chunk + 1) * plan.chunk, n))
                some = up.hidden_rows(rows)
                d_z = gradient_of_tiles(up, some, rows, low, high, config, rounds_later(head), part)
                if rounds_later(head):
                    d_z = (d_z if up.boost is None else d_z.mul_(up.boost)).to(some.dtype)
                add_products(d_z, some, head, part, up.index[rows], d_hidden, d_slab)
                del d_z, some  # or they would still be alive beside the next ones
        if d_weight is not None and d_slab is not None and d_weight.dtype != dtype:
            d_weight[low:high] = d_slab if up.boost is None else d_slab.div_(up.boost)
        del d_slab
    if d_hidden is not None:
        everywhere = torch.arange(d_hidden.shape[0], device=d_hidden.device)
        d_hidden = spread(d_hidden, replace(up, index=everywhere), plan.chunk)
    return HeadGradients(d_hidden, d_weight, None, None, None)
