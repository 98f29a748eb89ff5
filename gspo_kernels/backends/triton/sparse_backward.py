"""The backward of selected cells: d_logits of these cells only, and block-sparse products of them.

As in the dense backward, slabs are the outer loop and chunks the inner one, so that each slab of d_weight is rounded
and written once. Rows are in the order of their mass. d_hidden is summed at the rows' places in the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import HeadGradients, HeadRows, LiveTiles, NeedsGradient
from .cells import CellLists, Part, cell_lists
from .gradient_rows import (
    GradientRows,
    chunk_and_slab,
    gradient_of_tiles,
    round_to_operands,
    scatter_in_place,
    torch_rounds,
)
from .sparse_products import add_to_hidden, add_to_weight
from .tuning import Config


class CellPlan(NamedTuple):
    """The cells to compute, with the numbers that the host reads from the device."""

    rows: int  # number of rows with a gradient
    sparse: bool  # compute only the listed cells, not all columns
    lists: CellLists
    counts: list[list[int]]  # number of cells of each part, [slab][chunk]
    columns: int  # columns of a slab
    chunk: int  # rows of a chunk


def plan_cells(head: HeadRows, live_tiles: LiveTiles, config: Config) -> CellPlan:
    """List the cells to compute. Read the number of rows and the number of cells of each part on the host, once."""
    lists, columns, chunk = parts_of(head, live_tiles.cells, config)
    counts = lists.tile_begin[..., -1]  # [S, C]
    rows, sparse, *flat = torch.cat([live_tiles.counts, counts.flatten()]).tolist()
    by_slab = [flat[start : start + counts.shape[1]] for start in range(0, len(flat), counts.shape[1])]
    return CellPlan(rows, bool(sparse), lists, by_slab, columns, chunk)


def parts_of(head: HeadRows, cells: Tensor, config: Config) -> tuple[CellLists, int, int]:
    """List `cells` [row blocks, tiles] bool in parts that fit the workspace.

    Returns:
        the lists, the columns of a slab and the rows of a chunk.
    """
    chunk, columns = chunk_and_slab(head, head.hidden.shape[0], config, torch_rounds(head))
    blocks = -(-chunk // config.block_n)
    return cell_lists(cells, columns // config.block_v, blocks), columns, blocks * config.block_n


def cell_backward(
    rows: GradientRows, rows_of_weight: int, config: Config, needs: NeedsGradient, plan: CellPlan
) -> HeadGradients:
    """Compute the gradients of hidden states and weight, None where `needs` is False. The head has no bias or adapter.

    `rows_of_weight` is V with the padding of the vocabulary, which the weight in `rows.head` may lack.
    """
    head, dtype, unrounded = rows.head, rows.d_log_probs.dtype, torch_rounds(rows.head)
    n, width = rows.index.shape[0], head.hidden.shape[1]
    d_hidden = (
        torch.zeros_like(head.hidden, dtype=dtype, memory_format=torch.contiguous_format) if needs.hidden else None
    )
    d_weight = head.weight.new_zeros(rows_of_weight, width) if needs.weight else None
    first_cell = 0
    for slab, counts in enumerate(plan.counts):
        low = slab * plan.columns
        high, d_slab = min(low + plan.columns, head.vocab_size), None
        if d_weight is not None and any(counts):
            d_slab = d_weight[low:high]
            if d_weight.dtype != dtype:
                d_slab = torch.zeros_like(d_slab, dtype=dtype)
        for chunk_number, cells in enumerate(counts):
            part = Part(plan.lists, slab * len(counts) + chunk_number, first_cell, cells, low)
            first_cell += cells
            if cells:
                chunk = slice(chunk_number * plan.chunk, min((chunk_number + 1) * plan.chunk, n))
                hidden = rows.hidden(chunk)
                d_z = gradient_of_tiles(rows, hidden, chunk, low, high, config, unrounded, part)
                d_z = round_to_operands(d_z, rows) if unrounded else d_z
                if d_hidden is not None:
                    add_to_hidden(d_hidden, d_z, head, part, rows.index[chunk])
                if d_slab is not None:
                    add_to_weight(d_slab, d_z, hidden, part)
                del d_z, hidden  # frees their memory before the next ones are allocated
        if d_weight is not None and d_slab is not None and d_weight.dtype != dtype:
            d_weight[low:high] = d_slab if rows.boost is None else d_slab.div_(rows.boost)
        del d_slab
    if d_hidden is not None:
        all_rows = torch.arange(d_hidden.shape[0], device=d_hidden.device)
        d_hidden = scatter_in_place(d_hidden, replace(rows, index=all_rows), plan.chunk)
    return HeadGradients(d_hidden, d_weight, None, None, None)
