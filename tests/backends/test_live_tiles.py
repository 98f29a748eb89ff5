"""The gradient budget: the dropped mass is reported correctly, stays within the budget, and saves products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.device import on_device, to_device
from helpers.head_rows import NEEDS, head_rows
from helpers.marks import slow
from helpers.oracle import DTYPES
from helpers.samples import make_sample, run_fused
from helpers.tile_choices import assert_dropped_mass_is_reported, choices, small_tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_kernels import Objective
from gspo_kernels.backends import dispatch, live_tiles
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.inputs import head as inputs

SHAPES = st.fixed_dictionaries(
    {
        "logit_std": st.sampled_from([0.3, 3.0, 9.0]),  # flat, medium, peaked
        "vocab": st.integers(7, 60),
        "hidden_size": st.integers(1, 24),
        "holes": st.booleans(),
        "per_token_advantages": st.booleans(),
        "objective": st.sampled_from(
            [
                Objective(),
                Objective(ratio="sequence-token"),
                Objective.preset("grpo"),
                Objective(kl_coef=0.1),
                Objective(kl_coef=0.1, kl_ratio_factor=True, clip_low=0.2, clip_high=0.2),
            ]
        ),
    },
    optional={
        "logit_softcap": st.sampled_from([2.0, 10.0]),
        "logit_scale": st.sampled_from([0.5, -2.0]),
        "temperature": st.sampled_from([0.6, "per-token"]),
        "padded_vocab": st.integers(1, 5),
    },
)
BUDGETS = st.sampled_from([1e-6, 1e-3, 1e-2, 0.1, 0.5, 0.99])


@on_device
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7).map(tuple), SHAPES, BUDGETS, st.integers(0, 10_000))
def test_torch_reports_the_dropped_mass_and_stays_within_the_budget(
    lengths: tuple[int, ...], shape: dict[str, Any], budget: float, seed: int
) -> None:
    with small_tiles():
        assert_dropped_mass_is_reported(make_sample(seed, lengths=lengths, **shape), budget, "torch")


@on_device
@pytest.mark.slow
@settings(max_examples=12)
@given(SHAPES, BUDGETS, st.integers(0, 10_000))
def test_triton_reports_the_dropped_mass_and_stays_within_the_budget(
    shape: dict[str, Any], budget: float, seed: int
) -> None:
    sample = make_sample(seed, lengths=(40, 31, 25, 52, 17, 29), **{**shape, "vocab": 601, "hidden_size": 24})
    assert_dropped_mass_is_reported(sample, budget, "triton")


@on_device
@pytest.mark.parametrize("dtype", [slow("fp64"), slow("fp32"), "bf16", "bf16x3", slow("fp16")])
@pytest.mark.parametrize("head", ["plain", "tail", "padded"])
@pytest.mark.parametrize("parts", [slow("one part"), "many parts"])
def test_gradients_of_every_dtype_equal_those_of_the_kept_entries(
    parts: str, head: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many parts are several chunks of rows and slabs of columns, with ragged ends."""
    if parts == "many parts":
        monkeypatch.setattr(inputs, "workspace_bytes", lambda: 2**17)
    heads: dict[str, Any] = {"tail": {"logit_softcap": 8.0, "temperature": "per-token"}, "padded": {"padded_vocab": 70}}
    sample = make_sample(
        3,
        lengths=(40, 31, 85, 52, 17, 59, 60),
        dtype=DTYPES.get(dtype, torch.float32),
        vocab=1201,
        hidden_size=64 if head == "plain" else 72,  # a multiple of the blocks of H, and not
        logit_std=6.0,
        **heads.get(head, {}),
    )
    sample = sample.with_options(head_precision="bf16x3" if dtype == "bf16x3" else None)
    with launches() as seen:
        assert_dropped_mass_is_reported(sample, 0.05, backend)
    if backend == "triton":
        first_cells = {x.arguments["first_cell"] for x in seen if x.kernel.__name__ == "gradient_tile"}
        assert len(first_cells) == 1 if parts == "one part" else len(first_cells) >= 3
        assert {x.kernel.__name__ for x in seen} >= {"hidden_product", "weight_product"}


@on_device
def test_rows_without_a_gradient_change_no_bit(backend: str) -> None:
    """The exact backward of a batch has the bits of the backward of its live rows alone."""
    head = head_rows(150, 16, 601)
    rng = torch.Generator().manual_seed(0)
    d = to_device(torch.randn(150, generator=rng) * (torch.rand(150, generator=rng) > 0.4))
    live = d != 0
    alone = head._replace(hidden=head.hidden[live], target_ids=head.target_ids[live], mask=head.mask[live])
    kernels = dispatch.implementation(backend)
    ours = kernels.head_backward(head, kernels.head_forward(head), d, None, NEEDS)
    expected = kernels.head_backward(alone, kernels.head_forward(alone), d[live], None, NEEDS)
    assert ours.hidden is not None and expected.hidden is not None and not ours.hidden[~live].any()
    assert ours.weight is not None and expected.weight is not None and torch.equal(ours.weight, expected.weight)
    assert torch.equal(ours.hidden[live], expected.hidden)


@on_device
def test_triton_launches_one_program_per_counted_cell() -> None:
    sample = make_sample(3, lengths=(40, 31, 85, 52), vocab=1201, logit_std=6.0).with_options(gradient_budget=0.1)
    with choices() as decisions, launches() as seen:
        run_fused(sample, "triton")
    # On a GPU, the first step also loads the kernel of the dense backward, by one program without a list of cells.
    of_cells = [x for x in seen if x.kernel.__name__ == "gradient_tile" and x.arguments["by_tile"] is not None]
    tiles = sum(x.programs for x in of_cells)
    assert 0 < tiles == int(decisions[0].live.cells.sum()) < decisions[0].live.cells.numel()


@on_device
@pytest.mark.parametrize("old_log_prob", [-200.0, -torch.inf, torch.nan])
def test_nothing_is_dropped_if_the_total_mass_is_not_finite(old_log_prob: float, backend: str) -> None:
    """With a negative advantage, an enormous or infinite ratio is not clipped, so the coefficients are not finite."""
    sample = make_sample(3, lengths=(140, 140), vocab=601, logit_std=6.0)
    old = sample.options["old_log_probs"].clone()
    old[0] = old[0] + old_log_prob
    sample = replace(sample, advantages=torch.tensor([-1.0, 1.0])).with_options(old_log_probs=old, gradient_budget=0.5)
    with choices() as decisions:
        out, grads = run_fused(sample, backend)
    assert not decisions[0].coefficient.isfinite().all() and not grads["hidden"].isfinite().all()
    assert out.metrics["dropped_gradient_mass"] == 0
    assert out.metrics["live_tile_share"] == out.metrics["live_row_share"] > 0


def test_cells_heavier_than_the_total_and_overflowing_sums_are_not_dropped() -> None:
    """With a soft-cap, masses are upper bounds and the total is a lower bound, so a cell may exceed the total."""
    total = torch.tensor(1e-3, dtype=torch.float64)
    dropped = live_tiles._lightest(torch.ones(512, 1024, dtype=torch.float64), total, 0.1)
    assert not dropped.any()
    mass = torch.ones(512, 1024, dtype=torch.float64)
    mass[3, 5], mass[0, 0] = 5e-5, torch.nan
    dropped = live_tiles._lightest(mass, total, 0.1)
    assert dropped.sum() == 1 and dropped[3, 5]
