"""Check `gradient_budget`, what the backward may leave out, and `cache_mib`, what the forward may keep for it."""

from __future__ import annotations

import torch

from ..backends.rows import HeadRows, NeedsGradient
from ..backends.workspace import LARGEST_MIB, cache_bytes, cache_variable
from ..validation import Field


def check_budget(call: Field, gradient_budget: float) -> None:
    """Check that the budget is a number from 0 to below 1."""
    call.number("gradient_budget", gradient_budget, "a number from 0 (exact) to below 1", lambda x: 0 <= x < 1)


def check_cache(call: Field, cache_mib: float | None) -> None:
    """Check `cache_mib`; if it is None, the environment variable GSPO_CACHE_MIB."""
    if cache_mib is None:
        cache_variable()
    else:
        expected = f"a number of MiB from 0 to {LARGEST_MIB}, or None for the default"
        call.number("cache_mib", cache_mib, expected, lambda x: 0 <= x <= LARGEST_MIB)


def cache_limit(call: Field, cache_mib: float | None, device: torch.device, needs: NeedsGradient | None = None) -> int:
    """Check `cache_mib`, and return the memory for exponentials in bytes: 0 if no operand needs a gradient.

    None means the default on `device`.
    """
    if cache_mib is None:
        size = cache_bytes(device)
    else:
        check_cache(call, cache_mib)
        size = int(float(cache_mib) * 2**20)
    return 0 if needs is not None and not any(needs) else size


def needed_by_autograd(head: HeadRows) -> NeedsGradient:
    """Return which operands need a gradient. All are False when gradients are disabled."""
    if not torch.is_grad_enabled():
        return NeedsGradient(False, False, False, False, False)
    operands = [getattr(head, name) for name in NeedsGradient._fields]
    return NeedsGradient(*[x is not None and x.requires_grad for x in operands])
