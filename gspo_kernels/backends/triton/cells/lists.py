"""Lists of the cells that the sparse backward computes, built on the device.

One list is ordered by chunk, tile and row block, for d_logits and d_weight. In it, the cells of a part are consecutive.
The other list is ordered by row block and tile, for d_hidden.
"""
# Kernel arguments are annotated with Triton's types, which pyright does not know.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..tuning import LIST


class CellLists(NamedTuple):
    """Both lists of K cells, for B row blocks in C chunks of R, and T tiles. Tensors are int32."""

    by_tile: Tensor  # [B * T], the first K are used: tile * R + the row block's number in its chunk
    tile_begin: Tensor  # [C * T * R + 1]: number of cells before each (chunk, tile, row block), then K
    block_tile: Tensor  # [B * T], ordered by row block and tile: the cell's tile
    block_place: Tensor  # [B * T], in the same order: the cell's index in by_tile
    block_begin: Tensor  # [B * T + 1]: number of cells before each (row block, tile), then K
    tiles: int  # T
    row_blocks: int  # R


class Part(NamedTuple):
    """The cells in a range of tiles and a chunk of rows, which are computed together."""

    lists: CellLists
    chunk: int  # number of the chunk
    first_tile: int
    end_tile: int
    first_cell: int  # index of its first cell in by_tile
    cells: int  # number of cells


@triton.jit(do_not_specialize=["n_cells", "tiles", "row_blocks"])
def list_cells(
    cells,  # [B, T] bool
    tile_begin,  # this and the next four: fields of `CellLists`
    block_begin,
    by_tile,  # out
    block_tile,  # out
    block_place,  # out
    n_cells: tl.int32,  # B * T
    tiles: tl.int32,
    row_blocks: tl.int32,
    BLOCK: tl.constexpr,
):
    """Write each True cell to its place in both lists."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_live = tl.load(cells + i, mask=i < n_cells, other=0) != 0
    block, tile = i // tiles, i % tiles
    chunk, block_of_chunk = block // row_blocks, block % row_blocks
    place = tl.load(tile_begin + (chunk * tiles + tile) * row_blocks + block_of_chunk, mask=is_live, other=0)
    place_by_block = tl.load(block_begin + i, mask=is_live, other=0)
    tl.store(by_tile + place, tile * row_blocks + block_of_chunk, mask=is_live)
    tl.store(block_tile + place_by_block, tile, mask=is_live)
    tl.store(block_place + place_by_block, place, mask=is_live)


def cell_lists(cells: Tensor, blocks_of_chunk: int) -> CellLists:
    """List the True entries of `cells` [row blocks, tiles]. The host reads no values."""
    blocks, tiles = cells.shape
    chunks = -(-blocks // blocks_of_chunk)
    in_chunks = F.pad(cells, (0, 0, 0, chunks * blocks_of_chunk - blocks)).view(chunks, blocks_of_chunk, tiles)
    # Separate tensors: the rows of a common tensor would be aligned for some cell counts only, and compile twice.
    by_tile, block_tile, block_place = (cells.new_empty(cells.numel(), dtype=torch.int32) for _ in range(3))
    tile_begin, block_begin = _count_before(in_chunks.transpose(1, 2)), _count_before(cells)
    launch(
        list_cells,
        -(-cells.numel() // LIST.block_n),
        LIST,
        cells=cells,
        tile_begin=tile_begin,
        block_begin=block_begin,
        by_tile=by_tile,
        block_tile=block_tile,
        block_place=block_place,
        n_cells=cells.numel(),
        tiles=tiles,
        row_blocks=blocks_of_chunk,
        BLOCK=LIST.block_n,
    )
    return CellLists(by_tile, tile_begin, block_tile, block_place, block_begin, tiles, blocks_of_chunk)


def _count_before(cells: Tensor) -> Tensor:
    """Count the True entries before each entry, then all of them, [numel + 1] int32."""
    counts = torch.zeros(cells.numel() + 1, dtype=torch.int32, device=cells.device)
    torch.cumsum(cells.reshape(-1), 0, dtype=torch.int32, out=counts[1:])
    return counts
