"""Detect faults that other tests of the loss miss: in rare branches, in metrics, in the last rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.array import run
from helpers.device import DEVICE, on_device, policy_loss, run_policy
from helpers.features import make
from helpers.head_rows import head_rows
from helpers.tile_choices import choices
from tolerance import LOG_PROB_RMS_ON_GPUS, LOG_PROB_UNIT_RMS

from gspo_kernels import Objective
from gspo_kernels.backends import dispatch, live_tiles
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends.precision import power_of_two
from gspo_kernels.backends.rows import NeedsGradient
from gspo_kernels.backends.torch import tiles as torch_tiles

# -- terms of the loss


BOUNDS = {  # objective, sign of the advantage, log-ratio exactly at the bound
    "top": (Objective(ratio="token", clip_high=0.2), 1.0, math.log1p(0.2)),
    "bottom": (Objective(ratio="token", clip_low=0.2), -1.0, math.log1p(-0.2)),
    "dual clip": (Objective(ratio="token", dual_clip=3.0), -1.0, math.log(3.0)),
    "delta": (Objective(ratio="token", delta=2.0), -1.0, math.log(2.0)),
    "cispo, top": (Objective(surrogate="cispo", ratio="token", clip_high=0.2), 1.0, math.log1p(0.2)),
    "cispo, bottom": (Objective(surrogate="cispo", ratio="token", clip_low=0.2), 1.0, math.log1p(-0.2)),
    "gmpo, top": (Objective(surrogate="gmpo", clip_high=0.4), 1.0, 0.4),
    "gmpo, bottom": (Objective(surrogate="gmpo", clip_low=0.4), -1.0, -0.4),
}


@on_device
@pytest.mark.parametrize("name", BOUNDS)
def test_a_ratio_on_a_bound_is_not_clipped(name: str, backend: str) -> None:
    objective, advantage, bound = BOUNDS[name]
    for beyond, fraction in ((0.0, 0.0), (math.copysign(1e-9, bound), 1.0)):
        log_ratio = torch.full((1, 1), bound + beyond, dtype=torch.float64)
        # Either the log-prob or the old one is 0, so nothing is rounded.
        options: dict[str, Any] = {"old_log_probs": -log_ratio.clamp(min=0), "objective": objective, "backend": backend}
        out, gradient = run_policy(log_ratio.clamp(max=0), torch.tensor([advantage]), **options)
        assert out.metrics["token_clip_fraction"] == fraction
        assert gradient.any() == (fraction == 0 or objective.surrogate == "cispo")


@on_device
def test_a_probability_of_one_has_a_finite_or_infinite_kl_but_no_nan(backend: str) -> None:
    """Tokens: q = p = 1, then q < p = 1 with a KL of inf, then q = 0."""
    log_probs = torch.tensor([[0.0, 0.0, -1.0]])
    old = torch.tensor([[0.0, -1.0, -math.inf]])
    objective = Objective.preset("dppo_kl", dual_clip=3.0)
    out, gradient = run_policy(log_probs, torch.ones(1), old_log_probs=old, objective=objective, backend=backend)
    assert out.metrics["token_clip_fraction"].item() == pytest.approx(2 / 3)
    assert out.loss.item() == pytest.approx(-1 / 3) and gradient.tolist() == [[pytest.approx(-1 / 3), 0.0, 0.0]]


@on_device
def test_log_probs_are_rounded_once(backend: str) -> None:
    """The RMS error is that of a single rounding, because the rounding errors of two differences are added back.

    Errors are in units in the last place of the log-prob. A GPU's exp and log are less precise, so kernels on a GPU
    must only stay within the limit for log-probs.
    """
    approximate = DEVICE.type == "cuda" and backend == "triton"
    errors = []
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        weight = 6 * torch.randn(300, 64, generator=rng)  # row i of the batch has exactly the logits weight[:, i]
        head = head_rows(64, 64, 300, hidden=torch.eye(64), weight=weight)
        logits = weight.t().double()
        truth = logits.log_softmax(1).gather(1, head.target_ids.cpu()[:, None])[:, 0]
        ours = dispatch.implementation(backend).head_forward(head).log_probs.cpu()
        unit = torch.nextafter(truth.float().abs(), torch.tensor(math.inf)).double() - truth.float().abs().double()
        errors.append((ours.double() - truth) / (1 if approximate else unit))
    limit = LOG_PROB_RMS_ON_GPUS if approximate else LOG_PROB_UNIT_RMS
    assert torch.cat(errors).square().mean().sqrt() <= limit


@on_device
@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("log_ratio", [-0.5, 0.5])
def test_empty_sequences_do_not_change_the_smallest_and_largest_ratio(
    ratio: str, log_ratio: float, backend: str
) -> None:
    """Masked tokens do not change them either.

    An empty sequence or a masked token would have ratio 1, and all other ratios here are on the same side of 1.
    """
    old = -torch.ones(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1], mask[0, 2] = False, False
    objective = Objective(ratio=ratio, clip_low=0.9, clip_high=9.0)
    out = policy_loss(
        old + log_ratio, torch.ones(3), mask=mask, old_log_probs=old, objective=objective, backend=backend
    )
    for name in ("ratio_mean", "ratio_min", "ratio_max"):
        assert out.metrics[name].item() == pytest.approx(math.exp(log_ratio)), name


@on_device
@pytest.mark.parametrize("target", [70, 71, 127, 2**31, 2**32 + 3, -1, -(2**32) + 3])
def test_the_log_prob_of_an_id_outside_the_vocabulary_is_nan(target: int, backend: str) -> None:
    """Only the row of that id is NaN. On accelerators, no check rejects such ids before the kernels run."""
    head = head_rows(5, 24, 70)
    bad = head._replace(target_ids=head.target_ids.clone())
    bad.target_ids[2] = target
    implementation = dispatch.implementation(backend)
    expected, ours = (implementation.head_forward(x).log_probs for x in (head, bad))
    assert ours.isnan().tolist() == [False, False, True, False, False]
    assert torch.equal(ours[ours.isfinite()], expected[ours.isfinite()])


@pytest.mark.parametrize(("upstream", "scale"), [(1.0, 1e-6), (1e-3, 1e-6), (1.0, -1e-6)])
def test_fp16_gradients_of_a_small_slope_do_not_underflow(
    upstream: float, scale: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of two that lifts d_logits out of underflow accounts for the slope, here the logit scale.

    Half-precision operands with fp32 products, as on CUDA, are simulated.
    """
    head = head_rows(4, 8, 40, logit_scale=scale)
    head = head._replace(hidden=head.hidden.half(), weight=(1e4 * head.weight).half())
    d = torch.full((4,), upstream)
    needs = NeedsGradient(True, False, False, False, False)
    truth = torch_backend.head_backward(head, torch_backend.head_forward(head), d, None, needs)[0]
    monkeypatch.setattr(torch_tiles, "operand_dtype", lambda device, dtype, sum_dtype: dtype)
    monkeypatch.setattr(torch_tiles, "_product", lambda a, b: a.float() @ b.float())
    kernels = dispatch.implementation(backend)
    ours = kernels.head_backward(head, kernels.head_forward(head), d, None, needs)[0]
    assert truth is not None and truth.abs().max() > 1e-4 * upstream
    torch.testing.assert_close(ours, truth)


