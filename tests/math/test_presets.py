"""Compare every preset with the loss of the paper or trainer that it is named after, written here from that source."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.device import on_device, run_policy
from helpers.marks import triton_is_slow
from helpers.other_trainers import PRESETS, Rollout, assert_agree, ours, rollout
from torch import Tensor

from gspo_kernels import Objective, policy_loss, validation

Formula = Callable[[Tensor, Rollout, Objective], Tensor]


def sequence_ratio(lp: Tensor, b: Rollout) -> Tensor:
    """Return (pi(y) / pi_old(y)) ^ (1 / |y|) of each answer y, [B] (arXiv 2507.18071, eq. 7)."""
    m = b.double_mask()
    return (((lp - b.old) * m).sum(1) / m.sum(1)).exp()


def clipped_loss(ratio: Tensor, advantages: Tensor, o: Objective) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * advantages)


def gspo_token(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2507.18071, eq. 13-14."""
    s = sequence_ratio(lp, b).detach()[:, None] * (lp - lp.detach()).exp()
    m = b.double_mask()
    return ((clipped_loss(s, b.advantages[:, None], o) * m).sum(1) / m.sum(1)).mean()


def token_losses(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    return clipped_loss((lp - b.old).exp(), b.advantages[:, None], o) * b.double_mask()


def cispo(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2506.13585 with no lower bound, as in TRL: REINFORCE with a capped importance weight."""
    weight = (lp - b.old).exp().clamp(max=1 + o.clip_high).detach()
    return (-weight * b.advantages[:, None] * lp * b.double_mask()).sum() / b.double_mask().sum()


def sapo(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2511.20347: 4 / tau sigmoid(tau (r - 1)). tau is 1.0 for positive advantages and 1.05 for negative ones."""
    tau = torch.tensor([1.05, 1.0], dtype=lp.dtype)[(b.advantages > 0).long()][:, None]
    gate = 4 / tau / (1 + (-tau * ((lp - b.old).exp() - 1)).exp())
    m = b.double_mask()
    return ((-gate * b.advantages[:, None] * m).sum(1) / m.sum(1)).mean()


def gmpo(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2507.20673: a geometric mean of token ratios, each bounded in log space on the side of the advantage."""
    sign = b.advantages.sign()[:, None]
    r = lp - b.old
    r = sign * torch.min(sign * r, sign * r.clamp(-o.clip_low, o.clip_high))
    m = b.double_mask()
    return (-b.advantages * ((r * m).sum(1) / m.sum(1)).exp()).mean()


# Divergences of the distributions (p, 1 - p) and (q, 1 - q)
BERNOULLI: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dppo_tv": lambda p, q: (p - q).abs(),
    "dppo_kl": lambda p, q: q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log(),
}


def dppo(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2602.04879: -s A over the tokens in the trust region, divided by the number of all tokens."""
    p, q = lp.detach().exp(), b.old.exp()
    d = BERNOULLI[o.surrogate](p, q)
    positive, negative = b.advantages[:, None] > 0, b.advantages[:, None] < 0
    inside = ~(positive & (p > q) & (d > o.clip_high)) & ~(negative & (p < q) & (d > o.clip_low))
    m = b.double_mask()
    return -(inside * (lp - b.old).exp() * b.advantages[:, None] * m).sum() / m.sum()


def vespo(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2602.10693 with the bounds and the aggregation of TRL: phi(w) = w^k exp(lambda (1 - w))."""
    m = b.double_mask()
    w = ((lp - b.old).detach().clamp(-20, 20) * m).sum(1).exp().clamp(1e-8, math.exp(20))
    phi = torch.where(b.advantages >= 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())
    return -(phi * b.advantages * (lp * m).sum(1)).sum() / m.sum()


def topr(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
    """arXiv 2503.14286, eq. 8, with pi(y) / mu(y) of the whole answer y, averaged over answers."""
    m = b.double_mask()
    tapered = ((lp - b.old).detach() * m).sum(1).exp().clamp(0, 1)
    return (-torch.where(b.advantages >= 0, 1, tapered) * b.advantages * (lp * m).sum(1)).mean()


FORMULAS: dict[str, Formula] = {
    # arXiv 2507.18071, eq. 5
    "gspo": lambda lp, b, o: clipped_loss(sequence_ratio(lp, b), b.advantages, o).mean(),
    "gspo-token": gspo_token,
    # arXiv 2402.03300 without KL: a mean over each answer, then over answers
    "grpo": lambda lp, b, o: (token_losses(lp, b, o).sum(1) / b.double_mask().sum(1)).mean(),
    # arXiv 2503.14476: a mean over the tokens of all answers. TRL's BNPO is the same per micro-batch.
    "dapo": lambda lp, b, o: token_losses(lp, b, o).sum() / b.double_mask().sum(),
    "bnpo": lambda lp, b, o: token_losses(lp, b, o).sum() / b.double_mask().sum(),
    # arXiv 2503.20783 as in TRL: sum / (answers x longest completion)
    "dr_grpo": lambda lp, b, o: token_losses(lp, b, o).sum() / (len(b.advantages) * 32),
    # arXiv 2602.05261: GSPO's loss of each answer times its length
    "luspo": lambda lp, b, o: (clipped_loss(sequence_ratio(lp, b), b.advantages, o) * b.double_mask().sum(1)).mean(),
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    # R. J. Williams (1992) with a baseline: -A log p(answer), averaged over answers
    "reinforce": lambda lp, b, o: (-b.advantages * (lp * b.double_mask()).sum(1)).mean(),
    "dppo_tv": dppo,
    "dppo_kl": dppo,
    "vespo": vespo,
    "topr": topr,
}


def by_autograd(formula: Formula, batch: Rollout, o: Objective) -> tuple[Tensor, Tensor]:
    lp = batch.log_probs.clone().requires_grad_()
    loss = formula(lp, batch, o)
    (gradient,) = torch.autograd.grad(loss, lp)
    return loss.detach(), gradient


def test_every_preset_has_a_formula() -> None:
    assert FORMULAS.keys() == PRESETS.keys()


PPO = (0.2, 0.2)
WINDOWS = {  # clip_low and clip_high of each preset that clips
    "gspo": (3e-4, 4e-4), "gspo-token": (3e-4, 4e-4), "luspo": (2e-3, 2.5e-3), "cispo": (1.0, 4.0), "gmpo": (0.4, 0.4),
    "grpo": PPO, "bnpo": PPO, "dr_grpo": PPO, "dapo": (0.2, 0.28), "dppo_tv": PPO, "dppo_kl": (0.05, 0.05),
}  # fmt: skip  # a table


@pytest.mark.parametrize("name", WINDOWS)
def test_a_preset_clips_where_its_source_does(name: str) -> None:
    o = Objective.preset(name, length_norm=8)  # which dr_grpo requires
    assert (o.clip_low, o.clip_high) == WINDOWS[name]


@on_device
@pytest.mark.parametrize("name", PRESETS)
@triton_is_slow
def test_a_preset_is_the_formula_of_its_source(name: str, backend: str) -> None:
    o = Objective.preset(name, **PRESETS[name])
    batch = rollout(o)
    assert_agree(batch, ours(batch, o, backend), *by_autograd(FORMULAS[name], batch, o))


@on_device
def test_the_default_loss_of_prime_rl_is_dppo_tv_with_a_squared_log_ratio(backend: str) -> None:
    """prime-rl at 559b447, `default_loss_fn`: kl_tau times the squared log-ratio is kl_coef = 2 kl_tau times k2."""
    kl_tau = 1e-3
    o = Objective.preset("dppo_tv", kl_coef=2 * kl_tau, kl_estimator="k2", kl_aggregation="token-mean")
    batch = rollout(o, seed=2)
    batch = replace(batch, ref=batch.old)

    def formula(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
        log_ratio = lp - b.old
        moved = lp.exp() - b.old.exp()
        masked = torch.where(b.advantages[:, None] > 0, moved > 0.2, moved < -0.2)
        per_token = -(~masked * b.advantages[:, None] * log_ratio.exp()) + kl_tau * log_ratio**2
        return per_token[b.mask].sum() / 301

    computed = ours(batch, o, backend, normalizer=301)
    assert_agree(batch, computed, *by_autograd(formula, batch, o))


@on_device
@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl"])
def test_dppo_with_dual_clip_bounds_the_factor_of_the_gradient(surrogate: str, backend: str) -> None:
    """Our gradient matches the gradient of verl's loss, -min(s, c) A log p, where only log p is differentiated."""
    o = Objective.preset(surrogate, clip_low=0.3, clip_high=0.4, dual_clip=1.5)
    batch = rollout(o, seed=3)
    ratio = (batch.log_probs - batch.old).exp()

    log_probs = batch.log_probs.clone().requires_grad_()
    (kept,) = torch.autograd.grad(dppo(log_probs, batch, o), log_probs)
    truncated = (ratio > 1.5) & (kept != 0)
    assert all((truncated & (sign * batch.advantages[:, None] > 0)).any() for sign in (1, -1))
    expected = kept * (1.5 / ratio).clamp(max=1)
    computed = ours(batch, o, backend)
    # The value of the loss is the sum of its gradient, because d(s A) / d(log p) = s A.
    assert_agree(batch, computed, expected.sum(), expected)
    unbounded, _ = ours(batch, replace(o, dual_clip=None), backend)
    assert computed[0].metrics["token_clip_fraction"] == unbounded.metrics["token_clip_fraction"]


KL: dict[str, Callable[[Tensor, Rollout], Tensor]] = {
    "k1": lambda lp, b: lp - b.ref,
    "abs": lambda lp, b: (lp - b.ref).abs(),
    "k2": lambda lp, b: (lp - b.ref) ** 2 / 2,
    "k3": lambda lp, b: (b.ref - lp).exp() - (b.ref - lp) - 1,
    # As in verl's core_algos.kl_penalty, "+" means the value of the estimator with the gradient of k2.
    "k1+": lambda lp, b: (lp - b.ref).detach() + (lp.detach() - b.ref) * (lp - lp.detach()),
    "k3+": lambda lp, b: KL["k3"](lp.detach(), b) + (lp.detach() - b.ref) * (lp - lp.detach()),
    # arXiv 2512.02556
    "unbiased": lambda lp, b: (lp - b.old).exp() * KL["k3"](lp, b),
}


@on_device
@pytest.mark.parametrize("estimator", KL)
@pytest.mark.parametrize("preset", ["gspo", "grpo", "gmpo"])
@pytest.mark.parametrize("aggregation", [None, "token-mean"])
@triton_is_slow
def test_every_estimator_of_kl_is_its_formula(
    estimator: str, preset: str, aggregation: str | None, backend: str
) -> None:
    o = Objective.preset(preset, kl_coef=0.3, kl_estimator=estimator, kl_aggregation=aggregation)
    batch = rollout(o)

    def formula(lp: Tensor, b: Rollout, o: Objective) -> Tensor:
        m = b.double_mask()
        kl = KL[estimator](lp, b) * m
        mean = (kl.sum(1) / m.sum(1)).mean() if aggregation is None else kl.sum() / m.sum()
        return FORMULAS[preset](lp, b, o) + 0.3 * mean

    assert_agree(batch, ours(batch, o, backend), *by_autograd(formula, batch, o))


@on_device
@pytest.mark.parametrize(
    "preset", ["gspo", "grpo", "cispo", "sapo", "reinforce", "gmpo", "dppo_tv", "dppo_kl", "vespo", "topr"]
)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("extreme", [200.0, -200.0, float("inf"), float("nan")])
@triton_is_slow
def test_an_infinite_ratio_is_clipped_or_reaches_the_loss(
    preset: str, advantage: float, extreme: float, backend: str
) -> None:
    """exp(200) is inf in float32. Where a bound clips this ratio, the loss is finite. A NaN ratio reaches the loss."""
    o = Objective.preset(preset)
    batch = rollout(Objective.preset("sapo"))
    log_probs = batch.log_probs.float()
    old = batch.old.float()
    advantages = batch.advantages.abs() + 0.1
    log_probs[0, 0], old[0, 0], advantages[0] = -250.0, -250.0 - extreme, advantage
    batch = replace(batch, old=old, log_probs=log_probs, advantages=advantages)
    out, gradient = ours(batch, o, backend)
    unbounded = preset == "gmpo" and extreme * advantage < -100  # gmpo has one bound per sign
    unbounded |= preset in ("gspo", "grpo") and extreme > 100 and advantage < 0
    # Both probabilities are 0 in float32, so the divergence is 0 and the ratio inf.
    unbounded |= preset.startswith("dppo") and extreme > 100 and advantage != 0
    if extreme != extreme:
        assert all(out.metrics[f"ratio_{name}"].isnan() for name in ("mean", "min", "max"))
        ignored = preset == "reinforce" or (preset == "topr" and advantage > 0)  # there is no ratio in their losses
        assert out.loss.isnan() == (advantage != 0 and not ignored)
    elif not unbounded:
        assert out.loss.isfinite() and gradient.isfinite().all()
    if not advantage:
        assert not gradient[0].any()
    assert gradient[1:].isfinite().all() and gradient[1:].any()


@on_device
@pytest.mark.parametrize("estimator", ["unbiased", "k3-ratio"])
def test_a_nan_ratio_reaches_the_loss_where_the_kl_is_zero(estimator: str, backend: str) -> None:
    kl = {"kl_estimator": "unbiased"} if estimator == "unbiased" else {"kl_ratio_factor": True}
    lp = -torch.ones(1, 2)
    for old_log_prob, loss_is_nan in ((float("nan"), True), (-float("inf"), False)):
        old = torch.tensor([[old_log_prob, -1.0]])
        o = Objective.preset("reinforce", kl_coef=0.1, **kl)
        options: dict[str, Any] = {"old_log_probs": old, "ref_log_probs": lp, "objective": o, "backend": backend}
        out, gradient = run_policy(lp, torch.zeros(1), **options)
        assert out.loss.isnan() == loss_is_nan
        assert loss_is_nan or not gradient.any()


@on_device
@pytest.mark.parametrize("estimator", KL)
@pytest.mark.parametrize("d", [float("nan"), float("inf")])
def test_both_backends_have_the_same_slope_of_a_non_finite_kl(estimator: str, d: float) -> None:
    o = Objective.preset("grpo", kl_coef=0.1, kl_estimator=estimator)
    ref = torch.tensor([[-1 - d, -1.0]])
    results = []
    for backend in ("torch", "triton"):
        out, gradient = run_policy(-torch.ones(1, 2), torch.zeros(1), ref_log_probs=ref, objective=o, backend=backend)
        results.append((out.loss.detach(), gradient))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        torch.testing.assert_close(x, y, equal_nan=True)


@pytest.fixture
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_warned", set())


WARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "LUSPO": ("gspo-token", {"aggregation": "seq-mean-token-sum"}),  # ratios weighted by length
    "clip_low=0.2, clip_high=0.27": ("luspo", {"clip_low": 0.2, "clip_high": 0.27}),  # a window for tokens
    "clip_low=0.04, clip_high=0.0004": ("gspo", {"clip_low": 0.04}),
    "clip_low=0.0003, clip_high=0.04": ("gspo", {"clip_high": 0.04}),
    "aggregation='token-mean' weights": ("gspo", {"surrogate": "none", "aggregation": "token-mean"}),
}


@pytest.mark.parametrize("text", WARNED)
def test_unusual_settings_of_sequence_ratios_are_warned_of_once(text: str, no_warnings_yet: None) -> None:
    preset, changes = WARNED[text]
    with pytest.warns(UserWarning, match=text) as caught:
        for _ in range(2):
            Objective.preset(preset, **changes)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_warning_names_the_line_that_makes_the_objective(no_warnings_yet: None) -> None:
    with pytest.warns(UserWarning, match="LUSPO") as caught:
        Objective(aggregation="token-mean")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("packed", [False, True])
def test_advantages_that_differ_inside_a_sequence_are_warned_of_once(packed: bool, no_warnings_yet: None) -> None:
    log_probs = torch.full((2, 3), -1.0)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    per_turn = torch.tensor([[1.0, 1.0, 5.0], [1.0, 1.0, -1.0]])
    offsets = {"cu_seqlens": torch.tensor([0, 3, 6])} if packed else {}
    flat = (lambda x: x.flatten()) if packed else (lambda x: x)

    def loss(advantages: Tensor, **changes: Any) -> None:
        options: dict[str, Any] = {"objective": Objective(**changes), **offsets}
        policy_loss(flat(log_probs), flat(advantages), mask=flat(mask), **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other in ({"ratio": "sequence-token"}, {"ratio": "token"}, {"surrogate": "cispo", "ratio": "sequence"}):
            loss(per_turn, **other)
        loss(torch.where(mask, per_turn[:, :1], 9.0))  # only masked tokens differ
        if not packed:
            torch.compile(loss, fullgraph=True, backend="eager")(per_turn)  # which reads no values
    with pytest.warns(UserWarning, match="policy_loss: advantages differ inside a sequence.*sequence-token") as caught:
        for _ in range(2):
            loss(per_turn)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_intended_settings_do_not_warn(no_warnings_yet: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, changes in PRESETS.items():
            o = Objective.preset(name, **changes)
            ours(rollout(o), o, "torch")  # the operator's copy of the objective does not warn either
        Objective(clip_low=0.039, clip_high=0.039)
        replace(Objective.preset("luspo"), kl_coef=0.1)
        objective = Objective.preset("luspo", clip_low=1e-3, kl_coef=0.1)
        lp = torch.full((1, 2), -1.0)
        policy_loss(lp, torch.ones(1), ref_log_probs=lp, kl_log_probs=lp, objective=objective)
    assert Objective.from_text(Objective(clip_low=np.float64(0.01)).text).clip_low == 0.01
