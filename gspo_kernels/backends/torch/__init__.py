"""The torch backend: the mathematics of the kernels, tile by tile, on any device that torch supports.

Rows are gathered before matrix products: unmasked rows in the forward, rows with a gradient in the backward. They are
cut into tiles of a fixed number of rows (the last tile is padded with zeros) and of vocabulary columns. The shape of a
tile depends on device, dtype, H, V and GSPO_WORKSPACE_MIB, but not on the batch, because matrix products of another
shape round differently. So a row's log-prob has the same bits alone and in any batch, and with equal weights the first
importance ratio is exactly 1.

On a CPU, each thread computes tiles alone (`workers.py`). Logits are fp32 (fp64 for fp64 inputs) and never rounded.
Half-precision operands are upcast slab by slab, or on CUDA multiplied on tensor cores with an fp32 result. On CUDA the
host waits once in the forward and once in the backward, to read the number of gathered rows.
"""

from .backward import head_backward
from .forward import forward_with_shares, head_forward
from .sequence import policy_forward
from .tiles import cell_shape

__all__ = ["cell_shape", "forward_with_shares", "head_backward", "head_forward", "policy_forward"]
