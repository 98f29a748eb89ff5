"""Importance weights and off-policy masks of rollouts, compared with their formulas, computed on Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.device import on_device, policy_loss, to_device
from helpers.marks import triton_is_slow
from helpers.samples import make_sample, run_fused, run_policy
from tolerance import FLOAT64_RELATIVE, WEIGHT_METRIC_RELATIVE
from torch import Tensor

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


def expected_weights(level: str, mode: str, low: float, high: float) -> tuple[list[list[float]], list[float], int]:
    """Return weights [5, 9], log rho of each unmasked token, and the number of weights that a bound changed."""
    old, roll, mask = (batch(False)[k].tolist() for k in ("old_log_probs", "rollout_log_probs", "mask"))
    weights = [[0.0] * 9 for _ in range(5)]
    log_rhos = []
    bounded = 0
    for i in range(5):
        tokens = [t for t in range(9) if mask[i][t]]
        logs = {t: old[i][t] - roll[i][t] for t in tokens}
        for t in tokens:
            log = {"token": logs[t], "sequence": sum(logs.values()), "geometric": sum(logs.values()) / len(logs)}[level]
            rho = math.exp(log)
            inside = low <= rho <= high
            bounded += not inside
            weights[i][t] = rho if inside else min(max(rho, low), high) if mode == "truncate" else 0.0
            if mode == "gate" and inside:
                weights[i][t] = 1.0
            log_rhos.append(logs[t])
    return weights, log_rhos, bounded


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_metrics_match_plain_python(level: str, mode: str, packed: bool) -> None:
    low, high = 0.8, 1.3
    ours = importance_weights(**batch(packed), level=level, mode=mode, low=low, high=high)
    weights, log_rhos, bounded = expected_weights(level, mode, low, high)
    expected = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(ours.weights.view(5, 9), expected, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)
    w = expected.flatten()
    n = len(log_rhos)
    assert 0 < bounded < n
    metrics = {
        "tokens": n,
        "weight_mean": w.sum() / n,
        "weight_square_mean": w.square().sum() / n,
        "weight_max": w.max(),
        "bound_share": bounded / n,
        "effective_sample_size": w.sum() ** 2 / (n * w.square().sum()),
        "kl_sampler_trainer": sum(math.exp(d) - 1 - d for d in log_rhos) / n,
    }
    assert ours.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert ours.metrics[name].item() == pytest.approx(float(value), rel=WEIGHT_METRIC_RELATIVE), name
        assert ours.metrics[name].ndim == 0


def test_a_nan_reaches_the_loss_and_an_overflow_is_bounded() -> None:
    old = torch.zeros(2, 3)
    roll = torch.tensor([[0.0, torch.nan, 0.0], [-99.0, -99.0, 0.0]])
    result = importance_weights(old, roll, torch.ones(2, 3), level="sequence", high=3.0)
    assert result.weights[0].isnan().all() and result.weights[1].eq(3).all()
    result = importance_weights(old, roll, torch.ones(2, 3), level="sequence", mode="mask", high=3.0)
    assert result.weights[0].isnan().all() and result.weights[1].eq(0).all()


@on_device
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@triton_is_slow
def test_an_objective_with_a_correction_computes_the_weights_itself(level: str, packed: bool, backend: str) -> None:
    sample = make_sample(2, packed=packed, token_weights=True)
    mask, old = sample.options["mask"], sample.options["old_log_probs"]
    noise = 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    rollout = torch.where(mask, (old + noise).clamp(max=0), torch.nan)
    bounds: dict[str, Any] = {"level": level, "mode": "mask", "low": 0.8, "high": 1.3}
    inputs = to_device((old, rollout, mask, sample.options.get("cu_seqlens")))  # a GPU's exp has other bits
    result = to_device(importance_weights(*inputs[:3], cu_seqlens=inputs[3], **bounds), "cpu")
    both = torch.where(mask, sample.options["token_weights"] * result.weights, 0)
    expected, expected_grads = run_fused(sample.with_options(token_weights=both), backend)
    corrected = replace(sample, objective=Objective(rollout_correction=RolloutCorrection(**bounds)))
    corrected = corrected.with_options(rollout_log_probs=rollout)
    out, grads = run_fused(corrected, backend)
    assert torch.equal(out.loss, expected.loss)
    assert all(torch.equal(grads[name], g) for name, g in expected_grads.items())
    assert 0 < out.metrics["rollout_bound_share"] < 1
    for name, value in result.metrics.items():
        assert torch.equal(out.metrics[name if name == "tokens" else f"rollout_{name}"], value)
    from_log_probs = policy_loss(
        expected.log_probs,
        sample.advantages,
        objective=corrected.objective,
        backend=backend,
        **{name: x for name, x in corrected.options.items() if name != "ref_log_probs"},
    )
    assert torch.equal(from_log_probs.loss, expected.loss)


def gated(low: float, high: float) -> tuple[RolloutCorrection, ...]:
    """Return ms-swift's sequence_mask, and seq-mask-tis: sequences are dropped, tokens keep their own weight."""
    return RolloutCorrection("geometric", "gate", low, high), RolloutCorrection("token", high=math.inf)


