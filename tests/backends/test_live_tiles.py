"""The gradient budget: the dropped mass is reported correctly, stays within the budget, and saves products."""

from __future__ import annotations

import pytest
import torch
from helpers.array import run
from helpers.device import on_device, to_device
from helpers.features import make
from helpers.head_rows import NEEDS, head_rows
from helpers.tile_choices import choices

from gspo_kernels.backends import dispatch, live_tiles
from gspo_kernels.backends.triton.launch import launches


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
    with choices() as decisions, launches() as seen:
        run(make("backend=triton tiles=parts gradient_budget=0.3"))
    # On a GPU, the first step also loads the kernel of the dense backward, by one program without a list of cells.
    of_cells = [x for x in seen if x.kernel.__name__ == "gradient_tile" and x.arguments["by_tile"] is not None]
    tiles = sum(x.programs for x in of_cells)
    assert 0 < tiles == int(decisions[0].live.cells.sum()) < decisions[0].live.cells.numel()


@on_device
@pytest.mark.parametrize("old_log_prob", [-200.0, -torch.inf, torch.nan])
def test_nothing_is_dropped_if_the_total_mass_is_not_finite(old_log_prob: float, backend: str) -> None:
    """With a negative advantage, an enormous or infinite ratio is not clipped, so the coefficients are not finite."""
    case = make(f"backend={backend} tiles=many gradient_budget=0.3", 3)
    longest = int(case.mask.sum(1).argmax())
    case.tokens["advantages"] = torch.where(torch.arange(len(case.mask)) == longest, -1.0, 1.0)
    case.tokens["old_log_probs"][longest] += old_log_prob
    with choices() as decisions:
        out = run(case)
    assert not decisions[0].coefficient.isfinite().all() and not out.gradients["hidden"].isfinite().all()
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
