"""Compare our policy losses, KL estimators, advantages and rollout weights with verl's.

verl needs an older transformers than the one we test with, so `make test-trainers` runs this in a separate environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.other_trainers import Rollout, assert_agree, ours, rollout
from tolerance import (
    KEPT_VALUE_ABSOLUTE,
    KEPT_VALUE_RELATIVE,
    PARITY_GRADIENT_RELATIVE,
)
from torch import Tensor

from gspo_kernels import Objective, validation
from gspo_kernels.sampler_mismatch import importance_weights

pytest.importorskip("verl")
from tensordict import TensorDict
from verl.trainer.distillation.fsdp.losses import _chunked_topk_log_probs as verl_topk
from verl.trainer.distillation.fsdp.losses import kl_divergence
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig, DistillationLossConfig

from gspo_kernels.integrations.verl import gspo_policy_loss
from gspo_kernels.integrations.verl.distillation import warn_of_detached_divergence
from gspo_kernels.integrations.verl.engine import _predicts_response
from gspo_kernels.integrations.verl.megatron import linear_topk_log_probs

# An objective, verl's name of the loss, and its aggregation.
SEQUENCES = "seq-mean-token-mean"
CASES: dict[str, tuple[Objective, str, str]] = {
    "gspo": (Objective(ratio="sequence-token"), "gspo", SEQUENCES),
    "gspo, default token-mean": (
        Objective.preset("luspo", ratio="sequence-token", clip_low=3e-4, clip_high=4e-4, aggregation="token-mean"),
        "gspo",
        "token-mean",
    ),
    "ppo": (Objective.preset("grpo", dual_clip=3.0), "vanilla", SEQUENCES),
    "dapo": (Objective.preset("dapo", dual_clip=3.0), "vanilla", "token-mean"),
    "token sum": (
        Objective.preset("grpo", dual_clip=3.0, aggregation="seq-mean-token-sum"),
        "vanilla",
        "seq-mean-token-sum",
    ),
    "dr_grpo": (Objective.preset("dr_grpo", dual_clip=3.0, length_norm=32), "vanilla", "seq-mean-token-sum-norm"),
    "cispo": (Objective.preset("cispo", clip_low=0.2, clip_high=0.28), "cispo", "token-mean"),
    "sapo": (Objective.preset("sapo"), "sapo", SEQUENCES),
    "gmpo": (Objective.preset("gmpo"), "geo_mean", "token-mean"),
    "reinforce": (Objective.preset("reinforce"), "gpg", "seq-mean-token-sum"),
}


def config(objective: Objective, aggregation: str, **batch: Any) -> ActorConfig:
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=objective.clip_low,
        clip_ratio_high=objective.clip_high,
        clip_ratio_c=objective.dual_clip or 3.0,
        loss_agg_mode=aggregation,
        tau_pos=objective.sapo_temperature_pos,
        tau_neg=objective.sapo_temperature_neg,
    )
    actor.global_batch_info.update({"loss_scale_factor": 32, **batch})
    return actor


def verl_loss(
    b: Rollout, o: Objective, loss: str, aggregation: str, **batch: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    log_probs = b.log_probs.clone().requires_grad_()
    value, metrics = core_algos.get_policy_loss_fn(loss)(
        old_log_prob=b.old,
        log_prob=log_probs,
        advantages=b.advantages[:, None].expand_as(b.old),
        response_mask=b.double_mask(),
        loss_agg_mode=aggregation,
        config=config(o, aggregation, **batch),
        rollout_is_weights=b.weights,
    )
    (gradient,) = torch.autograd.grad(value, log_probs)
    return value.detach(), gradient, metrics


@pytest.mark.parametrize(
    ("name", "weights"), [(name, x) for name in CASES for x in (False, True) if not (x and name == "gmpo")]
)
def test_loss_and_gradient_equal_verls(name: str, weights: bool, backend: str) -> None:
    """With `weights`, verl's rollout_is_weights are our token_weights."""
    objective, loss, aggregation = CASES[name]
    batch = rollout(objective, weights=weights)
    value, gradient, metrics = verl_loss(batch, objective, loss, aggregation)
    computed = ours(batch, objective, backend)
    assert_agree(batch, computed, value, gradient)
    if loss == "gspo":  # verl's cispo also counts tokens of advantage 0
        assert metrics["actor/pg_clipfrac"] == pytest.approx(
            computed[0].metrics["token_clip_fraction"].item(), abs=1e-6
        )
    if "actor/ppo_kl" in metrics:
        assert metrics["actor/ppo_kl"] == pytest.approx(computed[0].metrics["kl_to_old"].item(), abs=1e-6)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [
        *((x, 32) for x in (SEQUENCES, "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")),
        ("seq-mean-token-sum-norm", None),  # verl's default: the width of the responses
    ],
)
def test_our_policy_loss_equals_that_of_verls_gspo(aggregation: str, scale: int | None, weights: bool) -> None:
    objective = Objective(ratio="sequence-token")
    batch = rollout(objective, weights=weights)
    (value, gradient, _), (expected, expected_gradient, _) = (
        verl_loss(batch, objective, name, aggregation, loss_scale_factor=scale) for name in ("gspo_kernels", "gspo")
    )
    assert_agree(batch, (SimpleNamespace(loss=value), gradient), expected, expected_gradient)
    assert not gradient[~batch.mask].any() and not expected_gradient[~batch.mask].any()


