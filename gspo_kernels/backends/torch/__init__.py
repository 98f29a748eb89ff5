"""The torch backend: the mathematics of the kernels, tile by tile, on any device that torch supports.

Rows are gathered before matrix products: unmasked rows in the forward, rows with a gradient in the backward. Logits are
computed in tiles of a fixed number of rows and vocabulary columns; the last rows are padded with zeros. The shape of a
tile depends on device, dtype, H, V and GSPO_WORKSPACE_MIB, but not on the batch, because matrix products of another
shape may round differently. So a row's log-prob has the same bits in any batch, and before the first update all
importance ratios are exactly 1.

On a CPU, each tile is computed by one thread (`workers.py`). Logits are fp32 (fp64 for fp64 inputs) and never rounded
to half precision. Half-precision operands are upcast slab by slab; on CUDA, tensor cores multiply them with an fp32
result. On a GPU the host waits in the forward and in the backward, to read the number of gathered rows. With a cache or
a gradient budget, it waits again for the cached rows and the cells to compute.
"""

from ..live_tiles import choose
from .backward import head_backward
from .cached_tile import cache_rows, empty_cached
from .forward import forward_and_cache, head_forward
from .pairs import pair_products, pair_sums
from .sequence import policy_forward
from .tiles import cell_shape

__all__ = [
    "cache_rows",
    "cell_shape",
    "choose",
    "empty_cached",
    "forward_and_cache",
    "head_backward",
    "head_forward",
    "pair_products",
    "pair_sums",
    "policy_forward",
]
