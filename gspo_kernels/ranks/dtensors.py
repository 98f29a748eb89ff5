"""DTensors among the arguments of the public functions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ..validation import TensorChecks, Unquoted


def is_dtensor(x: Any) -> bool:
    """True if `x` is a DTensor. Does not import the module that defines DTensors."""
    return type(x).__name__ == "DTensor"


def local(x: Any) -> Any:
    """Take this rank's part of a DTensor, whose gradient becomes a DTensor again. Other objects pass unchanged."""
    return x.to_local() if is_dtensor(x) else x


def local_rows(x: Any) -> Any:
    """Take this rank's rows of a DTensor, or one row of padding if it has none. Other objects pass unchanged."""
    rows = local(x)
    return F.pad(rows, (0,) * (2 * rows.ndim - 1) + (1,)) if is_dtensor(x) and rows.shape[0] == 0 else rows


def local_hidden(check: TensorChecks, hidden: Any, group: Any) -> Any:
    """Convert DTensor hidden states, replicated over the mesh of the head, to a plain tensor.

    Their gradient is a DTensor of partial sums, which the model's next redistribution adds up.
    """
    from torch.distributed.tensor import Partial

    if group is None or hidden.device_mesh.ndim != 1 or not hidden.placements[0].is_replicate():
        expected = "a plain tensor, or a DTensor that is replicated over the mesh dimension of a DTensor lm_head"
        got = Unquoted(f"a DTensor with placements {tuple(hidden.placements)}")
        check.fail("hidden", expected, got, TypeError)
    return hidden.to_local(grad_placements=[Partial()])