@pytest.mark.parametrize("bound", [3.0, 1.5])
@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("weights", [False, True])
def test_gradients_of_dppo_equal_verls(loss: str, bound: float, weights: bool, backend: str) -> None:
    """verl multiplies a constant ratio by the log-prob. So its loss has another value, but the same gradient."""
    objective = Objective.preset(loss, dual_clip=bound)
    batch = rollout(objective, seed=4, weights=weights)
    _, gradient, metrics = verl_loss(batch, objective, loss, "token-mean")
    out, computed = ours(batch, objective, backend)
    torch.testing.assert_close(computed, gradient, rtol=0, atol=PARITY_GRADIENT_RELATIVE * gradient.norm().item())
    _, unbounded = ours(batch, replace(objective, dual_clip=None), backend)
    assert (unbounded - gradient).norm() > 0.01 * gradient.norm()  # the bound matters
    # verl also counts tokens with advantage 0 as clipped.
    zero = (batch.advantages == 0)[:, None] & batch.mask
    p, q = batch.log_probs.exp(), batch.old.exp()
    divergence = q - p if loss == "dppo_tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    counted = (zero & (p < q) & (divergence > objective.clip_low)).sum() / batch.mask.sum()
    ours_of_both = out.metrics["token_clip_fraction"].item() + counted.item()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(ours_of_both, abs=1e-6)


@pytest.mark.parametrize(("option", "level"), [("token", "token"), ("seq_sum", "sequence"), ("seq_mean", "geometric")])
def test_gates_equal_verls_rejection_masks(option: str, level: str) -> None:
    """verl's thresholds bound mu / pi, so ours are their inverses."""
    batch = rollout(Objective.preset("grpo"))
    log_ratio = batch.log_probs - batch.old
    expected, _ = compute_rollout_rejection_mask(log_ratio, batch.double_mask(), f"{option}_k1", "0.8_1.1")
    gate = importance_weights(
        batch.log_probs, batch.old, batch.mask, level=level, mode="gate", low=1 / 1.1, high=1 / 0.8
    )
    assert torch.equal(gate.weights, expected) and 0 < gate.metrics["bound_share"] < 1


