"""Record which cells a backward computes, and compare the dropped gradient mass with the reported mass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from helpers.device import to_device
from torch import Tensor

from gspo_kernels.backends import live_tiles
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.rows import HeadResult, HeadRows, LiveTiles
from gspo_kernels.backends.torch import tiles as torch_tiles


class Chosen(NamedTuple):
    """The cells that a forward chose for the backward, and the tensors that the choice is made from."""

    head: HeadRows
    result: HeadResult
    coefficient: Tensor
    live: LiveTiles
    cell: tuple[int, int]  # rows and columns of a cell
    shares: Tensor  # [tiles, N]: the share of a row's probability in each vocabulary tile, as the forward reports it


@contextmanager
def choices(pays: bool = True) -> Iterator[list[Chosen]]:
    """Record the cells that forwards inside this context choose.

    `pays` replaces the cost model's decision on whether dropping cells saves time. For such small batches, the cost
    model would have all cells computed.
    """
    decisions: list[Chosen] = []

    def recording(choose: Any) -> Any:
        def record(
            head: HeadRows, result: HeadResult, coefficient: Tensor, tiles: Any, cell: tuple[int, int], budget: float
        ) -> Any:
            live, work = choose(head, result, coefficient, tiles, cell, budget)
            shares = tiles.tile_mass[:, torch.where(head.mask, tiles.place, 0)]
            chosen = Chosen(head, result, coefficient, live, cell, shares)
            decisions.append(to_device(chosen, "cpu"))
            return live, work

        return record

    efficiency = dict.fromkeys(("cpu", "cuda"), 1e9 if pays else 0.0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(live_tiles, "SPARSE_EFFICIENCY", efficiency))
        for backend in (torch_backend, triton_backend):
            stack.enter_context(patch.object(backend, "choose", recording(backend.choose)))
        yield decisions


@contextmanager
def small_tiles(rows: int = 8, columns: int = 6) -> Iterator[None]:
    shape = torch_tiles.tile_shape
    torch_tiles.tile_shape = lambda *_: (rows, columns)
    try:
        yield
    finally:
        torch_tiles.tile_shape = shape


def d_logits(chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Compute d(loss) / d(h W' + bias) [N, vocab] in float64 from the coefficients, by PyTorch's autograd.

    The second result is not multiplied by the slope of a soft-cap. That slope, 1 - tanh^2, suffers from cancellation.
    So `softcap_slope` of tolerance.py allows an error that is proportional to the second result.
    """
    head = chosen.head
    raw = head.hidden.double() @ head.weight[: head.vocab_size].double().t()
    if head.bias is not None:
        raw = raw + head.bias[: head.vocab_size].double()
    raw = raw.detach().requires_grad_()
    z = capped = raw * head.logit_scale
    if head.logit_softcap is not None:
        z = capped = head.logit_softcap * torch.tanh(z / head.logit_softcap)
    if head.temperature is not None:
        z = z / head.temperature.double().reshape(-1, 1)
    ids = torch.where(head.mask, head.target_ids, 0)
    log_probs = z.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    live = head.mask & (chosen.coefficient != 0)
    weighted = torch.where(live, chosen.coefficient.double(), 0) * log_probs
    d, d_capped = torch.autograd.grad(weighted.sum(), (raw, capped))
    return d, d_capped * head.logit_scale


def live_entries(chosen: Chosen) -> Tensor:
    """Return a bool mask [N, vocab] of the entries of d_logits in computed cells."""
    (rows, columns), (n, vocab) = chosen.cell, (chosen.head.hidden.shape[0], chosen.head.vocab_size)
    spread = chosen.live.cells.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :vocab]
    return torch.zeros_like(spread).index_copy_(0, chosen.live.order, spread)
