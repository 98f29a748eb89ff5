"""Random inputs of a backend on the device under test."""

from __future__ import annotations

from typing import Any

import torch
from helpers.device import to_device

from gspo_kernels.backends.rows import HeadRows, NeedsGradient

NEEDS = NeedsGradient(hidden=True, weight=True, bias=False, adapter_hidden=False, adapter_weight=False)


def head_rows(n: int, h: int, v: int, entropy: bool = False, **changes: Any) -> HeadRows:
    """Return a random HeadRows with hidden [n, h] and weight [v, h]. `changes` replace fields."""
    rng = torch.Generator().manual_seed(0)
    fields: dict[str, Any] = dict(
        hidden=torch.randn(n, h, generator=rng),
        weight=torch.randn(v, h, generator=rng),
        bias=None,
        adapter_hidden=None,
        adapter_weight=None,
        target_ids=torch.randint(0, v, (n,), generator=rng),
        mask=torch.ones(n, dtype=torch.bool),
        temperature=None,
        logit_scale=1.0,
        logit_softcap=None,
        vocab_size=v,
        entropy=entropy,
    )
    return to_device(HeadRows(**{**fields, **changes}))
