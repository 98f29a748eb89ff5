"""Compare our loss with TRL's `_compute_loss`, called with the same log-probs on a stand-in for TRL's trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import trl_trainer
from helpers.marks import triton_is_slow
from helpers.other_trainers import Rollout, assert_agree, ours, rollout
from helpers.trl_losses import GRADIENT_STEPS, LONGEST, SEQUENCE, trl_loss

from gspo_kernels import Objective
from gspo_kernels.advantages import gdpo_advantages, group_advantages
from gspo_kernels.sampler_mismatch import off_policy_mask

pytest.importorskip("trl", minversion="1.16")  # earlier releases normalize dapo differently


# An objective, and the settings of GRPOConfig that give it.
CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "gspo": (Objective(), {"loss_type": "grpo", "level": SEQUENCE}),
    "gspo delta": (Objective(delta=1.0006), {"loss_type": "grpo", "level": SEQUENCE, "delta": 1.0006}),
    "gspo k3": (Objective(kl_coef=0.1), {"loss_type": "grpo", "level": SEQUENCE, "beta": 0.1}),
    "gspo k3, bias-corrected": (
        Objective(kl_coef=0.1, kl_ratio_factor=True),
        {"loss_type": "grpo", "level": SEQUENCE, "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "gspo with loss_type dapo": (
        Objective.preset("luspo", clip_low=3e-4, clip_high=4e-4, aggregation="token-mean"),
        {"loss_type": "dapo", "level": SEQUENCE},
    ),
    "grpo": (Objective.preset("grpo"), {"loss_type": "grpo"}),
    "grpo delta": (Objective.preset("grpo", delta=1.3), {"loss_type": "grpo", "delta": 1.3}),
    "grpo unbiased k3": (
        Objective.preset("grpo", kl_coef=0.1, kl_estimator="unbiased"),
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "bnpo": (Objective.preset("bnpo"), {"loss_type": "bnpo"}),
    "dapo": (Objective.preset("dapo"), {"loss_type": "dapo"}),
    "dr_grpo": (Objective.preset("dr_grpo", length_norm=LONGEST), {"loss_type": "dr_grpo"}),
    "luspo": (Objective.preset("luspo"), {"loss_type": "luspo", "level": SEQUENCE}),
    "luspo, token ratios": (Objective.preset("grpo", aggregation="seq-mean-token-sum"), {"loss_type": "luspo"}),
    "cispo": (Objective.preset("cispo", clip_high=0.5), {"loss_type": "cispo", "epsilon_high": 1.5}),
    "cispo, sequence ratios": (
        Objective.preset("cispo", ratio="sequence", clip_high=4e-4),
        {"loss_type": "cispo", "epsilon_high": 1.0004, "level": SEQUENCE},
    ),
    "sapo": (Objective.preset("sapo"), {"loss_type": "sapo"}),
    "sapo, sequence ratios": (
        Objective.preset("sapo", ratio="sequence"),
        {"loss_type": "sapo", "level": SEQUENCE},
    ),
    "vespo": (Objective.preset("vespo"), {"loss_type": "vespo"}),
    "vespo, other weights, unbiased k3": (
        Objective.preset(
            "vespo", vespo_k_pos=1.5, vespo_lambda_pos=0.5, vespo_k_neg=2.0, kl_coef=0.1, kl_estimator="unbiased"
        ),
        {"loss_type": "vespo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "gmpo": (Objective.preset("gmpo"), {"loss_type": "gmpo"}),
    "gmpo k3": (Objective.preset("gmpo", kl_coef=0.1), {"loss_type": "gmpo", "beta": 0.1}),
}


@pytest.mark.parametrize(
    ("name", "weights"), [(name, x) for name in CASES for x in (False, True) if not (x and name.startswith("gmpo"))]
)
@triton_is_slow
def test_loss_gradient_and_clip_fractions_equal_trls(name: str, weights: bool, backend: str) -> None:
    """With `weights`, TRL's importance_sampling_ratio is our token_weights.

    TRL divides by tokens or rows of all micro-batches of an optimizer step, per process. With this number as
    `normalizer`, the gradients of our micro-batches add up to TRL's.
    """
    objective, config = CASES[name]
    batch = rollout(objective, weights=weights)
    if weights and objective.surrogate == "vespo":
        _assert_old_log_probs_of_the_sampler_equal_trls_weights(batch, objective, config, backend)
        return
    loss, gradient, metrics = trl_loss(batch, objective, config)
    computed = ours(batch, objective, backend)
    assert_agree(batch, computed, loss, gradient)
    count = batch.mask.sum() if objective.aggregation == "token-mean" else len(batch.mask)
    of_micro_batch = ours(batch, objective, backend, normalizer=count * GRADIENT_STEPS)
    assert_agree(batch, of_micro_batch, loss / GRADIENT_STEPS, gradient / GRADIENT_STEPS)
    if config["loss_type"] not in ("gmpo", "cispo", "sapo", "vespo") and "delta" not in config:
        # TRL counts sequences at sequence level, tokens otherwise.
        share = "clip_fraction" if config.get("level") == SEQUENCE else "token_clip_fraction"
        for trl_name, suffix in {"low_mean": "_low", "high_mean": "_high", "region_mean": ""}.items():
            expected = metrics[f"clip_ratio/{trl_name}"][0]
            assert expected == pytest.approx(computed[0].metrics[share + suffix].item(), abs=1e-6)


def _assert_old_log_probs_of_the_sampler_equal_trls_weights(
    batch: Rollout, objective: Objective, config: dict[str, Any], backend: str
) -> None:
    """TRL multiplies importance_sampling_ratio into the ratio of vespo, as old log-probs minus its logarithm do."""
    batch = replace(batch, old=batch.log_probs - (batch.log_probs - batch.old).clamp(-19, 19))
    objective = replace(objective, kl_coef=0.0)  # TRL does not multiply it into the ratio of the KL
    loss, gradient, _ = trl_loss(batch, objective, {**config, "beta": 0.0})
    assert batch.weights is not None
    sampler = replace(batch, old=batch.old - batch.weights.log(), weights=None)
    assert_agree(batch, ours(sampler, objective, backend), loss, gradient)


def test_trls_off_policy_mask_is_token_weights(backend: str) -> None:
    objective = Objective.preset("grpo")
    batch = rollout(objective, seed=4)
    config = CASES["grpo"][1]
    loss, gradient, _ = trl_loss(batch, objective, config, threshold=0.01)
    kept = off_policy_mask(batch.log_probs, batch.old, batch.advantages, batch.mask, threshold=0.01)
    assert 0 < kept.metrics["masked_share"] < 1
    assert_agree(batch, ours(replace(batch, weights=kept.weights), objective, backend), loss, gradient)


def test_sequence_ratios_with_trls_loss_type_dapo_are_luspo() -> None:
    """TRL's issue 3823: sequence ratios with loss_type dapo give LUSPO, up to a constant factor."""
    objective, config = CASES["gspo with loss_type dapo"]
    batch = rollout(objective)
    _, gradient, _ = trl_loss(batch, objective, config)
    lengths = batch.mask.sum(1)
    _, by_length = ours(batch, replace(objective, aggregation="seq-mean-token-sum"), "torch")
    torch.testing.assert_close(gradient * lengths.sum() / len(lengths), by_length)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_advantages_of_two_rewards_equal_trls(aggregation: str, tmp_path: Path) -> None:
    rewards = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[:, 1] *= 30
    rewards[:4, 0] = 0.1  # a group without variation
    weights = [1.0, 0.5]
    captured: list[Any] = []
    options = {"multi_objective_aggregation": aggregation, "max_steps": 1, "steps_per_generation": 2}
    model = trl_trainer.checkpoint(tmp_path / "model")
    trainer = trl_trainer.make_trainer(trl_trainer.GRPOTrainer, model, tmp_path, **options)
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (captured.append(generate(inputs)), captured[-1])[1]
    trainer._calculate_rewards = lambda *_: rewards
    trainer.reward_funcs = trainer.reward_funcs * 2
    trainer.reward_func_names = ["one", "two"]
    trainer.reward_weights = torch.tensor(weights, dtype=torch.float64)
    trainer.train()
    if aggregation == "normalize_then_sum":
        ours = gdpo_advantages(rewards, 4, weights=weights, eps=1e-4)
    else:
        ours = group_advantages(rewards @ torch.tensor(weights, dtype=torch.float64), 4, eps=1e-4)
    torch.testing.assert_close(ours, captured[0]["advantages"])
