"""Advantages from rewards, compared with each trainer's formula, computed on Python floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import ADVANTAGE_RELATIVE, FLOAT64_RELATIVE, GDPO_ABSOLUTE, GDPO_RELATIVE
from torch import Tensor

from gspo_kernels import advantages as adv
from gspo_kernels.advantages import (
    RunningMoments,
    gdpo_advantages,
    group_advantages,
    normalize_rewards,
    token_returns,
    turn_advantages,
)
from gspo_kernels.advantages import whiten as whitened

REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -3.0, 7.25]), min_size=1, max_size=24)
Formula = Callable[[list[float], list[float]], list[float]]  # (rewards of a group, all rewards) -> advantages


def float64(x: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def by_group(formula: Formula, rewards: list[float], ids: list[int]) -> Tensor:
    """Compute advantages [B] with the formula, group by group."""
    advantages = [0.0] * len(rewards)
    for group in set(ids):
        places = [i for i, g in enumerate(ids) if g == group]
        for i, x in zip(places, formula([rewards[i] for i in places], rewards), strict=True):
            advantages[i] = x
    return torch.tensor(advantages, dtype=torch.float64)


def deviation(x: list[float], ddof: int = 1) -> float:
    if len(x) <= ddof or len(set(x)) == 1:
        return 0.0
    return (statistics.stdev if ddof else statistics.pstdev)(x)


def centred(x: list[float]) -> list[float]:
    mean = math.fsum(x) / len(x)
    return [0.0 if len(set(x)) == 1 else v - mean for v in x]


def against_others(x: list[float]) -> list[float]:
    if len(x) == 1:
        return [0.0]
    return [0.0 if len(set(x)) == 1 else v - (math.fsum(x) - v) / (len(x) - 1) for v in x]


def deviations_of_others(x: list[float], ddof: int = 1) -> list[float]:
    return [deviation(x[:i] + x[i + 1 :], ddof) for i in range(len(x))]


FORMULAS: dict[str, tuple[Formula, dict[str, Any]]] = {
    "verl, ROLL, slime": (lambda g, _: [c / (deviation(g) + 1e-6) for c in centred(g)], {}),
    "TRL": (lambda g, _: [c / (deviation(g) + 1e-4) for c in centred(g)], {"eps": 1e-4}),
    "TRL, batch": (
        lambda g, a: [c / (deviation(a) + 1e-4) for c in centred(g)],
        {"eps": 1e-4, "scale": "batch"},
    ),
    "Dr. GRPO": (lambda g, _: centred(g), {"scale": "none"}),
    "RLOO": (
        lambda g, _: [v - (math.fsum(g) - v) / (len(g) - 1) if len(set(g)) > 1 else 0.0 for v in g],
        {"baseline": "leave-one-out", "scale": "none"},
    ),
    "NeMo RL": (
        lambda g, _: [
            c / (s + 1e-6) if s else c for c, s in zip(against_others(g), deviations_of_others(g), strict=True)
        ],
        {"baseline": "leave-one-out", "scale": "leave-one-out"},
    ),
    "population of the others": (
        lambda g, _: [c / s if s else c for c, s in zip(centred(g), deviations_of_others(g, 0), strict=True)],
        {"scale": "leave-one-out", "ddof": 0, "eps": 0.0},
    ),
    "z-scores": (lambda g, _: [c / (deviation(g) or 1) for c in centred(g)], {"eps": 0.0}),
    "StateSet": (lambda g, _: [c / (deviation(g, 0) or 1) for c in centred(g)], {"ddof": 0, "eps": 0.0}),
    "REINFORCE": (lambda g, _: g, {"baseline": "none", "scale": "none"}),
    "whole batch": (
        lambda g, a: [v / deviation(a, 0) if deviation(a, 0) else v for v in g],
        {"baseline": "none", "scale": "batch", "ddof": 0, "eps": 0.0},
    ),
    "no baseline": (lambda g, _: [v / (deviation(g) + 1e-6 if deviation(g) else 1) for v in g], {"baseline": "none"}),
}


def close(ours: Tensor, truth: Tensor) -> None:
    scale = max(truth.abs().max().item() if truth.numel() else 0.0, 1.0)
    torch.testing.assert_close(ours, truth, rtol=0, atol=FLOAT64_RELATIVE * scale)


@pytest.mark.parametrize("name", FORMULAS)
@given(REWARDS, st.data())
def test_uneven_groups_in_any_order_follow_the_formula(name: str, rewards: list[float], data: st.DataObject) -> None:
    formula, options = FORMULAS[name]
    ids = data.draw(st.lists(st.sampled_from([7, -2, 2**40, 0]), min_size=len(rewards), max_size=len(rewards)))
    ours = group_advantages(float64(rewards), group_ids=torch.tensor(ids), **options)
    close(ours, by_group(formula, rewards, ids))


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
@pytest.mark.parametrize("scale", adv.SCALES)
def test_advantages_of_single_and_equal_rewards_are_exactly_zero(baseline: str, scale: str) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 5.0, -1e30, -1e30])
    ids = torch.tensor([0, 0, 0, 1, 2, 3, 3])
    ours = group_advantages(rewards, group_ids=ids, baseline=baseline, scale=scale, eps=0.0, ddof=1)
    assert not ours.any() and not ours.isnan().any()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_outliers_follow_the_formula(name: str, sign: int, dtype: torch.dtype) -> None:
    """One answer's very low or very high reward must not cost digits of the others' standard deviation."""
    rewards = 0.3 * torch.randn(26, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[[3, 9, 12, 20, 21]] = torch.tensor([1e7, -1e8, 1e7, 1e8, -1e4], dtype=torch.float64)
    rewards = sign * rewards.to(dtype)
    ids = [0] * 8 + [1] * 8 + [2] * 10
    formula, options = FORMULAS[name]
    expected = by_group(formula, rewards.tolist(), ids)
    relative = ADVANTAGE_RELATIVE if dtype == torch.float32 else FLOAT64_RELATIVE
    ours = group_advantages(rewards, group_ids=torch.tensor(ids), **options)
    torch.testing.assert_close(ours.double(), expected, rtol=relative, atol=0)


@pytest.mark.parametrize("name", ["TRL", "NeMo RL", "StateSet"])
@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -3.0]), min_size=3, max_size=3), min_size=1, max_size=12),
    data=st.data(),
)
def test_several_rewards_are_normalized_then_added(name: str, rows: list[list[float]], data: st.DataObject) -> None:
    """arXiv 2601.05242, and TRL 1.16's `normalize_then_sum` with its eps of 1e-4."""
    formula, options = FORMULAS[name]
    ids = data.draw(st.lists(st.sampled_from([3, -1, 8]), min_size=len(rows), max_size=len(rows)))
    weights = [1.0, 0.5, -2.0]
    sums = torch.zeros(len(rows), dtype=torch.float64)
    for k, weight in enumerate(weights):
        sums += weight * by_group(formula, [row[k] for row in rows], ids)
    std = deviation(sums.tolist())
    expected = (sums - sums.mean()) / (std + options.get("eps", 1e-6)) if std > 1e-9 else torch.zeros_like(sums)
    ours = gdpo_advantages(float64(rows), group_ids=torch.tensor(ids), weights=weights, **options)
    torch.testing.assert_close(ours, expected, rtol=GDPO_RELATIVE, atol=GDPO_ABSOLUTE)


