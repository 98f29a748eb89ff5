"""On an accelerator, values are not checked on the host. Bad values are counted, make the loss NaN, and index nothing.

These tests also run on a CPU, with the value checks switched off as on an accelerator.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import device as under_test
from helpers.captured import arguments_of
from helpers.device import on_device
from helpers.samples import make_sample
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss, validation
from gspo_kernels import policy as policy_module
from gspo_kernels.advantages import group_advantages
from gspo_kernels.backends.rows import PolicyRows
from gspo_kernels.backends.torch.sequence import policy_forward
from gspo_kernels.sampler_mismatch import RolloutCorrection


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "values_are_checked", lambda device: False)


def arguments(packed: bool = False) -> dict[str, Any]:
    sample = make_sample(0, packed=packed)
    leaves = {name: x.detach().requires_grad_() for name, x in sample.leaves.items()}
    return {
        "hidden": leaves["hidden"],
        "lm_head": leaves["weight"],
        "target_ids": sample.target_ids.clone(),
        "advantages": torch.where(sample.advantages == 0, 1.0, sample.advantages),
        **sample.options,
    }


def first_token(inputs: dict[str, Any], name: str, value: float) -> Tensor:
    x = inputs[name].clone()
    x.view(-1)[0] = value  # the first token of every sample is unmasked
    return x


BAD_VALUES: dict[str, Any] = {
    "id past the vocabulary": lambda a: {"target_ids": first_token(a, "target_ids", 37)},
    "negative id": lambda a: {"target_ids": first_token(a, "target_ids", -1)},
    "NaN advantage": lambda a: {"advantages": first_token(a, "advantages", float("nan"))},
    "inf advantage": lambda a: {"advantages": first_token(a, "advantages", float("inf"))},
    "mask of 2": lambda a: {"mask": a["mask"].int() * 2},
    "normalizer 0": lambda a: {"normalizer": torch.zeros((), dtype=torch.int64)},
    "negative normalizer": lambda a: {"normalizer": torch.tensor(-3.0)},
    "NaN normalizer of KL": lambda a: {"kl_normalizer": torch.tensor(torch.nan), "objective": Objective(kl_coef=0.1)},
    "positive old log-prob": lambda a: {"old_log_probs": first_token(a, "old_log_probs", 1.0)},
    "infinite reference log-prob": lambda a: {"ref_log_probs": first_token(a, "ref_log_probs", torch.inf)},
    "temperature 0": lambda a: {"temperature": torch.zeros(())},
    "negative temperature of one token": lambda a: {
        "temperature": torch.where(torch.arange(a["mask"].numel()).view(a["mask"].shape) == 0, -1.0, 1.0)
    },
}
BAD_OFFSETS = {
    "not monotone": lambda c: torch.cat([c[:3], c[4:5], c[3:4], c[5:]]),
    "not from 0": lambda c: torch.cat([c[:1] + 3, c[1:]]),
    "not to N": lambda c: torch.cat([c[:-1], c[-1:] - 2]),
    "past N": lambda c: c + 10_000,
    "negative": lambda c: c - 10_000,
}


def assert_loss_is_nan(inputs: dict[str, Any]) -> None:
    out = under_test.gspo_fused_loss(**inputs)
    assert out.metrics["invalid"] >= 1
    assert out.loss.isnan()
    out.loss.backward()
    assert inputs["lm_head"].grad.isnan().any()


@on_device
@pytest.mark.parametrize("name", BAD_VALUES)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_values_are_counted_and_make_the_loss_nan(name: str, packed: bool) -> None:
    inputs = arguments(packed)
    assert_loss_is_nan({**inputs, **BAD_VALUES[name](inputs)})


@on_device
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_are_counted_and_index_nothing_out_of_bounds(name: str) -> None:
    inputs = arguments(packed=True)
    assert_loss_is_nan({**inputs, "cu_seqlens": BAD_OFFSETS[name](inputs["cu_seqlens"])})


@on_device
@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy"])
def test_values_of_the_wrong_sign_are_counted_once_per_token(name: str, backend: str) -> None:
    log_probs = -torch.ones(2, 3)
    entropy = torch.ones(2, 3)
    inputs = {key: log_probs for key in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")}
    inputs |= {"entropy": entropy, "advantages": torch.ones(2), "mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    objective = Objective(rollout_correction=RolloutCorrection())
    wrong = -inputs[name]
    wrong[1, 1:] = inputs[name][1, 1:]  # three wrong tokens are unmasked
    out = under_test.policy_loss(**{**inputs, name: wrong}, objective=objective, backend=backend)
    assert out.metrics["invalid"] == 3 and out.loss.isnan()


@on_device
@pytest.mark.parametrize(("level", "count"), [("token", 1), ("sequence", 3)])
def test_a_nan_of_the_sampler_is_counted_once_per_weight(level: str, count: int, backend: str) -> None:
    """The first sequence, without an advantage, and the third, without weights, may have NaN."""
    old = -torch.ones(4, 3)
    rollout = old.clone()
    rollout[:3, 1] = torch.nan
    weights = torch.ones(4, 3)
    inputs: dict[str, Any] = {"old_log_probs": old, "rollout_log_probs": rollout, "token_weights": weights}
    objective = Objective(rollout_correction=RolloutCorrection(level=level))
    run = partial(under_test.policy_loss, old, torch.tensor([0.0, 1.0, 1.0, 1.0]), objective=objective, backend=backend)
    weights[2] = 0
    assert (out := run(**inputs)).loss.isnan() and out.metrics["invalid"] == count
    weights[1] = 0
    assert (out := run(**inputs)).loss == -0.25 and out.metrics["invalid"] == 0


@on_device
def test_valid_values_are_not_counted() -> None:
    for packed in (False, True):
        out = under_test.gspo_fused_loss(**arguments(packed))
        assert out.metrics["invalid"] == 0 and out.loss.isfinite()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_no_value_is_read_on_the_host(packed: bool, ratio: str) -> None:
    """Fake tensors have no values, so reading a value raises."""
    inputs = arguments(packed)
    objective = Objective(ratio=ratio, kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.1, dual_clip=2.0)
    inputs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    normalizer = torch.tensor(3.0)
    with FakeTensorMode() as mode, torch.no_grad():
        fake: dict[str, Any] = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        out = gspo_fused_loss(**fake, objective=objective, normalizer=mode.from_tensor(normalizer))
        assert out.loss.shape == ()
        lp = linear_log_probs(fake["hidden"], fake["lm_head"], fake["target_ids"], mask=fake["mask"], entropy=True)
        keep = ("mask", "cu_seqlens", "old_log_probs", "ref_log_probs")
        policy = {name: fake[name] for name in keep if name in fake}
        policy_loss(lp.log_probs, fake["advantages"], entropy=lp.entropy, objective=objective, **policy)
        group_advantages(fake["advantages"], 2)
        with pytest.raises(DataDependentOutputException):
            out.loss.item()


def test_the_torch_policy_forward_reads_no_value_on_the_host() -> None:
    """The test above does not run this function: fake tensors run the operator's fake implementation."""
    objective = Objective(kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.1, dual_clip=2.0)
    sample = make_sample(1, objective=objective)
    lp = -torch.rand(sample.target_ids.shape)
    options = {name: sample.options[name] for name in ("mask", "old_log_probs", "ref_log_probs")}
    call = partial(policy_loss, lp, sample.advantages, entropy=lp.abs(), objective=objective, **options)
    log_probs, entropy, mask, policy, _, _ = arguments_of(policy_module, "policy_loss_op", call)
    with FakeTensorMode() as mode:
        log_probs, entropy, mask = (mode.from_tensor(x) for x in (log_probs, entropy, mask))
        rows = PolicyRows._make(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in policy)
        assert policy_forward(log_probs, entropy, mask, rows, objective).loss.shape == ()


def test_gspo_check_enables_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    accelerator = torch.device("cuda")
    assert not validation.values_are_checked(accelerator)
    monkeypatch.setenv("GSPO_CHECK", "1")
    assert validation.values_are_checked(accelerator)
