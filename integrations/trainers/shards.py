"""Log-probs from one rank's rows of the head, for trainers that pass the first id of these rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_kernels import linear_log_probs
from gspo_kernels.validation import Checks


def log_probs_of_shard(
    check: Checks, hidden: Tensor, weight: Tensor, ids: Tensor, start: int, **options: Any
) -> Tensor:
    """Compute log-probs in the shape of ids. Raise an error unless this rank's rows of the head begin at id `start`."""
    expected = dist.get_rank(options["tp_group"]) * weight.shape[0]
    if start != expected:
        check.fail("vocab_start_index", f"{expected}, the ranks before this one times the rows of the weight", start)
    return linear_log_probs(hidden.to(weight.dtype), weight, ids, reduce_hidden="none", **options).log_probs


def next_tokens(target: Tensor) -> tuple[Tensor, Tensor]:
    """Shift ids: the id after each position, [B, S], and a mask that is False at the last position."""
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[:, -1] = False
    return target.roll(-1, -1), mask
