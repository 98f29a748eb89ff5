"""The device of a run, the sizes of its batches, and the heads that are timed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_kernels.backends.rows import HeadRows


@dataclass(frozen=True)
class Setting:
    device: torch.device
    vocab: int = 151_936  # V of Qwen
    rows: int = 8192  # N for ranking block shapes
    dry_run_width: int | None = None  # H of the only model of a dry run

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def head(self, rows: int, width: int) -> HeadRows:
        """Return a bf16 head with logits of standard deviation 3 and every row unmasked."""
        rng = torch.Generator(self.device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, device=self.device)

        ids = torch.randint(self.vocab, (rows,), generator=rng, device=self.device)
        hidden, weight = randn(rows, width).bfloat16(), (randn(self.vocab, width) * (3 / width**0.5)).bfloat16()
        return HeadRows(
            hidden=hidden, weight=weight, bias=None, adapter_hidden=None, adapter_weight=None, target_ids=ids,
            mask=torch.ones_like(ids).bool(), temperature=None, logit_scale=1.0, logit_softcap=None,
            vocab_size=self.vocab, entropy=False,
        )  # fmt: skip  # lines by subject


def tiny(device: torch.device) -> Setting:
    """Return the sizes of a dry run."""
    return Setting(device, vocab=300, rows=150, dry_run_width=64)
