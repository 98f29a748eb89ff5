"""The Triton backend. It is imported only when it runs, so that the library works without Triton."""

from .backward import head_backward
from .forward import cell_shape, forward_with_shares, head_forward
from .live_tiles import choose
from .sequence import policy_forward

__all__ = ["cell_shape", "choose", "forward_with_shares", "head_backward", "head_forward", "policy_forward"]
