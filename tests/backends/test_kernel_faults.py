"""Detect kernel faults that other tests miss: blocks of sequences, far offsets, alignment, a barrier."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.array import run
from helpers.features import make
from helpers.head_rows import NEEDS, head_rows
from helpers.relaunch import relaunch
from helpers.tile_choices import Chosen, d_logits, live_entries
from tolerance import FLOAT64_RELATIVE, LIVE_GRADIENT_RELATIVE
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from gspo_kernels import policy_loss
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.rows import LiveTiles
from gspo_kernels.backends.triton import logit_tile, sequence, tuning
from gspo_kernels.backends.triton.launch import Launch, launches

# -- metrics


def test_metrics_combine_several_blocks_of_sequences(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extreme ratios are in the first block, so the minimum and maximum of the last block alone are wrong."""
    monkeypatch.setattr(sequence, "sequence_config", lambda dtype: tuning.Config(block_n=8))
    log_ratio = (0.2 * torch.randn(19, generator=torch.Generator().manual_seed(0))).double()
    log_ratio[:2] = torch.tensor([-3.0, 3.0])
    old = torch.full((19, 2), -4.0, dtype=torch.float64)
    out = policy_loss(old + log_ratio[:, None], torch.ones(len(log_ratio)), old_log_probs=old, backend=backend)
    ratio = log_ratio.exp()
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "kl_to_old": -log_ratio.mean(),
        "clip_fraction": (ratio > 1 + 4e-4).double().mean(),
        "token_clip_fraction": (ratio > 1 + 4e-4).double().mean(),
    }
    torch.testing.assert_close(out.loss, -ratio.clamp(max=1 + 4e-4).mean(), rtol=FLOAT64_RELATIVE, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(out.metrics[name], value, rtol=FLOAT64_RELATIVE, atol=0, msg=name)


# -- offsets past 2^31


def test_columns_of_the_head_past_two_to_the_31_are_read() -> None:
    """The offset of a column, its index along H times the stride, exceeds 2^31 in a transposed head."""
    width = 40  # more than a block of H
    hidden = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).half()
    weight = torch.randn(70, width, generator=torch.Generator().manual_seed(1)).half()
    stride = 2**27
    apart = torch.empty((width - 1) * stride + 70, dtype=torch.float16).as_strided((70, width), (1, stride))
    head = head_rows(20, width, 70, hidden=hidden, weight=weight)
    with tuning.assume("sm_80"):
        near = triton_backend.head_forward(head)
        far = triton_backend.head_forward(head._replace(weight=apart.copy_(weight)))
    assert torch.equal(near.log_probs, far.log_probs)


FAR_CELL = 2**18  # the d_logits of this cell begin at an offset of at least 2^31 elements


def sparse_launch(name: str, settings: str = "") -> tuple[list[Launch], Launch, Tensor]:
    """Record a sparse backward.

    Return all launches, the first launch of the kernel `name`, and the d_logits of that launch moved to FAR_CELL. Only
    the touched pages of the moved d_logits take memory.
    """
    with launches() as seen:
        run(make(f"backend=triton tiles=many gradient_budget=0.3 {settings}"))
    launched = next(x for x in seen if x.kernel.__name__ == name)
    near = launched.arguments["d_logits"]
    assert FAR_CELL * near[0].numel() >= 2**31
    far = torch.empty(FAR_CELL + near.shape[0], *near.shape[1:], dtype=near.dtype)
    far[FAR_CELL:] = near
    return seen, launched, far


@pytest.mark.parametrize("name", ["hidden_product", "weight_product"])
def test_products_read_cells_past_two_to_the_31(name: str) -> None:
    seen, launched, far = sparse_launch(name)
    out = torch.zeros(2, *launched.arguments["out"].shape)
    relaunch(seen, name, out=out[0])
    relaunch(seen, name, out=out[1], d_logits=far, first_cell=launched.arguments["first_cell"] - FAR_CELL)
    assert out[0].any() and torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", ["gradient_tile", "cached_tile"])
