"""Choose chunks of rows and slabs of columns, so that the tensors of the backward fit the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..precision import bytes_of_copies, refuses_mixed_products
from ..rows import HeadRows
from .split import bytes_of_parts
from .tuning import Config, is_amd, multiprocessors

# Largest chunk. At this size, accumulating d_weight over chunks adds 3 % to the time of the products (NOTES.md).
_ROWS_AT_ONCE = 8192


def bytes_per_entry(head: HeadRows, unrounded: bool) -> int:
    """Bytes per entry of d_logits. If torch rounds d_logits, the rounded copy is included."""
    size = head.kernel_dtype.itemsize
    return 4 + size if unrounded and size < 4 else size


# Most columns in a slab of an fp32 head. cuBLAS may add the terms of a product one after another, so longer sums have
# larger rounding errors: a relative RMS error of 2.8e-6 on an H200 for d_hidden in one slab of 152k columns.
_COLUMNS_OF_FP32 = 16_384


class Sizes(NamedTuple):
    """Chunk and slab of a dense backward."""

    chunk: int  # rows
    slab: int  # columns
    gather_once: bool  # gather the hidden states of all rows before the first slab, not of each chunk in each slab


def multiplies_copies(head: HeadRows) -> bool:
    """True if `add_product` multiplies fp32 copies of the operands."""
    return head.kernel_dtype.itemsize == 2 and (is_amd(head.hidden.device) or refuses_mixed_products())


def chunk_and_slab(head: HeadRows, n: int, config: Config, unrounded: bool, direct: bool) -> Sizes:
    """Choose the sizes for `n` gathered rows.

    Args:
        unrounded: as in `gradient_of_tiles`.
        direct: with a single chunk of rows, the product writes d_weight directly, without an fp32 slab.
    """
    size, width = head.hidden.dtype.itemsize, head.hidden.shape[1]
    row_bytes = 0 if head.split else width * size  # split rows are kept outside of the workspace
    space = head.workspace * 7 // 8  # the rest is for per-row vectors
    if multiplies_copies(head):
        space -= bytes_of_copies()
    # At most a third for gathered hidden states, and at most half for d_logits of one tile of columns.
    per_element = bytes_per_entry(head, unrounded)
    most = min(space // 3 // max(row_bytes, 1), space // 2 // (config.block_v * per_element), _ROWS_AT_ONCE)
    chunks = equal_parts(-(-n // config.block_n), most // config.block_n)
    rows = max(min(chunks.size * config.block_n, n), 1)
    gather_once = n * row_bytes <= space // 3
    slab_of_weight = 4 * width if size == 2 and not (direct and chunks.number == 1) else bytes_of_parts(head)
    remaining = space - (n if gather_once else rows) * row_bytes
    columns = remaining // (rows * per_element + slab_of_weight)
    tiles = _tiles_of_slab(
        -(-head.vocab_size // config.block_v),
        (min(columns, _COLUMNS_OF_FP32) if size == 4 else columns) // config.block_v,
        -(-rows // config.block_n),
        multiprocessors(head.hidden.device),
    )
    return Sizes(rows, (_by_four(tiles) if head.split else tiles) * config.block_v, gather_once)


def slabs_of_forward(head: HeadRows, config: Config) -> Iterator[tuple[int, int]]:
    """Yield (first column, last column + 1) of each launch of the forward: several if the weight is split."""
    vocab = columns = head.vocab_size
    if head.split:
        tiles, most = -(-vocab // config.block_v), head.workspace * 7 // 8 // (bytes_of_parts(head) * config.block_v)
        row_blocks = -(-head.hidden.shape[0] // config.block_n)
        slab = _tiles_of_slab(tiles, most, row_blocks, multiprocessors(head.hidden.device))
        columns = config.block_v * _by_four(slab)
    return ((low, min(low + columns, vocab)) for low in range(0, vocab, columns))


def _by_four(tiles: int) -> int:
    """Round down to a multiple of four, so that a slab's results of tiles, [tiles, N] in fp32, are aligned for any N.

    Triton compiles another kernel for pointers that are not multiples of 16 bytes.
    """
    return tiles - tiles % 4 or tiles


def _tiles_of_slab(tiles: int, most: int, row_blocks: int, multiprocessors: int) -> int:
    """Choose the number of tiles per slab, at most `most`, that needs the fewest waves for all `tiles`.

    In a wave, each multiprocessor computes one cell. The last wave of a slab may be partial. Adding the slab's term to
    d_hidden takes about as long as one more wave (NOTES.md).
    """

    def waves(size: int) -> int:
        full, last = divmod(tiles, size)
        return sum(
            count * (-(-row_blocks * width // multiprocessors) + 1)
            for count, width in ((full, size), (1, last))
            if width
        )

    most = max(min(tiles, most), 1)
    return min(range(most, most // 2, -1), key=waves)


class Parts(NamedTuple):
    number: int
    size: int  # of every part except the last, which may be smaller


def equal_parts(total: int, most: int) -> Parts:
    """Divide `total` blocks into as few parts as possible, of at most `most` blocks each, of nearly equal size."""
    number = max(-(-total // max(most, 1)), 1)
    return Parts(number, max(-(-total // number), 1))
