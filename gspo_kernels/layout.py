"""Padded and packed batches as rows: each token is a row, and a sequence is a range of rows, given by offsets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The rows of each sequence. A padded batch [B, T] has N = B * T rows and S = B sequences."""

    shape: tuple[int, ...]  # the caller's token shape: (B, T) or (N,)
    offsets: Tensor  # [S + 1] int64: sequence i is rows offsets[i] to offsets[i + 1] - 1

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return self.shape[0] * self.shape[1] if len(self.shape) == 2 else self.shape[0]

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return self.offsets.shape[0] - 1

    @property
    def padded(self) -> bool:
        """True for a padded batch [B, T], False for a packed batch [N]."""
        return len(self.shape) == 2

    def flatten(self, x: Tensor) -> Tensor:
        """Flatten [B, T], [B, 1] (expanded to [B, T]) or [N] to [N]."""
        return x.expand(self.shape).reshape(-1)

    def per_row(self, x: Tensor) -> Tensor:
        """Expand values per sequence ([B], [B, 1], [S]) or per token ([B, T], [N]) to one per row, [N]."""
        if self.padded:
            return self.flatten(x[:, None] if x.ndim == 1 else x)
        return x[self.sequence_of_row()] if x.shape[0] == self.sequences else x

    def sequence_of_row(self) -> Tensor:
        """Index of each row's sequence, [N] int64."""
        return sequence_of_row(self.offsets, self.rows)


def padded_layout(shape: tuple[int, int], device: torch.device) -> Layout:
    """Lay out a padded batch of shape (B, T)."""
    batch, length = shape
    # The step of arange must not be 0.
    offsets = (
        torch.arange(0, (batch + 1) * length, length, device=device)
        if length
        else torch.zeros(batch + 1, dtype=torch.int64, device=device)
    )
    return Layout((batch, length), offsets)


def packed_layout(rows: int, cu_seqlens: Tensor) -> Layout:
    """Lay out N = `rows` packed rows. Offsets that are out of order or out of range are clamped."""
    # On a GPU, bad offsets raise no error, so clamp them before anything indexes with them.
    if cu_seqlens.shape[0] == 1:  # no sequences
        return Layout((rows,), torch.zeros(1, dtype=torch.int64, device=cu_seqlens.device))
    inner = cu_seqlens.to(torch.int64).clamp(0, rows)[1:-1].cummax(0).values  # [S - 1]
    zero = torch.zeros(1, dtype=torch.int64, device=cu_seqlens.device)
    return Layout((rows,), torch.cat([zero, inner, zero + rows]))


def sequence_of_row(offsets: Tensor, rows: int) -> Tensor:
    """Index of each row's sequence, [N] int64, from offsets [S + 1]."""
    row = torch.arange(rows, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=max(offsets.shape[0] - 2, 0))


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum each sequence's rows, [N] -> [S]. The bits of a sum do not depend on other sequences or on padding.

    Sums are in fp64. On a CPU, terms are added one by one, and the terms of a sequence are often equal, such as its
    coefficients. In fp32, every addition of equal terms could round in the same direction: with 32,768 tokens,
    loss and gradient were off by 3e-4.
    """
    return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0).to(x.dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, log-probs, ratios and loss: fp64 for fp64 hidden states, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
