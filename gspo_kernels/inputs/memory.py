"""Check `gradient_budget`, what the backward may leave out, and `cache_mib`, what the forward may keep for it."""

from __future__ import annotations

from typing import Any

import torch

from ..backends.rows import HeadRows, NeedsGradient
from ..backends.workspace import LARGEST_MIB, cache_bytes
from ..parallel import checksum, shard_of
from ..validation import Field
from .head import HeadInputs


def check_budget(call: Field, gradient_budget: float) -> None:
    """Check that the budget is a number from 0 to below 1."""
    call.number("gradient_budget", gradient_budget, "a number from 0 (exact) to below 1", lambda x: 0 <= x < 1)


def cache_limit(call: Field, cache_mib: float | None) -> int:
    """Check `cache_mib`, and return the memory for exponentials in bytes. None means GSPO_CACHE_MIB."""
    if cache_mib is None:
        return cache_bytes()
    expected = f"a number of MiB from 0 to {LARGEST_MIB}, or None for GSPO_CACHE_MIB"
    return int(call.number("cache_mib", cache_mib, expected, lambda x: 0 <= x <= LARGEST_MIB) * 2**20)


def cache_size(call: Field, cache_mib: float | None, head: HeadRows) -> int:
    """Return the memory for exponentials in bytes: 0 if no operand needs a gradient."""
    size = cache_limit(call, cache_mib)
    return size if any(needed_by_autograd(head)) else 0


def needed_by_autograd(head: HeadRows) -> NeedsGradient:
    """Return which operands need a gradient. None does while autograd does not record."""
    operands = (getattr(head, name) for name in NeedsGradient._fields)
    return NeedsGradient(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in operands))


def head_facts(head: HeadInputs, cache: int, gradient_budget: float) -> dict[str, Any]:
    """Return what must be equal on all ranks that share a vocabulary, see `agreement.agree`."""
    if head.tp_group is None:
        return {}
    rows, shard = head.rows, shard_of(head.rows.shard)
    temperature = rows.temperature
    values = {
        "the shape of hidden": tuple(rows.hidden.shape),
        "the dtype of hidden": rows.hidden.dtype,
        "the number of rows of lm_head": shard.rows,
        "vocab_size": shard.vocab_size,
        "the mask": checksum(rows.mask),
        "target_ids": checksum(torch.where(rows.mask, rows.target_ids + shard.first, 0)),
        "logit_scale": rows.logit_scale,
        "logit_softcap": rows.logit_softcap,
        "temperature": None if temperature is None else (tuple(temperature.shape), temperature.sum().item()),
        "the presence of a bias": rows.bias is not None,
        "the rank of the adapter": None if rows.adapter_hidden is None else rows.adapter_hidden.shape[1],
        "entropy": rows.entropy,
        "gradient_budget": gradient_budget,
        "cache_mib": cache / 2**20,
        "the operands that need a gradient": tuple(needed_by_autograd(rows)),
        "backend": head.backend,
    }
    return {f"tp_group {name}": value for name, value in values.items()}