def test_rewards_that_are_equal_or_cancel_have_gdpo_advantages_of_zero() -> None:
    assert not gdpo_advantages(torch.ones(4, 2), 2).any()
    x = torch.tensor([0.0, 0.25, 1.0, 0.75, 0.5, 0.25])
    assert gdpo_advantages(torch.stack([x, 1 - x], 1), 3).abs().max() < 1e-6  # they cancel, up to rounding in fp64
    assert gdpo_advantages(torch.ones(0, 2), 2).shape == (0,)


@given(REWARDS, st.booleans(), st.booleans())
def test_normalized_rewards(rewards: list[float], shift: bool, scale: bool) -> None:
    x = float64(rewards)

    def formula(group: list[float], all_rewards: list[float]) -> list[float]:
        shifted = centred(group) if shift else group
        return [v / (deviation(group) + 1e-6) if scale and deviation(group) else v for v in shifted]

    ids = [i % 3 for i in range(len(rewards))]
    ours = normalize_rewards(x, "group", group_ids=torch.tensor(ids), shift=shift, scale=scale)
    close(ours, by_group(formula, rewards, ids))
    if len(set(rewards)) > 1:
        ours = normalize_rewards(x, "batch", shift=shift, scale=scale)
        close(ours, by_group(formula, rewards, [0] * len(rewards)))


