"""On a GPU, the host waits at each value that it reads. A backward reads once, and during a graph capture never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.head_rows import NEEDS, head_rows
from helpers.tile_choices import choices, small_tiles
from torch import Tensor

from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.rows import Cache


def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every later read of a tensor adds the name of its method."""
    reads: list[str] = []
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        real = getattr(Tensor, name)

        def recorded(x: Tensor, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            reads.append(name)
            return real(x, *args, **options)

        monkeypatch.setattr(Tensor, name, recorded)
    return reads


def test_triton_chooses_cells_without_a_read_and_reads_once_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("launch", "forward", "gradient_rows", "cells.products", "cells.lists"):
        monkeypatch.setattr(f"gspo_kernels.backends.triton.{module}.launch", lambda *args, **options: None)
    head = head_rows(208, 16, 601)
    reads = recorded_reads(monkeypatch)
    with choices():
        result, cached = triton_backend.forward_and_cache(head, tile_mass=True)
        cell = triton_backend.cell_shape(head)
        assert cell is not None
        cached.tile_mass.fill_(1e-3)  # in place of the kernels' results, as are the next two lines
        cached.place.copy_(torch.arange(len(cached.place)))
        result.log_probs.fill_(-1.0)
        live, _ = triton_backend.choose(head, result, head.mask.float(), cached, cell, 0.1)
        assert reads == []
        triton_backend.head_backward(head, result, head.mask.float(), None, NEEDS, live)
    assert reads == ["tolist"]


def test_the_torch_backend_reads_the_places_of_kept_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward has 2 chunks of rows and 5 slabs."""
    head = head_rows(32, 24, 240)
    with small_tiles(16, 48):
        result, cached = torch_backend.forward_and_cache(head, cache=Cache(32, head.mask))
        reads = recorded_reads(monkeypatch)
        torch_backend.head_backward(head, result, torch.ones(32), None, NEEDS, None, cached)
    assert reads.count("tolist") == 1 and reads.count("__int__") == 1 and not reads.count("__bool__")
