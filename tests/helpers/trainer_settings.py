"""Settings of other trainers, for the tests of `integrations/settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from typing import Any

import pytest

from gspo_kernels import Objective

ROLL = {"adv_estimator": "reinforce", "importance_sampling": "seq", "loss_agg_mode": "seq-mean-token-mean"}


GSPO = {
    "policy_loss": {"loss_mode": "gspo"},
    "clip_ratio_low": 3e-4,
    "clip_ratio_high": 4e-4,
    "loss_agg_mode": "seq-mean-token-mean",
}


def trl_config(**settings: Any) -> Any:
    """Return a GRPOConfig with the sizes of the stand-in for TRL's trainer (`trl_losses`)."""
    trl = pytest.importorskip("trl", minversion="1.16")
    sizes = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_completion_length": 32}
    return trl.GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, **(sizes | settings))


def dataclass_of(config: Any, added: Mapping[str, Any], without: str = "nothing") -> Any:
    """Return a copy of `config` with the fields `added`, and without fields whose name contains `without`.

    The copy stands for the configuration of another release of the trainer.
    """
    values = {f.name: getattr(config, f.name) for f in fields(config) if without not in f.name} | {**added}
    return make_dataclass("Config", values)(**values)


VERL: dict[str, tuple[dict[str, Any], Objective]] = {
    "gspo": (GSPO, Objective(ratio="sequence-token")),
    "defaults": ({}, Objective.preset("dapo", clip_high=0.2, dual_clip=3.0)),
    "dual clip": (
        {"clip_ratio_c": 10.0, "loss_agg_mode": "seq-mean-token-sum"},
        Objective.preset("grpo", dual_clip=10.0, aggregation="seq-mean-token-sum"),
    ),
    "clip_ratio for both bounds": (
        {"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": None},
        Objective.preset("dapo", clip_low=0.1, clip_high=0.1, dual_clip=3.0),
    ),
    "dr_grpo": (
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 32},
        Objective.preset("dr_grpo", length_norm=32, dual_clip=3.0),
    ),
    "token sum": ({"loss_agg_mode": "token-sum"}, Objective.preset("dapo", clip_high=0.2, dual_clip=3.0)),
    "entropy bonus": ({"entropy_coeff": 0.1}, Objective.preset("dapo", clip_high=0.2, dual_clip=3.0, entropy_coef=0.1)),
    "cispo": ({"policy_loss": {"loss_mode": "cispo"}}, Objective.preset("cispo", clip_low=0.2, clip_high=0.2)),
    "sapo": (
        {"policy_loss": {"loss_mode": "sapo"}, "tau_neg": 1.1},
        Objective.preset("sapo", sapo_temperature_neg=1.1),
    ),
    "sapo with another KL mean": (
        {"policy_loss": {"loss_mode": "sapo"}, "use_kl_loss": True},
        Objective.preset("sapo", kl_coef=0.001, kl_aggregation="token-mean"),
    ),
    "gmpo": (
        {"policy_loss": {"loss_mode": "geo_mean"}, "clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
        Objective.preset("gmpo"),
    ),
    "gpg": (
        {"policy_loss": {"loss_mode": "gpg"}, "loss_agg_mode": "seq-mean-token-sum"},
        Objective.preset("reinforce"),
    ),
}
