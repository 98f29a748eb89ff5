"""Read verl's dataclasses and its default configuration file with `from_verl`.

The returned Reading must describe the loss that verl computes. Like test_verl_parity.py, this needs an environment with
verl.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.other_trainers import assert_agree, ours, rollout
from helpers.trainer_settings import VERL

from gspo_kernels import Objective
from gspo_kernels.integrations.settings import Normalizer, from_verl
from gspo_kernels.sampler_mismatch import RolloutCorrection

pytest.importorskip("verl")
import verl
from omegaconf import OmegaConf
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig

SIZES = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize("name", [name for name in VERL if name != "entropy bonus"])
def test_a_reading_gives_the_loss_that_verl_computes(name: str, backend: str) -> None:
    settings, objective = VERL[name]
    loss_mode = PolicyLossConfig(**settings.get("policy_loss", {}))
    config = ActorConfig(**SIZES | settings | {"policy_loss": loss_mode})
    reading = from_verl(config)
    assert reading.objective == objective and not reading.ignored
    batch = rollout(objective)
    config.global_batch_info.update(
        dp_size=4, batch_num_tokens=301, global_batch_size=48, loss_scale_factor=config.loss_scale_factor
    )
    lp = batch.log_probs.clone().requires_grad_()
    mask = batch.double_mask()
    loss, _ = core_algos.get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=batch.old,
        log_prob=lp,
        advantages=batch.advantages[:, None].expand_as(lp),
        response_mask=mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
    )
    if config.use_kl_loss:
        kl = core_algos.kl_penalty(lp, batch.ref, config.kl_loss_type)
        loss = loss + config.kl_loss_coef * core_algos.agg_loss(
            kl, mask, config.loss_agg_mode, **config.global_batch_info
        )
    (gradient,) = torch.autograd.grad(loss, lp)
    counts = {
        ("rows", "step"): 48 / 4,
        ("tokens", "step"): 301 / 4,
        ("one", "step"): 1 / 4,
        ("rows", "micro-batch"): len(mask),
    }

    def divisor(n: Normalizer | None) -> float | None:
        return None if n is None else counts[n.of, n.over] * n.times

    options = {"normalizer": divisor(reading.normalizer), "kl_normalizer": divisor(reading.kl_normalizer)}
    assert_agree(batch, ours(batch, reading.objective, backend, **options), loss.detach(), gradient)


def test_verls_default_configuration_file_is_read() -> None:
    config = OmegaConf.load(Path(str(verl.__file__)).parent / "trainer/config/_generated_ppo_trainer.yaml")
    assert OmegaConf.is_dict(config)
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    algorithm.adv_estimator = "grpo"
    reading = from_verl(actor, algorithm)
    default = from_verl(ActorConfig(**SIZES), AlgoConfig(adv_estimator="grpo"))
    assert (reading.objective, reading.advantages) == (default.objective, default.advantages)
    assert not reading.ignored and not reading.beside


@pytest.mark.parametrize(
    "preset, objective, old",
    [
        ("decoupled_token_is", Objective(rollout_correction=RolloutCorrection("token")), "trainer"),
        (
            "decoupled_token_icepop",
            Objective(rollout_correction=RolloutCorrection("token", "mask", 0.5, 5.0)),
            "trainer",
        ),
        ("disabled", Objective(), "trainer"),
        ("bypass_ppo_clip", Objective.preset("dapo", clip_low=3e-4, clip_high=4e-4, dual_clip=3.0), "rollout"),
        ("bypass_pg_is", Objective.preset("reinforce", rollout_correction=RolloutCorrection("sequence")), "current"),
    ],
)
@pytest.mark.filterwarnings("ignore:from_verl")
def test_verls_presets_of_rollout_correction_are_read(preset: str, objective: Objective, old: str) -> None:
    loss: dict[str, Any] = {"policy_loss": PolicyLossConfig(loss_mode="gspo")}
    actor = FSDPActorConfig(**SIZES, **loss, clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    algorithm = AlgoConfig(adv_estimator="grpo", rollout_correction=getattr(RolloutCorrectionConfig, preset)())
    reading = from_verl(actor, algorithm)
    expected = replace(objective, aggregation="token-mean")
    if old == "trainer":
        expected = replace(expected, ratio="sequence-token")
    assert (reading.objective, reading.old_log_probs) == (expected, old)
    assert reading.ignored == ({} if old == "trainer" else {"policy_loss.loss_mode": "gspo"} | reading.ignored)
