"""Faults that other tests of the kernels let through: far offsets, alignment, a barrier, and terms that rarely differ.

`test_mutations.py` seeds each fault and runs the test here that fails with it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import make_sample, run_fused, run_oracle
from test_kernels import relaunch
from test_live_tiles import choices
from tolerance import FLOAT64_RELATIVE, check
from torch import Tensor

from gspo_kernels import Objective, policy_loss, reference
from gspo_kernels.kernels import logit_tile
from gspo_kernels.kernels.launch import Launch, launches

# -- terms of the loss


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_a_kl_term_with_another_aggregation_counts_its_own_normalizer(ratio: str, backend: str) -> None:
    """A normalizer for the policy term alone: KL, averaged over tokens, is divided by their number."""
    objective = Objective(ratio=ratio, kl_coef=0.1, kl_aggregation="token-mean", clip_low=0.02, clip_high=0.03)
    sample = make_sample(6, lengths=(5, 3, 4), vocab=11, dtype=torch.float64, objective=objective)
    sample = sample.with_options(normalizer=17.0)
    truth, true_grads = run_oracle(sample)
    out, grads = run_fused(sample, backend)
    check("loss", out.loss, truth.loss, truth.loss, torch.float64)
    check("d_weight", grads["weight"], true_grads["weight"], true_grads["weight"], torch.float64)


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-30])
def test_a_small_sapo_temperature_has_a_slope_at_far_ratios(temperature: float, backend: str) -> None:
    """The sigmoid bends where temperature * ratio is near 1: at log-ratios of 7, 28 and 69."""
    objective = Objective(
        surrogate="sapo", ratio="token", sapo_temperature_pos=temperature, sapo_temperature_neg=temperature
    )
    around = torch.tensor([[-3.0, -1.0, 0.0, 1.0, 2.0]] * 2, dtype=torch.float64)
    log_probs = (around - math.log(temperature)).requires_grad_()
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    expected = reference.surrogate(log_probs, advantages[:, None].expand(2, 5), objective).mean(1).mean()
    (truth,) = torch.autograd.grad(expected, log_probs)
    old = torch.zeros_like(log_probs)
    out = policy_loss(log_probs, advantages, old_log_probs=old, objective=objective, backend=backend)
    (found,) = torch.autograd.grad(out.loss, log_probs)
    torch.testing.assert_close(out.loss, expected, rtol=FLOAT64_RELATIVE, atol=0)
    torch.testing.assert_close(found, truth, rtol=FLOAT64_RELATIVE, atol=0)
    assert (truth.abs() > truth.abs().max() / 100).all()


# -- offsets past 2^31 in the block-sparse products


FAR_CELL = 2**18  # d_logits of this cell begin at an offset of 2^31 elements or more


def sparse_launch(name: str) -> tuple[list[Launch], Launch, Tensor]:
    """Launches of a sparse backward; the first one of the kernel `name`; its d_logits at cell FAR_CELL and after it.

    The far d_logits take address space, but no memory beyond the pages that are touched.
    """
    sample = make_sample(3, lengths=(40, 31), vocab=601, logit_std=6.0).with_options(gradient_budget=0.1)
    with choices(), launches() as seen:
        run_fused(sample, "triton")
    launched = next(x for x in seen if x.kernel.__name__ == name)
    near = launched.arguments["d_logits"]
    assert FAR_CELL * near[0].numel() >= 2**31
    far = torch.empty(FAR_CELL + near.shape[0], *near.shape[1:], dtype=near.dtype)
    far[FAR_CELL:] = near
    return seen, launched, far


def products(seen: list[Launch], launched: Launch, **changes: Any) -> tuple[Tensor, Tensor]:
    """The sums of a launch as it was, and with the changes."""
    sums = torch.zeros(2, *launched.arguments["sums"].shape)
    relaunch(seen, launched.kernel.__name__, sums=sums[0])
    relaunch(seen, launched.kernel.__name__, sums=sums[1], **changes)
    assert sums[0].any()
    return sums[0], sums[1]


def test_the_hidden_product_reads_cells_past_two_to_the_31() -> None:
    seen, launched, far = sparse_launch("hidden_product")
    place = launched.arguments["block_place"] + FAR_CELL
    near, found = products(seen, launched, d_logits=far, block_place=place)
    assert torch.equal(near, found)


def test_the_weight_product_reads_cells_past_two_to_the_31() -> None:
    seen, launched, far = sparse_launch("weight_product")
    begin, first = launched.arguments["tile_begin"] + FAR_CELL, launched.arguments["first"] - FAR_CELL
    near, found = products(seen, launched, d_logits=far, tile_begin=begin, first=first)
    assert torch.equal(near, found)


# -- what the copy engine may read


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
        (lambda: torch.zeros(16, 8).bfloat16().t(), True),
        (lambda: torch.zeros(1, 16).bfloat16().expand(4, 16), True),
    ],
    ids=["start", "16-bytes", "2-bytes", "8-bytes", "ragged-rows", "transposed", "expanded"],
)
def test_rows_that_a_descriptor_cannot_read_are_copied(view: Callable[[], Tensor], copied: bool) -> None:
    """A tensor descriptor needs a base address and a row stride that are multiples of 16 bytes, and rows apart."""
    x = view()
    rows = logit_tile.gather_rows(x, None)
    assert (rows.data_ptr() != x.data_ptr()) == copied and torch.equal(rows, x)
    assert rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.itemsize % 16 == 0 and rows.stride(1) == 1


# -- what only compiled code shows

BARRIERS = """
import re
from pathlib import Path
import torch
from gspo_kernels.kernels import cases, sequence, tuning
from gspo_kernels.kernels.ahead_of_time import compile_launch
from gspo_kernels.kernels.launch import launches

lines = Path(sequence.__file__).read_text().splitlines()
store, load = (
    next(number for number, line in enumerate(lines, 1) if text in line)
    for text in ("tl.store(coefficient + t", "tl.load(coefficient + t")
)
for architecture in ("sm_80", "sm_90"):
    with tuning.assume(architecture), launches() as seen:
        cases.loss(cases.OBJECTIVES["grpo everything"], torch.float32)
    (launch,) = [x for x in seen if x.kernel.__name__ == "sequence_loss"]
    ptx = compile_launch(launch, architecture).asm["ptx"]
    (file,) = re.findall(r'\\.file\\s+(\\d+) ".*sequence\\.py"', ptx)
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


def test_a_barrier_stands_before_coefficients_are_read_again() -> None:
    """Between the last store of a coefficient and the first load, for a ratio of tokens, whose loop sums nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", BARRIERS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == ["sm_80 1", "sm_90 1"]
