"""Read the settings of ROLL and StateSet Agents. The Reading must describe the loss that the trainer computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from gspo_kernels import Objective
from gspo_kernels.integrations.settings import Reading, Step, from_roll, from_stateset, roll, stateset
from gspo_kernels.sampler_mismatch import RolloutCorrection

ROLL = {"adv_estimator": "reinforce", "importance_sampling": "seq", "loss_agg_mode": "seq-mean-token-mean"}
# The settings on ROLL's GSPO page.
ROLL_PAGE = """
adv_estimator: "reinforce"
importance_sampling: seq
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 2048
response_length: 4096
ppo_epochs: 1
use_kl_loss: true
kl_loss_coef: 0.001
loss_agg_mode: "seq-mean-token-sum"
whiten_advantages: true
advantage_clip: 2.0
dual_clip_loss: true
reward_clip: 10
reward_norm: null
reward_shift: false
reward_scale: false
add_token_level_kl: false
"""


def test_the_settings_of_rolls_page_are_read(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(ROLL_PAGE)
    clamp = lambda bound: Step("clamp", {"min": -bound, "max": bound})  # noqa: E731
    reading = from_roll(file)
    assert reading == Reading(
        Objective.preset("luspo", clip_low=0.2, clip_high=0.2, dual_clip=1.4, kl_coef=0.001),
        "sequences",
        temperature=1.0,
        advantages=(
            clamp(10.0),
            Step("token_returns", {"gamma": 1.0, "reward_clip": 10.0}),
            Step("whiten", {}),
            clamp(2.0),
        ),
    )


WINDOW = {"use_pg_clip_range": True, "pg_clip_low": 3e-4, "pg_clip_high": 4e-4}
TOKEN = {"importance_sampling": "token"}
LENGTH_NORM = {"loss_agg_mode": "seq-mean-token-sum-norm", "sequence_length": 33}
GEOMETRIC = {"train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "geometric"}}}


@pytest.mark.parametrize(
    "settings, objective",
    [
        ({"pg_clip": "3e-4"}, Objective(clip_low=3e-4, clip_high=3e-4)),
        (WINDOW, Objective()),
        (WINDOW | {"dual_clip_loss": True, "pg_clip": 0.5}, Objective(dual_clip=2.0)),
        (TOKEN | {"loss_agg_mode": "token-mean"}, Objective.preset("bnpo")),
        (
            TOKEN | LENGTH_NORM | {"entropy_loss_coef": 0.1},
            Objective.preset("dr_grpo", length_norm=32, entropy_coef=0.1),
        ),
        (TOKEN | GEOMETRIC, Objective.preset("grpo", rollout_correction=RolloutCorrection("geometric", high=1.2))),
    ],
)
def test_roll_settings_give_the_objective(settings: dict[str, Any], objective: Objective) -> None:
    reading = from_roll(ROLL | settings)
    assert reading.objective == objective
    divisor = {"token-mean": "tokens", "seq-mean-token-sum-norm": "one"}.get(objective.aggregation, "sequences")
    assert reading.normalizer == divisor


def normalized(by: str, shift: bool, scale: bool) -> Step:
    groups = {"group_size": 8} if by == "group" else {}
    return Step("normalize_rewards", {"eps": 1e-6, **groups, "by": by, "shift": shift, "scale": scale})


@pytest.mark.parametrize(
    "settings, first",
    [
        ({}, None),
        ({"adv_estimator": "grpo"}, normalized("group", True, True)),
        ({"reward_norm": "batch"}, normalized("batch", True, True)),
        ({"reward_norm": "group", "reward_shift": True}, normalized("group", True, False)),
        ({"reward_norm": "running", "reward_scale": True}, normalized("running", False, True)),
        ({"norm_mean_type": "group"}, normalized("group", True, False)),
        ({"norm_std_type": "batch"}, normalized("batch", False, True)),
        (
            {"norm_mean_type": "group", "norm_std_type": "batch"},
            Step("group_advantages", {"eps": 1e-6, "group_size": 8, "scale": "batch"}),
        ),
    ],
)
def test_rolls_reward_normalization_is_read(settings: dict[str, Any], first: Step | None) -> None:
    steps = from_roll(ROLL | {"num_return_sequences_in_group": 8} | settings).advantages
    assert steps == (*([] if first is None else [first]), Step("token_returns", {"gamma": 1.0}))


def test_rolls_kl_in_rewards_is_read() -> None:
    reading = from_roll(ROLL | {"add_token_level_kl": True, "init_kl_coef": 0.05, "kl_penalty": "mse"})
    returns = {"gamma": 1.0, "kl": "k2, old against reference", "kl_coef": 0.05}
    assert reading.advantages == (Step("token_returns", returns),)


def test_the_settings_of_statesets_guide_are_read() -> None:
    guide: dict[str, Any] = {"num_generations": 6, "clip_range_left": 2e-4, "clip_range_right": 3e-4, "beta": 0.0}
    guide |= {"learning_rate": 3e-6, "use_lora": True, "temperature": 0.7}
    group = Step("group_advantages", {"group_size": 6, "ddof": 0, "eps": 0.0})
    assert (
        from_stateset(guide)
        == from_stateset(make_dataclass("GSPOConfig", guide)(**guide))
        == Reading(
            Objective(clip_low=2e-4, clip_high=3e-4),
            "rows",
            temperature=1.0,
            advantages=(group,),
        )
    )
    token = from_stateset({"use_gspo_token": True, "objective": None, "rescore_old_log_probs": False})
    assert token.objective == Objective(ratio="sequence-token") and token.old_log_probs == "rollout"


# Errors

WEIGHT = "train_infer_correction.is_weight"
REFUSED_BY_ROLL: dict[str, dict[str, Any]] = {
    rf"got '{WEIGHT}.enable' \(is it '{WEIGHT}.enabled'\?\)": {WEIGHT: {"enable": True}},
    "actor_train must be a mapping or a dataclass instance, got 3": {"actor_train": 3},
    r"from_roll: no Objective has these settings .*clip_low.* got 1\.5": {"pg_clip": 1.5},
    "adv_estimator must be one of 'reinforce', 'grpo'.* got 'gae'": {"adv_estimator": "gae"},
    "use_topr_loss must be 0 .* got True": {"use_topr_loss": True},
    r"rl_loss_coef must be 1\.0 \(multiply the loss by this factor yourself\), got 0\.5": {"rl_loss_coef": 0.5},
    "actor_train.worker_cls must be None or": {"actor_train": {"worker_cls": "roll.x.ActorPGWorker"}},
    "whiten_rewards must be False": {"whiten_rewards": True},
    "reward_norm must be None together with norm_mean": {"reward_norm": "group", "norm_mean_type": "group"},
    "norm_std_type must be 'batch' as norm_mean": {"norm_mean_type": "batch", "norm_std_type": "group"},
    "reward_shift must be False": {"reward_norm": "running", "reward_shift": True, "reward_scale": True},
    "response_length must be given": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    r"target_kl must be None .* got 0\.1": {"add_token_level_kl": True, "target_kl": 0.1},
    r"pg_clip must be a number >= 0, got '\$\{clip\}'": {"pg_clip": "${clip}"},
}
REFUSED_BY_STATESET: dict[str, dict[str, Any]] = {
    r"beta must be 0\.0 \(its KL is k3 .* got 0\.01": {"beta": 0.01, "use_reference_model": True},
    "use_gspo_token must be False, or given together with `objective`": {"use_gspo_token": True},
    r"got 'clip_range_lefts' \(is it 'clip_range_left'\?\), 'ours'": {"clip_range_lefts": 3e-4, "ours": 1},
}
REFUSED: list[tuple[Callable[..., Reading], Any, str]] = [
    *((from_roll, {**ROLL, **settings}, message) for message, settings in REFUSED_BY_ROLL.items()),
    *((from_stateset, settings, message) for message, settings in REFUSED_BY_STATESET.items()),
    (from_roll, [ROLL], "settings must be a mapping or a dataclass instance"),
    (from_roll, {"adv_estimator": "reinforce"}, "loss_agg_mode must be given"),
]


@pytest.mark.parametrize("read, settings, message", REFUSED)
def test_unsupported_settings_are_named(read: Callable[..., Reading], settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        read(settings)


# Settings of the loss that the trainer does not read with the settings below
UNREAD_BY_ROLL = """
    difficulty_high_threshold difficulty_low_threshold error_max_len_threshold init_kl_coef kl_loss_coef kl_penalty
    mask_type pg_clip_high pg_clip_low reward_scale reward_shift target_kl train_infer_correction.is_weight.detach
    train_infer_correction.is_weight.upper_bound train_infer_correction.is_weight.weight_type
"""
UNREAD: dict[str, tuple[Callable[..., Reading], dict[str, Any], Mapping[str, Any], str]] = {
    "roll": (from_roll, ROLL, roll.LOSS_DEFAULTS, UNREAD_BY_ROLL),
    "stateset": (from_stateset, {}, stateset.LOSS_DEFAULTS, "beta"),
}


def nested(settings: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the settings with a value added under a dotted name: "a.b" is the entry "b" of section "a"."""
    section, dot, inner = name.partition(".")
    return {**settings, section: nested(settings.get(section) or {}, inner, value) if dot else value}


@pytest.mark.parametrize("system", UNREAD)
def test_no_setting_of_the_loss_is_dropped(system: str) -> None:
    """An invalid value raises, or is in `beside`, unless the trainer itself does not read it."""
    read, settings, of_the_loss, expected = UNREAD[system]
    unread = set()
    for name in of_the_loss:
        try:
            if name not in read(nested(settings, name, ["?"])).beside:
                unread.add(name)
        except (ValueError, TypeError) as error:
            assert name in str(error)
    assert unread == set(expected.split())
