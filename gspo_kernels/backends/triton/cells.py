"""Lists of the cells that a backward computes, made on the device.

A part is the cells of one slab and one chunk, T tiles x R row blocks. It is computed at once. There are two lists,
ordered by part and then by tile, for d_logits and d_weight, or by row block, for d_hidden. A cell's place in the first
list is its place in d_logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class CellLists(NamedTuple):
    """Both lists of K cells, with S slabs, C chunks and parts of T tiles x R row blocks. Tensors are int32.

    Tiles and row blocks are numbered within their part. Places in a list count from the part's first cell.
    """

    by_tile: Tensor  # [K], ordered by tile: tile * R + row block
    tile_begin: Tensor  # [S, C, T + 1]: place of each tile's first cell in by_tile
    block_tile: Tensor  # [K], ordered by row block: the cell's tile
    block_place: Tensor  # [K], ordered by row block: the cell's place in by_tile
    block_begin: Tensor  # [S, C, R + 1]: place of each row block's first cell in block_tile and block_place
    first: Tensor  # [S, C]: index of each part's first cell in all lists
    row_blocks: int  # R


class Part(NamedTuple):
    """The cells of one slab of columns and one chunk of rows."""

    lists: CellLists
    number: int  # slab * C + chunk
    first_cell: int  # index of its first cell in the lists
    cells: int  # number of cells
    low: int  # first column


def cell_lists(cells: Tensor, tiles_of_part: int, blocks_of_part: int) -> CellLists:
    """Return the lists of the True entries of `cells` [row blocks, tiles].

    The lists have one entry per cell, True or not, because the host does not know K.
    """
    blocks, tiles = cells.shape
    slabs, chunks = -(-tiles // tiles_of_part), -(-blocks // blocks_of_part)
    padded = F.pad(cells, (0, slabs * tiles_of_part - tiles, 0, chunks * blocks_of_part - blocks))
    padded = padded.view(chunks, blocks_of_part, slabs, tiles_of_part)
    by_tile, by_block = padded.permute(2, 0, 3, 1), padded.permute(2, 0, 1, 3)  # [S, C, T, R], [S, C, R, T]
    tile_place, tile_begin, first = _places(by_tile)
    block_place, block_begin, _ = _places(by_block)
    number = torch.arange(tiles_of_part * blocks_of_part, device=cells.device, dtype=torch.int32)
    number = number.view(tiles_of_part, blocks_of_part)  # [T, R]: tile * R + row block
    tile_of = (number // blocks_of_part).t()  # [R, T]: tile
    return CellLists(
        _listed(number.expand_as(by_tile), by_tile, tile_place),
        tile_begin,
        _listed(tile_of.expand_as(by_block), by_block, block_place),
        _listed((tile_place - first[..., None, None]).permute(0, 1, 3, 2), by_block, block_place),
        block_begin,
        first,
        blocks_of_part,
    )


def _places(cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of cells in a list.

    Args:
        cells: [S, C, A, B] bool, in the order of the list.

    Returns:
        index of each cell in the list, [S, C, A, B]; place of each row's first cell within its part, then the number of
        cells in the part, [S, C, A + 1]; index of each part's first cell, [S, C].
    """
    place = (cells.flatten().cumsum(0, dtype=torch.int32) - cells.flatten().to(torch.int32)).view(cells.shape)
    first = place[:, :, 0, 0]
    counts = cells.sum((2, 3), dtype=torch.int32)
    begin = torch.cat([place[..., 0] - first[..., None], counts[..., None]], -1)
    return place, begin.contiguous(), first.contiguous()


def _listed(values: Tensor, cells: Tensor, place: Tensor) -> Tensor:
    """Return the values of the True cells in the order of the list, [number of all cells + 1]."""
    # The values of the other cells are written to the last element, which is never read.
    n = cells.numel()
    index = torch.where(cells, place, n).flatten().to(torch.int64)
    values = values.flatten().to(torch.int32)
    return torch.zeros(n + 1, dtype=torch.int32, device=cells.device).scatter_(0, index, values)