@given(st.lists(REWARDS, min_size=1, max_size=5))
def test_running_moments_are_those_of_everything_so_far(batches: list[list[float]]) -> None:
    state = RunningMoments()
    so_far = []
    for rewards in batches:
        so_far += rewards
        ours = normalize_rewards(float64(rewards), state)
        assert state.count == len(so_far) and state.mean is not None
        close(state.mean, torch.tensor(math.fsum(so_far) / len(so_far), dtype=torch.float64))
        assert state.std.item() == pytest.approx(deviation(so_far), abs=1e-9)
        if deviation(so_far) > 0:
            truth = [(v - math.fsum(so_far) / len(so_far)) / (deviation(so_far) + 1e-6) for v in rewards]
            torch.testing.assert_close(ours, torch.tensor(truth, dtype=torch.float64))


def test_whitened_advantages_weigh_by_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    advantages = torch.tensor([1.0, -2.0, 99.0]).double()
    tokens = [1.0, 1.0, 1.0, -2.0]
    mean = statistics.mean(tokens)
    var = statistics.variance(tokens)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[0, :3], expected[1, 0] = (1 - mean) / math.sqrt(var + 1e-8), (-2 - mean) / math.sqrt(var + 1e-8)
    close(whitened(advantages, mask), expected)
    for same in (advantages[:, None], advantages[:, None].expand(3, 4)):
        close(whitened(same, mask), expected)
    scaled = whitened(advantages, mask, shift=False)
    close(scaled, torch.where(mask != 0, expected + mean, 0))  # as ROLL's and verl's shift_mean=False
    bad = torch.full((3, 4), torch.nan).double().masked_scatter(mask != 0, torch.tensor(tokens).double())
    close(whitened(bad, mask), expected)  # masked tokens are not read
    assert not whitened(advantages, torch.zeros(3, 4)).any()
    assert whitened(torch.ones(2), torch.ones(2, 3), eps=0.0).eq(0).all()
    assert whitened(torch.ones(1), torch.tensor([[1, 0]])).eq(0).all()  # one token has no deviation
    assert whitened(torch.ones(2), torch.ones(2, 3), shift=False).eq(1).all()


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("clip", [None, 0.1])  # many terms of the KL are larger
@pytest.mark.parametrize("has_kl", [True, False], ids=["KL", "no KL"])
def test_returns_of_tokens(gamma: float, clip: float | None, has_kl: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 11, generator=rng) > 0.3
    mask[3] = False
    kl, rewards = torch.randn(5, 11, generator=rng).double(), torch.randn(5, generator=rng).double()
    kl[~mask] = torch.nan
    options: dict[str, Any] = {"kl": kl, "kl_coef": 0.2} if has_kl else {}
    ours = token_returns(rewards, mask, gamma=gamma, reward_clip=clip, **options)
    expected = torch.zeros(5, 11, dtype=torch.float64)
    for i in range(5):
        tokens = mask[i].nonzero()[:, 0].tolist()
        later = 0.0
        for t in reversed(range(11)):
            reward = -0.2 * kl[i, t].item() if has_kl and mask[i, t] else 0.0
            reward += rewards[i].item() if tokens and t == tokens[-1] else 0.0
            later = (reward if clip is None else max(min(reward, clip), -clip)) + gamma * later
            expected[i, t] = later if mask[i, t] else 0.0
    close(ours, expected)