def of_two_answers(aggregation: str = SEQUENCES, **settings: Any) -> Callable[..., Tensor]:
    """Return a function that computes the gradient of our policy loss for log-ratios of -3.5e-4 and 3.5e-4."""
    actor = config(Objective(), aggregation)
    vars(actor).update(settings)
    log_probs = torch.tensor([[-3.5e-4], [3.5e-4]]).repeat(1, 5).requires_grad_()
    advantages = torch.tensor([[-1.0], [1.0]]).expand(2, 5)

    def gradient(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        loss, _ = gspo_policy_loss(torch.zeros(2, 5), log_probs.to(dtype), advantages, mask, aggregation, actor)
        return torch.autograd.grad(loss, log_probs)[0]

    return gradient


@pytest.mark.parametrize(
    ("default", "low", "high", "clipped"),
    [
        (3e-4, 3e-4, 4e-4, 0), (3e-4, 4e-4, 3e-4, 1), (3e-4, None, 4e-4, 0), (3e-4, 4e-4, None, 1),
        (4e-4, 0.0, None, 0), (4e-4, None, 0.0, 1),
    ],
)  # fmt: skip  # numbers
def test_each_clip_bound_defaults_to_clip_ratio(
    default: float, low: float | None, high: float | None, clipped: int
) -> None:
    gradient = of_two_answers(clip_ratio=default, clip_ratio_low=low, clip_ratio_high=high)(torch.ones(2, 5))
    assert not gradient[clipped].any() and gradient[1 - clipped].all()


def test_a_sum_of_tokens_is_multiplied_by_the_ranks_that_average_it() -> None:
    window = {"clip_ratio_low": 1e-3, "clip_ratio_high": 1e-3}
    ratio = torch.tensor([[-3.5e-4], [3.5e-4]]).exp()
    for ranks in (1, 2):
        batch = {"dp_size": ranks, "batch_num_tokens": 7, "global_batch_size": 6}
        gradient = of_two_answers("token-sum", global_batch_info=batch, **window)(torch.ones(2, 5))
        torch.testing.assert_close(gradient, (ranks * torch.tensor([[1.0], [-1.0]]) * ratio).expand(2, 5))


def test_a_mini_batch_without_tokens_half_precision_and_a_missing_size() -> None:
    gradient = of_two_answers(global_batch_info={"dp_size": 2, "global_batch_size": 6})
    assert not gradient(torch.zeros(2, 5)).any()
    with pytest.warns(UserWarning, match="too coarse"):
        gradient(torch.ones(2, 5), torch.bfloat16)
    with pytest.raises(ValueError, match=r"global_batch_size.* given with more than one rank"):
        of_two_answers(global_batch_info={"dp_size": 2})(torch.ones(2, 5))


def test_positions_of_nested_responses_are_masked_correctly() -> None:
    def nested(*lengths: int) -> Tensor:
        return torch.nested.nested_tensor([torch.ones(n, dtype=torch.long) for n in lengths], layout=torch.jagged)

    data = TensorDict({"input_ids": nested(5, 7), "prompts": nested(2, 5), "responses": nested(3, 2)}, batch_size=2)
    # Response tokens are predicted at positions 1 to 3 of the first sequence, and at 4 and 5 of the second, whose
    # first position is 5 in the packed batch.
    assert _predicts_response(data, 12).nonzero()[:, 0].tolist() == [1, 2, 3, 9, 10]
    assert _predicts_response(data.select("input_ids"), 12).all()  # as in SFT


def test_a_top_k_divergence_as_an_advantage_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_warned", set())
    with pytest.warns(UserWarning, match="its expected gradient is 0"):
        warn_of_detached_divergence(DistillationLossConfig(loss_mode="forward_kl_topk", use_policy_gradient=True))


def test_top_k_distillation_equals_verls() -> None:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 5, 16, generator=rng), torch.randn(300, 16, generator=rng)
    ids = torch.randint(300, (2, 5, 8), generator=rng)
    teacher = torch.randn(2, 5, 8, generator=rng).log_softmax(-1)
    results = []
    for log_probs_at in (
        linear_topk_log_probs,
        lambda hidden, weight, ids, temperature: verl_topk(hidden @ weight.t() / temperature, ids),
    ):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        student = log_probs_at(*leaves, ids, temperature=0.8)
        loss = kl_divergence(log_q=student.clamp_min(-10), log_p=teacher).mean()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for ours_, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=KEPT_VALUE_RELATIVE, atol=KEPT_VALUE_ABSOLUTE)
