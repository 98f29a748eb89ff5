"""Read other trainers' settings. The returned Reading must describe the loss that the trainer computes."""

from __future__ import annotations

import inspect
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.other_trainers import assert_agree, ours, rollout
from helpers.trainer_settings import GSPO, ROLL, VERL, dataclass_of, trl_config

from gspo_kernels import Objective, advantages, policy_loss, sampler_mismatch
from gspo_kernels.integrations.settings import (
    Normalizer,
    Reading,
    Step,
    from_ms_swift,
    from_roll,
    from_stateset,
    from_trl,
    from_verl,
    tables,
)
from gspo_kernels.sampler_mismatch import RolloutCorrection

# The settings on ROLL's GSPO page.
ROLL_PAGE = """
# GSPO related
adv_estimator: "reinforce"
importance_sampling: seq
rollout_batch_size: 64 # prompt
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
# ppo related
ppo_epochs: 1
use_kl_loss: true
kl_loss_coef: 0.001
loss_agg_mode: "seq-mean-token-sum"
# advantage
whiten_advantages: true
advantage_clip: 2.0
dual_clip_loss: true
# clip
reward_clip: 10
# normalize
reward_norm: null
reward_shift: false
reward_scale: false
# reward
add_token_level_kl: false
"""
# ms-swift's examples/train/grpo/internal/gspo.sh with the options of its GSPO page.
SWIFT = """--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset AI-MO/NuminaMath-TIR#10000 --torch_dtype bfloat16
    --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16
    --train_type full --reward_funcs accuracy format --use_vllm true --vllm_mode colocate --max_completion_length 8192
    --offload_optimizer true --sleep_level 1 --learning_rate 1e-6 --warmup_ratio 0.05 --deepspeed zero3
    --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 4 --beta 0"""
ROWS = Normalizer("rows", "step")


# TRL