def in_float64(objective: Objective, inputs: dict[str, Any], advantages: Tensor, backend: str) -> tuple[Any, Tensor]:
    """Return the output and the gradient of the log-probs in a batch without padding values."""
    clean = {k: torch.where(inputs["mask"], v, -1.0) for k, v in inputs.items() if k != "mask"}
    options: dict[str, Any] = {"mask": inputs["mask"], "objective": objective, "backend": backend}
    return run_policy(clean["old_log_probs"] - 0.05, advantages, **clean, **options)


SEVERAL: dict[str, tuple[tuple[RolloutCorrection, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    # (log rho [L] of a sequence, its mean) -> weights [L]
    "ms-swift 4.6.0 sequence_mask": (gated(0.0, 1.02), lambda log_rho, u: log_rho.exp() * (u.exp() <= 1.02)),
    "NeMo RL 7ea279a seq-mask-tis": (
        gated(0.9, 1.1),
        lambda log_rho, u: log_rho.exp() * ((u.exp() >= 0.9) & (u.exp() <= 1.1)),
    ),
    "three": (
        (
            RolloutCorrection("token", "gate", 0.5, 2.0),
            RolloutCorrection("sequence", "mask", 0.3, 3.0),
            RolloutCorrection("geometric", "truncate", 0.95, 1.05),
        ),
        lambda log_rho, u: (
            ((log_rho.exp() >= 0.5) & (log_rho.exp() <= 2.0))
            * torch.where((log_rho.sum().exp() - 1.65).abs() <= 1.35, log_rho.sum().exp(), 0.0)
            * u.exp().clamp(0.95, 1.05)
        ),
    ),
}


@on_device
@pytest.mark.parametrize("ratio", ["sequence", "token"])
@pytest.mark.parametrize("name", SEVERAL)
def test_the_weights_of_several_corrections_are_multiplied(name: str, ratio: str, backend: str) -> None:
    corrections, formula = SEVERAL[name]
    inputs = batch(False)
    mask = inputs["mask"]
    advantages = torch.tensor([1.0, -1.0, 1.0, 0.5, -2.0], dtype=torch.float64)
    log_rho = torch.where(mask, inputs["old_log_probs"] - inputs["rollout_log_probs"], 0.0)
    weights = torch.zeros_like(log_rho)
    for i in range(5):
        if mask[i].any():
            logs = log_rho[i][mask[i]]
            weights[i][mask[i]] = formula(logs, logs.mean())
    assert (weights[mask] == 0).any() and len(weights[weights != 0].unique()) > 1
    objective = Objective(ratio=ratio, clip_low=0.2, clip_high=0.2, rollout_correction=corrections)
    out, gradient = in_float64(objective, inputs, advantages, backend)
    lp = torch.where(mask, inputs["old_log_probs"] - 0.05, -1.0).requires_grad_()
    token_ratio = torch.where(mask, lp - lp.detach() - 0.05, 0)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    s = token_ratio.exp() if ratio == "token" else (token_ratio.sum(1, keepdim=True) / lengths).exp()
    loss = (torch.where(mask, -weights * s * advantages[:, None], 0) / lengths).sum() / 4
    (expected,) = torch.autograd.grad(loss, lp)
    for computed, truth in ((out.loss, loss.detach()), (gradient, expected)):
        torch.testing.assert_close(computed, truth, rtol=FLOAT64_RELATIVE, atol=FLOAT64_RELATIVE)


def test_a_dropped_token_has_weight_zero_even_if_another_weight_is_nan_or_infinite() -> None:
    """In the first sequence a token's ratio is inf, so the gate drops it. In the second it is NaN, and the gate is."""
    old = -torch.ones(2, 2)
    rollout = torch.tensor([[-math.inf, -1.0], [torch.nan, -1.0]])
    gate = importance_weights(old, rollout, torch.ones(2, 2), level="geometric", mode="gate", high=2.0).weights
    assert gate[0].eq(0).all() and gate[1].isnan().all()
    objective = Objective(rollout_correction=gated(0.0, 2.0))
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
