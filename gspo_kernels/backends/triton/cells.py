"""Lists of the live cells, in the two orders that the products of a backward need, made on the device.

A part is what is computed at a time: a slab of columns and a chunk of rows, T tiles x R row blocks. A part's cells are
contiguous in both lists: by tile, for d_logits and d_weight; by row block, for d_hidden. A cell's place in the first
list is where its d_logits lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class CellLists(NamedTuple):
    """S slabs, C chunks, each part T x R; K cells in all. Numbers are int32."""

    by_tile: Tensor  # [K]: tile * R + block, both within the part
    tile_begin: Tensor  # [S, C, T + 1]: where in by_tile a tile's cells begin, counted from the part's first
    block_tile: Tensor  # [K] in the order of blocks: the tile
    block_place: Tensor  # [K]: its place in by_tile, counted from the part's first
    block_begin: Tensor  # [S, C, R + 1]
    first: Tensor  # [S, C]: where the part begins in either list
    row_blocks: int  # R


class Part(NamedTuple):
    """The cells of one slab of columns and one chunk of rows."""

    lists: CellLists
    number: int  # slab * C + chunk
    first_cell: int  # where it begins in either list
    cells: int  # how many
    low: int  # its first column


def cell_lists(cells: Tensor, tiles_of_part: int, blocks_of_part: int) -> CellLists:
    """Return the lists of `cells` [blocks, tiles] bool, as long as if all cells were live: the host does not know K."""
    blocks, tiles = cells.shape
    slabs, chunks = -(-tiles // tiles_of_part), -(-blocks // blocks_of_part)
    padded = F.pad(cells, (0, slabs * tiles_of_part - tiles, 0, chunks * blocks_of_part - blocks))
    padded = padded.view(chunks, blocks_of_part, slabs, tiles_of_part)
    by_tile, by_block = padded.permute(2, 0, 3, 1), padded.permute(2, 0, 1, 3)  # [S, C, T, R], [S, C, R, T]
    tile_place, tile_begin, first = _places(by_tile)
    block_place, block_begin, _ = _places(by_block)
    number = torch.arange(tiles_of_part * blocks_of_part, device=cells.device, dtype=torch.int32)
    number = number.view(tiles_of_part, blocks_of_part)  # of a cell in its part
    tile_of = (number // blocks_of_part).t()  # [R, T]
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
    """Return (place of each cell in the list, begin of each row of cells within its part, begin of each part)."""
    place = (cells.flatten().cumsum(0, dtype=torch.int32) - cells.flatten().to(torch.int32)).view(cells.shape)
    first = place[:, :, 0, 0]
    counts = cells.sum((2, 3), dtype=torch.int32)
    begin = torch.cat([place[..., 0] - first[..., None], counts[..., None]], -1)
    return place, begin.contiguous(), first.contiguous()


def _listed(values: Tensor, cells: Tensor, place: Tensor) -> Tensor:
    """Return the values of live cells in the order of the list; those of the others overwrite each other at its end."""
    n = cells.numel()
    index = torch.where(cells, place, n).flatten().to(torch.int64)
    values = values.flatten().to(torch.int32)
    return torch.zeros(n + 1, dtype=torch.int32, device=cells.device).scatter_(0, index, values)
