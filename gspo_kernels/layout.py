"""Padded, packed and masked batches as rows: one row per token, sequences as offsets into them, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How the tokens of a batch lie. Padded `[B, T]` is N = B * T rows in S = B sequences; packed is `[N]` rows."""

    shape: tuple[int, ...]  # the caller's token shape: (B, T) or (N,)
    offsets: Tensor  # [S + 1] int64: sequence i is rows offsets[i] to offsets[i + 1]

    @property
    def rows(self) -> int:
        return self.shape[0] * self.shape[1] if len(self.shape) == 2 else self.shape[0]

    @property
    def sequences(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def padded(self) -> bool:
        return len(self.shape) == 2

    def flatten(self, x: Tensor) -> Tensor:
        """[B, T] or [N] -> [N]; a padded [B, 1] is first spread over its row."""
        return x.expand(self.shape).reshape(-1)

    def per_row(self, x: Tensor) -> Tensor:
        """One value per sequence ([B], [B, 1], [S]) or per token ([B, T], [N]) -> [N]."""
        if self.padded:
            return self.flatten(x[:, None] if x.ndim == 1 else x)
        return x[self.sequence_of_row()] if x.shape[0] == self.sequences else x

    def sequence_of_row(self) -> Tensor:
        return sequence_of_row(self.offsets, self.rows)


def padded_layout(shape: tuple[int, int], device: torch.device) -> Layout:
    batch, length = shape
    return Layout((batch, length), torch.arange(batch + 1, device=device) * length)


def packed_layout(rows: int, cu_seqlens: Tensor) -> Layout:
    """Offsets are forced into order: bad ones are reported by `validation`, here they must not index out of bounds."""
    if cu_seqlens.shape[0] == 1:  # no sequences
        return Layout((rows,), torch.zeros(1, dtype=torch.int64, device=cu_seqlens.device))
    inner = cu_seqlens.to(torch.int64).clamp(0, rows)[1:-1].cummax(0).values
    edge = torch.zeros(1, dtype=torch.int64, device=cu_seqlens.device)
    return Layout((rows,), torch.cat([edge, inner, edge + rows]))


def sequence_of_row(offsets: Tensor, rows: int) -> Tensor:
    """[N] int64: the sequence each row belongs to."""
    row = torch.arange(rows, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(max=max(offsets.shape[0] - 2, 0))


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each sequence's rows, [N] -> [S], in an order that other sequences and padding zeros do not change.

    In fp64: the reduction is serial on a CPU, and over equal terms, as a sequence's coefficients are, the roundings of
    an fp32 running sum all go one way (3e-4 of the gradient at 32,000 tokens).
    """
    return torch.segment_reduce(x.double(), "sum", offsets=offsets, initial=0.0).to(x.dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, log-probs, ratios and the loss: fp64 for fp64 hidden states, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