SEQUENCE = {"importance_sampling_level": "sequence"}
PAPER = {**SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}
TRL: dict[str, tuple[dict[str, Any], Objective]] = {
    "defaults": ({}, Objective.preset("dapo", clip_high=0.2)),
    "gspo": ({**PAPER, "loss_type": "grpo"}, Objective()),
    "gspo delta": ({**PAPER, "loss_type": "grpo", "delta": 1.0006}, Objective(delta=1.0006)),
    "gspo k3": ({**PAPER, "loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, Objective(kl_coef=0.1)),
    "gspo k3, default bias correction": (
        {**PAPER, "loss_type": "grpo", "beta": 0.1},
        Objective(kl_coef=0.1, kl_ratio_factor=True),
    ),
    "gspo, default loss_type": (
        PAPER,
        Objective.preset("luspo", clip_low=3e-4, clip_high=4e-4, aggregation="token-mean"),
    ),
    "grpo k3": ({"loss_type": "grpo", "beta": 0.1}, Objective.preset("grpo", kl_coef=0.1, kl_ratio_factor=True)),
    "dapo": ({"epsilon_high": 0.28}, Objective.preset("dapo")),
    "bnpo": ({"loss_type": "bnpo"}, Objective.preset("bnpo")),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, Objective.preset("dr_grpo", length_norm=32)),
    "luspo": (
        {**SEQUENCE, "loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
        Objective.preset("luspo"),
    ),
    "luspo, token ratios": (
        {"loss_type": "luspo"},
        Objective.preset("grpo", aggregation="seq-mean-token-sum"),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, Objective.preset("cispo", clip_high=0.5)),
    "cispo, sequence ratios": (
        {**SEQUENCE, "loss_type": "cispo", "epsilon_high": 1.5},
        Objective.preset("cispo", ratio="sequence", clip_high=0.5),
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0},
        Objective.preset("sapo", sapo_temperature_pos=2.0),
    ),
}


@pytest.mark.parametrize("name", TRL)
def test_trl_settings_give_the_objective(name: str) -> None:
    settings, objective = TRL[name]
    assert from_trl(trl_config(**settings)).objective == objective


@pytest.mark.parametrize("name", TRL)
def test_a_reading_gives_the_loss_that_trl_computes(name: str, backend: str) -> None:
    config = trl_config(**TRL[name][0])
    reading = from_trl(config)
    from helpers.trl_losses import GRADIENT_STEPS, PER_GENERATION, trl_loss

    batch = rollout(reading.objective)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    trl_settings = SimpleNamespace(
        clip_low=config.epsilon,
        clip_high=high,
        sapo_temperature_pos=config.sapo_temperature_pos,
        sapo_temperature_neg=config.sapo_temperature_neg,
    )
    options = {"level": config.importance_sampling_level, "epsilon_high": high}
    options |= {n: getattr(config, n) for n in ("loss_type", "beta", "delta", "use_bias_correction_kl")}
    loss, gradient, _ = trl_loss(batch, trl_settings, options)  # pyright: ignore[reportArgumentType]
    of, over, times = reading.normalizer
    count = {"rows": len(batch.mask), "tokens": int(batch.mask.sum())}[of] * (
        PER_GENERATION if over == "rollout" else 1
    )
    computed = ours(batch, reading.objective, backend, normalizer=count * times)
    assert_agree(batch, computed, loss / GRADIENT_STEPS, gradient / GRADIENT_STEPS)


def test_other_inputs_of_trls_loss_are_read() -> None:
    reading = from_trl(
        trl_config(
            **PAPER,
            loss_type="grpo",
            temperature=0.7,
            num_generations=4,
            scale_rewards="batch",
            use_vllm=True,
            beta=0.1,
            off_policy_mask_threshold=0.5,
            mask_truncated_completions=True,
            sync_ref_model=True,
            reward_weights=[1.0, 0.5],
        )
    )
    assert reading.temperature == 0.7 and reading.normalizer == Normalizer("rows", "micro-batch", 2.0)
    assert reading.advantages == (Step("group_advantages", {"group_size": 4, "scale": "batch", "eps": 1e-4}),)
    assert reading.objective.rollout_correction == RolloutCorrection("sequence", "mask", 0.0, 3.0)
    mask_options = {"threshold": 0.5, "rollout_log_probs": "rollout_log_probs"}
    assert reading.token_weights == (Step("off_policy_mask", mask_options),)
    assert reading.beside == {
        "mask_truncated_completions": True,
        "reward_weights": [1.0, 0.5],
        "sync_ref_model": True,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
    }
    assert {"learning_rate", "num_iterations", "vespo_k_pos"} <= set(reading.not_the_loss) and not reading.ignored
    assert from_trl(trl_config(entropy_coef=0.1, loss_type="bnpo")).objective == Objective.preset(
        "bnpo", entropy_coef=0.1
    )


@pytest.mark.parametrize("level, mode", [("token", "truncate"), ("token", "mask"), ("sequence", "truncate")])
def test_trls_sampler_correction_is_read(level: str, mode: str) -> None:
    name = "vllm_importance_sampling"
    options = {f"{name}_mode": f"{level}_{mode}", f"{name}_clip_min": 0.5, f"{name}_clip_max": None}
    read = from_trl(trl_config(use_vllm=True, **options)).objective.rollout_correction
    assert read == RolloutCorrection(level, mode, 0.5, math.inf)
    off = {"vllm_importance_sampling_correction": False}
    assert from_trl(trl_config(use_vllm=True, **off)).objective.rollout_correction is None


def test_trls_gmpo_config_is_recognised_by_its_class() -> None:
    config = pytest.importorskip("trl.experimental.gmpo").GMPOConfig
    read = from_trl(config(output_dir="unused", report_to=[], use_cpu=True, bf16=False, beta=0.1))
    assert read.objective == Objective.preset("gmpo", kl_coef=0.1)


def test_settings_are_read_like_older_releases_of_trl_do(monkeypatch: pytest.MonkeyPatch) -> None:
    config = trl_config()
    assert from_trl(config).normalizer == Normalizer("tokens", "rollout", 0.5)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.9.2")
    assert from_trl(config).normalizer == Normalizer("tokens", "rollout", 1.0)
    with pytest.raises(ValueError, match=r"from_trl: loss_type must be another one before TRL 1\.10.* got 'luspo'"):
        from_trl(trl_config(**SEQUENCE, loss_type="luspo", beta=0.1))
    with pytest.raises(ValueError, match=r"use_liger_kernel must be False before TRL 1\.14.* got True"):
        from_trl(dataclass_of(config, {"use_liger_kernel": True}))
    older = dataclass_of(trl_config(use_vllm=True), {"vllm_importance_sampling_cap": 2.0}, without="clip_max")
    assert from_trl(older).objective.rollout_correction == RolloutCorrection("sequence", "mask", high=2.0)


def test_every_field_of_trls_config_is_classified() -> None:
    """If this fails with a newer TRL, find out whether TRL's loss reads the new fields, and add them to a table."""
    known = tables.TRL.keys() | tables.TRL_OTHERS | tables.training_arguments()
    assert {f.name for f in fields(trl_config())} - known == set()
    assert not tables.TRL.keys() & (tables.TRL_OTHERS | tables.training_arguments())


# verl

KL_ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3", "k1+": "k1+", "k3+": "k3+"}
for verl_name, estimator in KL_ESTIMATORS.items():
    VERL[f"kl {verl_name}"] = (
        {**GSPO, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": verl_name},
        Objective(ratio="sequence-token", kl_coef=0.1, kl_estimator=estimator),
    )


@pytest.mark.parametrize("name", VERL)
def test_verl_settings_give_the_objective(name: str) -> None:
    settings, objective = VERL[name]
    reading = from_verl(settings)
    assert reading.objective == objective
    assert (reading.temperature, reading.advantages) == (None, None)
    divisor = {"token-mean": "tokens", "token-sum": "one"}.get(settings.get("loss_agg_mode", "token-mean"), "rows")
    fixed_aggregation = name.startswith(("sapo", "gmpo"))  # verl does not read loss_agg_mode for the policy term
    over = "micro-batch" if name == "gmpo" else "step"
    assert reading.normalizer == Normalizer("rows" if fixed_aggregation else divisor, over)
    assert reading.kl_normalizer == (Normalizer(divisor, "step") if name == "sapo with another KL mean" else None)


class Omega(Mapping[str, Any]):
    """A nested mapping that is not a dict, like OmegaConf's."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return Omega(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_verls_algorithm_section_is_read() -> None:
    correction = {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_5.0",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
    }
    reading = from_verl(Omega(GSPO), Omega({"adv_estimator": "grpo", "rollout_correction": correction}))
    assert reading.objective == Objective(
        ratio="sequence-token", rollout_correction=RolloutCorrection("token", "mask", 0.5, 5.0)
    )
    prefix = "algorithm.rollout_correction.rollout_rs"
    assert reading.beside == {prefix: "seq_mean_k1", f"{prefix}_threshold": "0.999_1.001"}
    group = {"group_ids": "of the prompts", "scale": "group", "eps": 1e-6}
    assert reading.advantages == (Step("group_advantages", group),)
    for estimator, steps in {
        "rloo": [Step("group_advantages", {**group, "scale": "none", "baseline": "leave-one-out"})],
        "reinforce_plus_plus_baseline": [Step("group_advantages", {**group, "scale": "none"}), Step("whiten", {})],
    }.items():
        for step in steps:
            step.options.pop("eps", None)
        algorithm = {"adv_estimator": estimator, "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.01}}
        subtract = Step("subtract_kl", {"kl_coef": 0.01, "kl_estimator": "k1"})
        assert from_verl(GSPO, algorithm).advantages == (subtract, *steps)
    algorithm = {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "rollout_correction": None}
    returns = Step("token_returns", {"kl": "k1, old against reference", "kl_coef": 0.001})
    assert from_verl(GSPO, algorithm).advantages == (returns, Step("whiten", {}))


def test_verls_bypass_mode_replaces_the_loss() -> None:
    bypass = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "rollout_correction": {"bypass_mode": True}}
    with pytest.warns(UserWarning, match=r"does not read policy_loss\.loss_mode='gspo'"):
        reading = from_verl(GSPO, bypass)
    window = {"clip_low": 3e-4, "clip_high": 4e-4}
    assert reading.objective == Objective.preset("grpo", dual_clip=3.0, **window) and reading.old_log_probs == "rollout"
    assert reading.advantages == (Step("group_advantages", {"group_ids": "of the prompts", "scale": "none"}),)
    correction = {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 4}
    reading = from_verl({"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": correction}})
    sampler = RolloutCorrection("sequence", "truncate", high=4.0)
    assert reading.old_log_probs == "current"
    assert reading.objective == Objective.preset("reinforce", aggregation="token-mean", rollout_correction=sampler)


# ROLL, StateSet Agents, ms-swift


def test_the_settings_of_rolls_page_are_read(tmp_path: Path) -> None:
    path = tmp_path / "gspo.yaml"
    path.write_text(ROLL_PAGE)
    clamp = lambda bound: Step("clamp", {"min": -bound, "max": bound})  # noqa: E731
    assert (
        from_roll(path)
        == from_roll(str(path))
        == Reading(
            Objective.preset("luspo", clip_low=0.2, clip_high=0.2, dual_clip=1.4, kl_coef=0.001),
            Normalizer("sequences", "step"),
            temperature=1.0,
            advantages=(
                clamp(10.0),
                Step("token_returns", {"gamma": 1.0, "reward_clip": 10.0}),
                Step("whiten", {}),
                clamp(2.0),
            ),
            not_the_loss=(
                "rollout_batch_size",
                "num_return_sequences_in_group",
                "prompt_length",
                "response_length",
                "ppo_epochs",
                "reward_shift",
                "reward_scale",
            ),
        )
    )


@pytest.mark.parametrize(
    "settings, objective",
    [
        ({"pg_clip": "3e-4"}, Objective(clip_low=3e-4, clip_high=3e-4)),
        ({"use_pg_clip_range": True, "pg_clip_low": 3e-4, "pg_clip_high": 4e-4}, Objective()),
        (
            {
                "use_pg_clip_range": True,
                "pg_clip_low": 3e-4,
                "pg_clip_high": 4e-4,
                "dual_clip_loss": True,
                "pg_clip": 0.5,
            },
            Objective(dual_clip=2.0),
        ),
        (
            {"importance_sampling": "token", "loss_agg_mode": "token-mean", "entropy_loss_coef": 0.1},
            Objective.preset("bnpo", entropy_coef=0.1),
        ),
        (
            {
                "importance_sampling": "token",
                "loss_agg_mode": "seq-mean-token-sum-norm",
                "prompt_length": 8,
                "response_length": 25,
            },
            Objective.preset("dr_grpo", length_norm=32),
        ),
        (
            {"importance_sampling": "token", "loss_agg_mode": "seq-mean-token-sum-norm", "sequence_length": 33},
            Objective.preset("dr_grpo", length_norm=32),
        ),
        (
            {
                "importance_sampling": "token",
                "train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "geometric"}},
            },
            Objective.preset("grpo", rollout_correction=RolloutCorrection("geometric", high=1.2)),
        ),
    ],
)
def test_roll_settings_give_the_objective(settings: dict[str, Any], objective: Objective) -> None:
    reading = from_roll(ROLL | settings)
    assert reading.objective == objective
    divisor = {"token-mean": "tokens", "seq-mean-token-sum-norm": "one"}.get(objective.aggregation, "sequences")
    assert reading.normalizer == Normalizer(divisor, "step")


GROUPS = {"eps": 1e-6, "group_size": 8}


@pytest.mark.parametrize(
    "settings, first",
    [
        ({}, None),
        ({"adv_estimator": "grpo"}, Step("normalize_rewards", {**GROUPS, "by": "group", "shift": True, "scale": True})),
        (
            {"reward_norm": "batch"},
            Step("normalize_rewards", {"eps": 1e-6, "by": "batch", "shift": True, "scale": True}),
        ),
        (
            {"reward_norm": "group", "reward_shift": True},
            Step("normalize_rewards", {**GROUPS, "by": "group", "shift": True, "scale": False}),
        ),
        (
            {"reward_norm": "running", "reward_scale": True},
            Step("normalize_rewards", {"eps": 1e-6, "by": "running", "shift": False, "scale": True}),
        ),
        (
            {"norm_mean_type": "group"},
            Step("normalize_rewards", {**GROUPS, "by": "group", "shift": True, "scale": False}),
        ),
        (
            {"norm_std_type": "batch"},
            Step("normalize_rewards", {"eps": 1e-6, "by": "batch", "shift": False, "scale": True}),
        ),
        ({"norm_mean_type": "group", "norm_std_type": "batch"}, Step("group_advantages", {**GROUPS, "scale": "batch"})),
    ],
)
def test_rolls_reward_normalisation_is_read(settings: dict[str, Any], first: Step | None) -> None:
    steps = from_roll(ROLL | {"num_return_sequences_in_group": 8} | settings).advantages
    assert steps == (*([] if first is None else [first]), Step("token_returns", {"gamma": 1.0}))


def test_other_inputs_of_rolls_loss_are_read() -> None:
    settings = {
        "add_token_level_kl": True,
        "init_kl_coef": 0.05,
        "kl_penalty": "mse",
        "max_len_mask": True,
        "length_loss_weight": True,
        "defaults": ["../config/deepspeed_zero@_here_"],
    }
    reading = from_roll(ROLL | settings)
    returns = {"gamma": 1.0, "kl": "k2, old against reference", "kl_coef": 0.05}
    assert reading.advantages == (Step("token_returns", returns),)
    assert reading.beside == {
        "max_len_mask": True,
        "length_loss_weight": True,
        "defaults": ["../config/deepspeed_zero@_here_"],
        "difficulty_low_threshold": 0.0,
        "difficulty_high_threshold": 1.0,
        "error_max_len_threshold": 9999999999,
        "mask_type": "loss",
    }


def test_the_settings_of_statesets_guide_are_read() -> None:
    guide = {
        "num_generations": 6,
        "clip_range_left": 2e-4,
        "clip_range_right": 3e-4,
        "learning_rate": 3e-6,
        "use_lora": True,
        "beta": 0.0,
        "temperature": 0.7,
    }
    group = Step("group_advantages", {"group_size": 6, "ddof": 0, "eps": 0.0})
    assert (
        from_stateset(guide)
        == from_stateset(make_dataclass("GSPOConfig", guide)(**guide))
        == Reading(
            Objective(clip_low=2e-4, clip_high=3e-4),
            ROWS,
            temperature=1.0,
            advantages=(group,),
            not_the_loss=("learning_rate", "use_lora", "beta", "temperature"),
        )
    )
    token = from_stateset({"use_gspo_token": True, "objective": None, "rescore_old_log_probs": False})
    assert token.objective == Objective(ratio="sequence-token") and token.old_log_probs == "rollout"


def test_ms_swifts_command_line_is_read() -> None:
    flags = shlex.split(SWIFT)
    reading = from_ms_swift(flags)
    group = Step("group_advantages", {"group_size": 16, "scale": "group", "eps": 1e-4})
    assert (reading.objective, reading.normalizer) == (Objective(), Normalizer("rows", "micro-batch", 8.0))
    assert (reading.temperature, reading.advantages, reading.ignored) == (0.9, (group,), {})
    assert {"train_type", "deepspeed", "reward_funcs", "steps_per_generation"} <= set(reading.not_the_loss)
    assert from_ms_swift([f.replace("--beta", "--beta=0.04") for f in flags if f != "0"]).objective.kl_coef == 0.04
    settings = {
        "rlhf_type": "grpo",
        "importance_sampling_level": "sequence_token",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    }
    for arguments in (settings, make_dataclass("RLHFArguments", settings)(**settings)):
        assert from_ms_swift(arguments).objective == Objective(ratio="sequence-token", kl_coef=0.04)


@pytest.mark.parametrize(
    "settings, objective",
    [
        ({}, Objective.preset("grpo")),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, Objective.preset("dapo")),
        ({"loss_type": "bnpo"}, Objective.preset("bnpo")),
        ({"loss_type": "dr_grpo", "max_completion_length": 32}, Objective.preset("dr_grpo", length_norm=32)),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, Objective.preset("cispo")),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
            Objective.preset("cispo", ratio="sequence"),
        ),
        ({"loss_type": "sapo", "tau_pos": 2.0}, Objective.preset("sapo", sapo_temperature_pos=2.0)),
        (
            {"delta": 2.0, "use_vllm": True, "rollout_importance_sampling_mode": "sequence_truncate"},
            Objective.preset("grpo", delta=2.0, rollout_correction=RolloutCorrection("geometric", high=2.0)),
        ),
    ],
)
def test_ms_swift_settings_give_the_objective(settings: dict[str, Any], objective: Objective) -> None:
    reading = from_ms_swift({"beta": 0.0} | settings)
    assert reading.objective == objective
    over = "rollout" if settings.get("loss_type") in ("dapo", "cispo") else "micro-batch"
    assert reading.normalizer == Normalizer("tokens" if objective.aggregation == "token-mean" else "rows", over)


def test_other_inputs_of_ms_swifts_loss_are_read() -> None:
    read = from_ms_swift({"advantage_estimator": "reinforce_plus_plus", "ref_model": "m", "overlong_filter": True})
    assert read.objective.kl_coef == 0 and read.beside == {"overlong_filter": True, "ref_model": "m"}
    assert read.advantages == (
        Step("subtract_kl", {"kl_coef": 0.04, "kl_estimator": "k1"}),
        Step("group_advantages", {"group_size": 8, "scale": "none", "eps": 1e-4}),
        Step("normalize_rewards", {"by": "batch", "shift": False, "eps": 1e-4}),
    )
    read = from_ms_swift({"advantage_estimator": "rloo", "kl_in_reward": False})
    group = {"group_size": 8, "scale": "none", "eps": 1e-4, "baseline": "leave-one-out"}
    assert read.objective.kl_coef == 0.04 and read.advantages == (Step("group_advantages", group),)


# Use of a Reading


def test_every_step_is_a_valid_call() -> None:
    readings = [from_verl(GSPO, {"adv_estimator": n}) for n in ("grpo", "rloo", "reinforce_plus_plus")]
    readings += [from_roll(ROLL | {"reward_norm": "batch", "add_token_level_kl": True}), from_stateset({})]
    readings += [from_ms_swift({"advantage_estimator": n}) for n in ("grpo", "rloo", "reinforce_plus_plus")]
    steps = [step for r in readings for step in (*(r.advantages or ()), *r.token_weights)]
    assert len(steps) > 8
    for call, options in steps:
        if call not in ("subtract_kl", "clamp"):
            function = getattr(advantages, call, None) or getattr(sampler_mismatch, call)
            inspect.signature(function).bind_partial(**options)


def test_the_steps_of_a_reading_compute_rolls_advantages() -> None:
    """The steps, run in order, compute ROLL's advantages. test_recipes.py spells out ROLL's complete pipeline."""
    batch = rollout(Objective())
    rewards = torch.arange(12, dtype=torch.float64) - 4
    x: Any = rewards
    settings = {"reward_norm": "batch", "whiten_advantages": True, "advantage_clip": 1.0, "reward_clip": 1.5}
    reading = from_roll(ROLL | settings)
    for call, options in reading.advantages or ():
        mask = (batch.mask,) if call in ("token_returns", "whiten") else ()
        x = getattr(advantages, call)(x, *mask, **options) if call != "clamp" else x.clamp(**options)
    normal = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).clamp(-1.5, 1.5)
    tokens = normal[:, None].expand_as(batch.mask)[batch.mask]
    white = ((tokens - tokens.mean()) * (tokens.var() + 1e-8).rsqrt()).clamp(-1, 1)
    torch.testing.assert_close(x[batch.mask], white)
    out = policy_loss(batch.log_probs, x, mask=batch.mask, old_log_probs=batch.old, objective=reading.objective)
    assert out.loss.isfinite()