def test_turns() -> None:
    ids = torch.tensor([[0, 0, -1, 1, 2], [5, 1, 1, 0, -100]])
    ours = turn_advantages(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), ids)
    assert torch.equal(ours, torch.tensor([[1.0, 1.0, 0.0, 2.0, 3.0], [0.0, 5.0, 5.0, 4.0, 0.0]]))
    offsets = torch.tensor([0, 2, 2, 7])  # the second sequence is empty
    packed = turn_advantages(
        torch.tensor([[1.0, 2.0, 3.0], [7.0, 8.0, 9.0], [4.0, 5.0, 6.0]]),
        torch.tensor([2, -1, 5, 1, 1, 0, -100]),
        cu_seqlens=offsets,
    )
    assert torch.equal(packed, torch.tensor([3.0, 0.0, 0.0, 5.0, 5.0, 4.0, 0.0]))


def test_empty_batches() -> None:
    empty = torch.zeros(0)
    for ours in (
        group_advantages(empty, 4),
        normalize_rewards(empty, "batch"),
        normalize_rewards(empty, RunningMoments()),
    ):
        assert ours.shape == (0,)
    assert token_returns(empty, torch.zeros(0, 3)).shape == whitened(empty, torch.zeros(0, 3)).shape == (0, 3)
    assert token_returns(torch.ones(2), torch.zeros(2, 0)).shape == (2, 0)


def test_equal_rewards_of_a_batch_are_not_divided() -> None:
    """The floating-point mean of three rewards of 0.1 is not 0.1, so their computed deviation would not be 0."""
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, 3, scale="batch", baseline="none"), rewards)
    for other in (5.0, -5.0):  # whose advantage is not divided by the deviation of the others
        group = torch.cat([rewards, rewards.new_tensor([other])])
        ours = group_advantages(group, 4, scale="leave-one-out", baseline="none")
        assert ours[3] == other


def test_deviations_of_large_fp32_values_match_fp64() -> None:
    x = 10_000 + torch.randn(64, generator=torch.Generator().manual_seed(0)) / 50
    mean, std = x.double().mean(), x.double().std()
    moments = RunningMoments()
    moments.update(x)
    assert moments.mean == mean and moments.variance == pytest.approx(x.double().var(correction=0).item(), rel=1e-9)
    scaled = group_advantages(x, 64, scale="batch", baseline="none", eps=0.0)
    torch.testing.assert_close(scaled.double(), x.double() / std, rtol=ADVANTAGE_RELATIVE, atol=0)
    white = whitened(x, torch.ones(64, 1), eps=0.0)[:, 0].double()
    truth = (x.double() - mean) / std
    assert (white - truth).norm() <= ADVANTAGE_RELATIVE * truth.norm()
    small = (x - 10_000).bfloat16()
    for of_groups in (group_advantages, lambda x, size: normalize_rewards(x, "group", group_size=size)):
        ours = of_groups(small, 8)
        assert ours.dtype == torch.float32 and torch.equal(ours, of_groups(small.float(), 8))


MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_unused_values_may_be_anything() -> None:
    bad = torch.tensor([[1.0, 1.0, math.inf], [1.0, 2.0, 3.0]])
    assert whitened(bad, MASK).isfinite().all()
    assert token_returns(torch.ones(2), MASK, kl=bad, kl_coef=0.1).isfinite().all()
    assert turn_advantages(torch.tensor([[1.0, math.nan]]), torch.tensor([[0, 0, -1]])).tolist() == [[1.0, 1.0, 0.0]]


def test_bad_rewards_leave_running_moments_unchanged() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="rewards must be finite"):
        moments.update(torch.tensor([math.nan]))
    moments.update(torch.zeros(0))
    assert moments.count == 2 and moments.mean == 1.5
