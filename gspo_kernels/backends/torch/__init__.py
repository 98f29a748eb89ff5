"""The torch backend: the same mathematics as the kernels, tile by tile, wherever torch runs.

Rows are gathered before any matrix product: unmasked rows in the forward, rows with a gradient in the backward. They
are cut into tiles of a fixed number of rows (the last one padded with zeros) and of vocabulary columns. The shape of a
tile depends on device, dtype, H, V and GSPO_WORKSPACE_MIB and never on the batch, because a matrix product of another
shape rounds differently: so a row's log-prob has the same bits alone and in any batch, and with equal weights the
first importance ratio is exactly 1.

On a CPU each thread computes tiles alone (`workers.py`). Logits are fp32 (fp64 for fp64 inputs) and never rounded. For
half-precision inputs the operands are upcast slab by slab, or on CUDA multiplied on tensor cores with an fp32 result.
Reading the number of gathered rows makes the host wait on CUDA, once per pass.
"""

from .backward import head_backward
from .forward import forward_with_shares, head_forward
from .sequence import policy_forward
from .tiles import cell_shape

__all__ = ["cell_shape", "forward_with_shares", "head_backward", "head_forward", "policy_forward"]
