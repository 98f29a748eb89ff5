"""A sampler whose weights are rounded to bf16: its log-probs, and the corrections of a training with them."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerance import check

from gspo_kernels import Objective
from gspo_kernels.advantages import RunningMoments
from gspo_kernels.integrations.reference_trainer import train_config
from gspo_kernels.integrations.reference_trainer.advantages import advantages_of
from gspo_kernels.integrations.reference_trainer.config import TrainConfig
from gspo_kernels.integrations.reference_trainer.optimizer import Optimizer
from gspo_kernels.integrations.reference_trainer.policy import Policy, demo_policy
from gspo_kernels.integrations.reference_trainer.sampling import Rollout, sample, sampler_weights
from gspo_kernels.integrations.reference_trainer.update import mini_batches, update, with_log_probs
from gspo_kernels.integrations.tasks import Example, RewardBatch
from gspo_kernels.sampler_mismatch import RolloutCorrection

EXAMPLES = [Example("sort ba:", "ab"), Example("sort fedcb:", "bcdef")] * 4
SMALL: dict[str, Any] = dict(seeds=0, steps=2, prompts_per_step=8, group_size=4, eval_prompts=8, eval_every=2)


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    made = demo_policy()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(2)  # so that rounding to bf16 changes log-probs by about 0.02
    return made


def rollout_of(policy: Policy, precision: str = "", temperature: float = 1.0) -> Rollout:
    torch.manual_seed(1)
    with sampler_weights(policy, precision):
        return sample(policy, EXAMPLES, group_size=4, max_new_tokens=7, temperature=temperature)


@torch.no_grad()
def log_probs_by(model: Any, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the answers by full logits, [B, T]; 0 where no token was sampled."""
    positions = (rollout.attention_mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask, position_ids=positions)
    logits = out.logits[:, rollout.prompt_width - 1 : -1]
    log_probs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return torch.where(rollout.answer_mask, log_probs.gather(-1, rollout.answer_ids[..., None])[..., 0], 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_sampler_reports_the_log_probs_of_its_tokens(policy: Policy, temperature: float) -> None:
    rollout = rollout_of(policy, temperature=temperature)
    plain = log_probs_by(policy.model, rollout, temperature)
    truth = log_probs_by(policy.model.double(), rollout, temperature)
    rms_of_model = (plain - truth).square().mean().sqrt().item()
    check("log_probs", rollout.log_probs, plain, truth, torch.float32, rms_of_model)
    assert (rollout.log_probs[~rollout.answer_mask] == 0).all() and not rollout.answer_mask.all()


def test_rounded_weights_sample_and_the_exact_ones_come_back(policy: Policy) -> None:
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    with sampler_weights(policy, "bf16"):
        rounded = list(map(torch.Tensor.detach, policy.model.parameters()))
    assert all(torch.equal(x.to(torch.bfloat16), y) for x, y in zip(before, rounded, strict=True))
    rollout = rollout_of(policy, "bf16")
    off = [
        (rollout.log_probs - log_probs_by(model, rollout)).abs().mean()
        for model in (policy.model, copy.deepcopy(policy.model).to(torch.bfloat16))
    ]
    assert off[0] > 0.01 and off[1] < 0.7 * off[0]  # with a cache, generation rounds differently from one forward
    with pytest.raises(KeyboardInterrupt), sampler_weights(policy, "bf16"):
        raise KeyboardInterrupt
    assert all(map(torch.equal, before, policy.model.parameters()))


def updates_of(policy: Policy, **options: Any) -> tuple[list[dict[str, float]], Any]:
    """Train on one rollout of rounded weights, in two updates. Return their metrics, and the batch."""
    config = TrainConfig(prompts_per_step=8, group_size=4, updates_per_rollout=2, sampler_precision="bf16", **options)
    rollout = rollout_of(policy, "bf16")
    (parts,) = mini_batches(config, 0, 1)
    batch = with_log_probs(config, policy, rollout, parts)
    rewards = torch.rand(32, generator=torch.Generator().manual_seed(2)).tolist()
    batch = replace(batch, advantages=advantages_of(config, batch, RewardBatch(rewards, {}, []), RunningMoments()))
    optimizer = Optimizer(policy, config)
    return [update(config, policy, optimizer, batch, rows).numbers for rows in parts], (batch, parts[0])


def test_recomputed_log_probs_clip_nothing_and_the_correction_weighs_tokens(policy: Policy) -> None:
    correction = RolloutCorrection("token", "mask", 0.999, 1.001)
    (first, second), (batch, rows) = updates_of(policy, objective=Objective(rollout_correction=correction))
    assert first["clip_fraction"] == 0 and first["ratio_max"] == 1 < second["ratio_max"]
    (uncorrected, _), _ = updates_of(policy, old_log_probs="sampler")
    assert (
        uncorrected["ratio_max"] > 1 and uncorrected["clip_fraction"] > 0 and "rollout_weight_mean" not in uncorrected
    )

    mask = batch.rollout.answer_mask[rows]
    log_rho = (batch.old_log_probs.double() - batch.rollout.log_probs.double())[rows].where(mask, 0)
    rho = log_rho.exp()[mask]
    outside = (rho < correction.low) | (rho > correction.high)
    assert first["rollout_weight_mean"] == pytest.approx(rho.where(~outside, 0).mean().item(), abs=1e-6)
    assert first["rollout_bound_share"] == pytest.approx(outside.double().mean().item(), abs=1e-6)
    assert 0 < outside.double().mean() < 1


@pytest.mark.parametrize(
    ("option", "corrections"),
    [
        ({"level": "sequence", "mode": "mask", "high": "3e0"}, RolloutCorrection("sequence", "mask", high=3.0)),
        (
            "[{level: geometric, mode: gate, low: 0.99, high: 1.01}, {level: token, high: inf}]",
            (RolloutCorrection("geometric", "gate", 0.99, 1.01), RolloutCorrection("token", high=math.inf)),
        ),
        ("none", None),
    ],
)
def test_corrections_are_an_option_that_a_record_keeps(option: Any, corrections: Any) -> None:
    config = train_config(rollout_correction=option)
    assert config.objective.rollout_correction == corrections
    assert train_config(**json.loads(json.dumps(config.to_dict()))).objective == config.objective
    assert train_config(objective=Objective(rollout_correction=corrections)).objective == config.objective
