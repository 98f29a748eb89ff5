"""The table of docs/concepts/sharding.md: memory and bytes of the head step on each rank. Nothing is measured.

All numbers follow from `gspo_kernels.memory`, whose formulas tests compare with counted bytes.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_kernels import memory
from gspo_kernels.backends.triton.tuning import assume
from gspo_kernels.memory import MIB, Batch

from .tables import table

MODELS = {
    "Llama-3 8B": (4096, 128_256),
    "Llama-3 70B": (8192, 128_256),
    "Qwen3-235B-A22B": (4096, 151_936),
}  # H, V
TOKENS = 32_768
TP = (1, 8)
ARCHITECTURE = "sm_90"


def per_rank() -> str:
    """Memory and collectives by TP, without CP. Only the column of the cache's size assumes a cache."""
    with FakeTensorMode(), assume(ARCHITECTURE):
        header = ["model", "TP", "head", "hidden states", "loss", "full cache", "all-gather", "all-reduce"]
        rows = []
        for name, (width, vocab) in MODELS.items():
            for tp in TP:
                head = Batch(TOKENS, width, vocab, tp).head(torch.bfloat16)
                cache = memory.full_cache_mib(head, "triton") * MIB
                sent = [x.size for x in memory.collectives(head, "triton")] or [0, 0]
                loss = memory.bound(head, "triton", 0).total
                sizes = (head.weight.nbytes, head.hidden.nbytes, loss, cache, *sent)
                rows.append((name, str(tp), *(f"{size / MIB:,.0f}" for size in sizes)))
        return table(header, rows)