def test_tiles_write_cells_past_two_to_the_31(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch begins at program FAR_CELL. The list of cells is moved, so that this program reads the first cell."""
    seen, launched, far = sparse_launch(name, "cache_mib=all_rows" if name == "cached_tile" else "")
    near = launched.arguments["d_logits"]

    def set_grid_idx(x: int, y: int, z: int) -> None:
        interpreter_builder.grid_idx = (x + FAR_CELL, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)
    far[FAR_CELL:] = 0
    relaunch(seen, name, d_logits=far, first_cell=launched.arguments["first_cell"] - FAR_CELL)
    assert torch.equal(far[FAR_CELL:], near) and near.any()


@pytest.mark.parametrize(("chunks", "workspace"), [(1, 36 * 1024), (2, 32 * 1024)])
def test_gradients_of_slabs_without_cells_in_some_chunks(
    chunks: int, workspace: int, request: pytest.FixtureRequest
) -> None:
    """A slab has a cell in the first row block, in the second, or in neither."""
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    head = head_rows(128, 24, 601, workspace=workspace)
    coefficient = torch.ones(128)
    result = triton_backend.head_forward(head)
    cell = triton_backend.cell_shape(head)
    assert cell is not None and cell == (64, 128)
    cells = torch.tensor([[False, True, False, False, True], [True, False, True, False, False]])
    live = LiveTiles(torch.arange(128), cells, torch.tensor([128, 1]))
    with launches() as seen:
        gradients = triton_backend.head_backward(head, result, coefficient, None, NEEDS, live)
    products_of_weight = [x for x in seen if x.kernel.__name__ == "weight_product"]
    assert products_of_weight and all(x.arguments["ADD"] == (chunks == 2) for x in products_of_weight)
    chosen = Chosen(head, result, coefficient, live, cell, torch.empty(0))
    d = torch.where(live_entries(chosen), d_logits(chosen)[0], 0)
    for gradient, truth in zip(gradients, (d @ head.weight.double(), d.t() @ head.hidden.double()), strict=False):
        assert gradient is not None
        assert (gradient.double() - truth).norm() <= LIVE_GRADIENT_RELATIVE[torch.float32] * truth.norm()


# -- heads without a block-sparse backward


def test_heads_with_an_adapter_or_a_bias_have_no_cells_in_triton() -> None:
    """The Triton backend cannot compute gradients of a bias or an adapter from a list of cells."""
    head = head_rows(5, 24, 70)
    adapter = head._replace(adapter_hidden=torch.ones(5, 2), adapter_weight=torch.ones(70, 2))
    assert triton_backend.cell_shape(head) is not None
    assert (
        triton_backend.cell_shape(adapter) is None
        and triton_backend.cell_shape(head._replace(bias=torch.ones(70))) is None
    )


# -- alignment for tensor descriptors


def at_offset(offset: int) -> Tensor:
    return torch.arange(4 * 16 + 8).bfloat16()[offset : offset + 64].view(4, 16)


@pytest.mark.parametrize(
    ("view", "copied"),
    [
        (lambda: at_offset(0), False),
        (lambda: at_offset(8), False),
        (lambda: at_offset(1), True),
        (lambda: at_offset(4), True),
        (lambda: torch.zeros(4, 20).bfloat16()[:, :16], True),  # rows of 40 bytes
        (lambda: torch.zeros(4, 20).bfloat16(), True),
        (lambda: torch.zeros(16, 8).bfloat16().t(), True),
        (lambda: torch.zeros(1, 16).bfloat16().expand(4, 16), True),
    ],
    ids=["start", "16-bytes", "2-bytes", "8-bytes", "rows-apart", "ragged-rows", "transposed", "expanded"],
)
def test_rows_that_a_descriptor_cannot_read_are_copied(view: Callable[[], Tensor], copied: bool) -> None:
    """A tensor descriptor needs an address and a row stride in multiples of 16 bytes, and a row stride above 0."""
    x = view()
    rows = logit_tile.gather_rows(x, None)
    assert (rows.data_ptr() != x.data_ptr()) == copied and torch.equal(rows, x)
    assert rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.itemsize % 16 == 0 and rows.stride(1) == 1


# -- compiled code

BARRIERS = """
import re
from pathlib import Path
import torch
from gspo_kernels.backends.triton import token_passes, tuning
from gspo_kernels.backends.triton.launch import launches
from helpers import compile_cases as cases
from helpers.binding import assume_driver, bind

lines = Path(token_passes.__file__).read_text().splitlines()
store, load = (
    next(number for number, line in enumerate(lines, 1) if text in line)
    for text in ("tl.store(outputs.coefficient + t", "tl.load(outputs.coefficient + t")
)
for architecture in ("sm_80", "sm_90"):
    with tuning.assume(architecture), assume_driver(architecture), launches() as seen:
        cases.loss(cases.OBJECTIVES["grpo everything"], torch.float32)
        (variant,) = [bind(x) for x in seen if x.kernel.__name__ == "sequence_loss"]
    ptx = variant.compile().asm["ptx"]
    (file,) = re.findall(r'\\.file\\s+(\\d+) ".*token_passes\\.py"', ptx)
    line, events = None, []
    for text in ptx.splitlines():
        if match := re.match(r"\\s*\\.loc\\s+(\\d+) (\\d+)", text):
            line = int(match[2]) if match[1] == file else None
        elif "st.global" in text and line == store:
            events.append("store")
        elif "ld.global" in text and line == load:
            events.append("load")
        elif "bar.sync" in text or "barrier.sync" in text:
            events.append("barrier")
    stored = len(events) - events[::-1].index("store")
    print(architecture, events[stored : events.index("load")].count("barrier"))
"""


@pytest.mark.slow
def test_there_is_a_barrier_between_writing_and_reading_coefficients() -> None:
    """The test needs a token-level ratio: the reduction of a sequence ratio always has a barrier in this place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    run = subprocess.run([sys.executable, "-c", BARRIERS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == ["sm_80 3", "sm_90 3"]