def test_the_power_of_two_brings_the_largest_of_both_gradients_near_one() -> None:
    valid = torch.tensor([True, True, False])
    small, large = torch.tensor([1e-6, 0.0, 1e9]), torch.tensor([0.0, 100.0, 0.0])
    assert power_of_two(small, None, valid, 1.0) == 2.0**19
    assert power_of_two(small, large, valid, 1.0) == power_of_two(large, small, valid, 1.0) == 2.0**-7
    assert power_of_two(torch.full((3,), 1e-42), None, valid, 1.0) == 2.0**126  # the largest in fp32 for subnormals
    for bad in (torch.inf, torch.nan, 0.0):
        assert power_of_two(torch.full((3,), bad), None, valid, 1.0) == 1


def test_operands_are_half_precision_only_if_products_are_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch multiplies half-precision operands into an fp32 result on CUDA, but not on ROCm."""
    for version, expected in (("7.0", torch.float32), (None, torch.bfloat16)):
        monkeypatch.setattr(torch.version, "hip", version)
        assert torch_tiles.operand_dtype(torch.device("cuda"), torch.bfloat16, torch.float32) == expected
    assert torch_tiles.operand_dtype(torch.device("cpu"), torch.bfloat16, torch.float32) == torch.float32


# -- which cells a gradient budget drops


@on_device
def test_nothing_is_dropped_while_a_graph_is_captured(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tiles, "is_captured", lambda x: True)
    with choices() as made:
        out = run(make(f"backend={backend} tiles=many gradient_budget=0.3"))
    rows, pays = made[0].live.counts.tolist()
    assert rows > 0 and not pays and out.metrics["dropped_gradient_mass"] == 0


def test_a_cell_that_fits_the_budget_by_less_than_fp32_resolves_is_kept() -> None:
    mass, total = torch.tensor([[1.0, 999.0]]).double(), torch.tensor(1000.0).double()
    assert not live_tiles._lightest(mass, total, 1e-3 * (1 + 5e-5)).any()
    assert live_tiles._lightest(mass, total, 1e-3 * (1 + 2e-4)).tolist() == [[True, False]]
