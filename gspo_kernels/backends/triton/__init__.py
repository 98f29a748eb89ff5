"""The Triton backend. It is imported only when it runs, so that the library works without Triton."""

from .backward import head_backward
from .cells.backward import choose
from .forward import cache_rows, cell_shape, empty_cached, forward_and_cache, head_forward
from .pairs import pair_products, pair_sums
from .sequence import policy_forward

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
