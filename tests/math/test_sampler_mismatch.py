"""Importance weights and off-policy masks of rollouts, compared with their formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.array import arguments_of, assert_right, leaves_of, unmasked
from helpers.device import on_device, policy_loss, run_policy
from helpers.features import make
from tolerance import FLOAT64_RELATIVE

from gspo_kernels import Objective, validation
from gspo_kernels.sampler_mismatch import LEVELS, MODES, RolloutCorrection, importance_weights, off_policy_mask


def batch(packed: bool) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 9, generator=rng) > 0.3
    mask[2] = False
    old = -4 - torch.rand(5, 9, generator=rng, dtype=torch.float64)
    roll = old - 0.5 * torch.randn(5, 9, generator=rng, dtype=torch.float64)
    old[~mask], roll[~mask] = torch.nan, torch.inf
    inputs = {"old_log_probs": old, "rollout_log_probs": roll, "mask": mask}
    if packed:
        inputs = {k: v.reshape(-1) for k, v in inputs.items()} | {"cu_seqlens": torch.arange(6) * 9}
    return inputs


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_metrics_equal_float64(level: str, mode: str, layout: str) -> None:
    correction = RolloutCorrection(level, mode, 0.95, 1.05)
    case = make(f"dtype=fp64 rollout_correction=mask tokens=masked_sequences layout={layout}")
    case = replace(case, objective=replace(case.objective, rollout_correction=correction))
    assert_right(case)
    expected = unmasked(case)
    assert 0 < expected.rollout_metrics["rollout_bound_share"] < 1
    names = ("old_log_probs", "rollout_log_probs", "mask", "cu_seqlens")
    arguments = {name: x for name, x in arguments_of(case, leaves_of(case)).items() if name in names}
    ours = importance_weights(**arguments, level=level, mode=mode, low=0.95, high=1.05)
    weights = ours.weights[arguments["mask"]]
    torch.testing.assert_close(weights, expected.weights, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    assert {f"rollout_{name}" for name in ours.metrics.keys() - {"tokens"}} == expected.rollout_metrics.keys()


def test_a_nan_reaches_the_loss_and_an_overflow_is_bounded() -> None:
    old = torch.zeros(2, 3)
    roll = torch.tensor([[0.0, torch.nan, 0.0], [-99.0, -99.0, 0.0]])
    result = importance_weights(old, roll, torch.ones(2, 3), level="sequence", high=3.0)
    assert result.weights[0].isnan().all() and result.weights[1].eq(3).all()
    result = importance_weights(old, roll, torch.ones(2, 3), level="sequence", mode="mask", high=3.0)
    assert result.weights[0].isnan().all() and result.weights[1].eq(0).all()


def gated(low: float, high: float) -> tuple[RolloutCorrection, ...]:
    """Return ms-swift's sequence_mask, and seq-mask-tis: sequences are dropped, tokens keep their own weight."""
    return RolloutCorrection("geometric", "gate", low, high), RolloutCorrection("token", high=math.inf)


def test_a_dropped_token_has_weight_zero_even_if_another_weight_is_nan_or_infinite() -> None:
    """In the first sequence a token's ratio is inf, so the gate drops it. In the second it is NaN, and the gate is."""
    old = -torch.ones(2, 2)
    rollout = torch.tensor([[-math.inf, -1.0], [torch.nan, -1.0]])
    gate = importance_weights(old, rollout, torch.ones(2, 2), level="geometric", mode="gate", high=2.0).weights
    assert gate[0].eq(0).all() and gate[1].isnan().all()
    for corrections in (gated(0.0, 2.0), gated(0.0, 2.0)[::-1]):
        objective = Objective(rollout_correction=corrections)
        inputs: dict[str, Any] = {"old_log_probs": old, "rollout_log_probs": rollout, "objective": objective}
        assert policy_loss(old, torch.tensor([1.0, 0.0]), **inputs).loss == 0
        with pytest.raises(ValueError, match="rollout_log_probs must be without NaN"):
            policy_loss(old, torch.tensor([0.0, 1.0]), **inputs)


@on_device
@pytest.mark.parametrize("level", LEVELS)
def test_nan_and_infinite_weights_add_nothing_where_the_policy_term_is_zero(level: str, backend: str) -> None:
    """A NaN weight adds nothing where the advantage or the token weight is 0.

    An infinite weight of clipped tokens makes the loss infinite, but adds no gradient.
    """
    old = -torch.ones(2, 3)
    rollout = old.clone()
    rollout[0, 0] = torch.nan
    o = Objective.preset("grpo", rollout_correction=RolloutCorrection(level=level))
    options: dict[str, Any] = {"old_log_probs": old, "objective": o, "backend": backend}
    assert policy_loss(old, torch.tensor([0.0, 1.0]), rollout_log_probs=rollout, **options).loss == -0.5
    weights = torch.tensor([[0.0], [1.0]])
    out = policy_loss(old, torch.ones(2), rollout_log_probs=rollout, token_weights=weights, **options)
    assert out.loss == -0.5
    options["objective"] = Objective.preset("grpo", rollout_correction=RolloutCorrection(level=level, high=math.inf))
    every_token_is_above = old + 1
    out, gradient = run_policy(every_token_is_above, torch.ones(2), rollout_log_probs=old - 100, **options)
    assert out.loss.isinf() and not gradient.any()


@pytest.mark.parametrize("mode", ["mask", "gate"])
def test_a_ratio_at_a_bound_is_kept(mode: str) -> None:
    result = importance_weights(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), mode=mode, low=1.0, high=1.0)
    assert result.weights.eq(1).all() and result.metrics["bound_share"] == 0


def test_token_ratios_are_truncated_at_2_by_default() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    result = importance_weights(torch.zeros(2, 2), torch.full((2, 2), -9.0), mask)
    assert result.weights[mask].eq(2).all() and result.metrics["tokens"] == 3
    assert RolloutCorrection() == RolloutCorrection("token", "truncate", 0.0, 2.0)


def test_tokens_with_weight_zero_are_counted() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    result = importance_weights(torch.zeros(2, 2), torch.full((2, 2), -9.0), mask, mode="mask")
    assert not result.weights.any() and result.metrics["tokens"] == 3


@pytest.mark.parametrize("packed", [False, True])
def test_the_off_policy_mask(packed: bool) -> None:
    inputs = batch(packed)
    inputs["log_probs"] = inputs.pop("old_log_probs")
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0, -1.0])
    result = off_policy_mask(**inputs, advantages=advantages, threshold=0.05)
    new, roll, mask = (inputs[k].view(5, 9) for k in ("log_probs", "rollout_log_probs", "mask"))
    expected = mask.double()
    for i in range(5):
        if mask[i].any() and advantages[i] < 0 and (roll[i] - new[i])[mask[i]].mean() > 0.05:
            expected[i] = 0
    assert 0 < expected.sum() < mask.sum()
    assert torch.equal(result.weights.view(5, 9), expected)
    assert result.metrics["masked_share"].item() == pytest.approx(1 - (expected.sum() / mask.sum()).item())
    if not packed:
        column = off_policy_mask(**inputs, advantages=advantages[:, None], threshold=0.05)
        assert torch.equal(column.weights, expected)


def test_an_answer_at_the_threshold_of_the_off_policy_mask_is_kept() -> None:
    lp = -torch.ones(2, 3)
    assert off_policy_mask(lp, lp, -torch.ones(2), torch.ones(2, 3), threshold=0.0).weights.eq(1).all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batches(shape: tuple[int, int]) -> None:
    empty: dict[str, Any] = {"old_log_probs": torch.ones(shape), "rollout_log_probs": torch.ones(shape)}
    result = importance_weights(**empty, mask=torch.ones(shape), level="sequence")
    assert result.weights.shape == shape and all(x == 0 for x in result.metrics.values())


def test_per_token_advantages_are_masked_per_token() -> None:
    lp = -torch.ones(1, 4)
    advantages = torch.tensor([[1.0, -1.0, 0.0, -2.0]])
    result = off_policy_mask(lp, lp + 1, advantages, torch.ones(1, 4), threshold=0.5)
    assert result.weights.tolist() == [[1.0, 0.0, 1.0, 0.0]] and result.metrics["masked_share"] == 0.5


def test_weights_and_masks_have_no_gradient() -> None:
    old, roll = (-torch.rand(2, 3).requires_grad_() for _ in range(2))
    weights = importance_weights(old, roll, torch.ones(2, 3))
    masked = off_policy_mask(old, roll, -torch.ones(2), torch.ones(2, 3), threshold=0.1)
    for result in (weights, masked):
        assert not any(x.requires_grad for x in (result.weights, *result.metrics.values()))


def test_unchecked_bad_values_make_all_weights_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "values_are_checked", lambda device: False)
    x = torch.zeros(6)
    ones = torch.ones(6)
    for bad in ({"cu_seqlens": torch.tensor([0, 4])}, {"cu_seqlens": torch.tensor([0, 6]), "mask": 2 * ones}):
        kwargs: Any = {"mask": ones, **bad}
        assert importance_weights(x, x, **kwargs).weights.isnan().all()
        assert off_policy_mask(x, x, ones, threshold=0.1, **kwargs).weights.isnan().all()
    nan = off_policy_mask(x[None], x[None], torch.tensor([torch.nan]), ones[None], threshold=0.1)
    assert nan.weights.isnan().all()
