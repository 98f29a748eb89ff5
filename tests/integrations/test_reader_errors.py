"""Errors of the readers of other trainers' settings.

Every setting is read, listed in the returned Reading, or named in an error.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from helpers.trainer_settings import GSPO, ROLL, dataclass_of, trl_config
from hypothesis import given
from hypothesis import strategies as st

from gspo_kernels.integrations.settings import (
    Reading,
    from_ms_swift,
    from_roll,
    from_stateset,
    from_trl,
    from_verl,
    tables,
)

REFUSED: list[tuple[Callable[..., Reading], Any, str]] = [
    (
        from_verl,
        {"policy_loss": {"loss_mode": "kl_cov"}},
        r"policy_loss\.loss_mode must be one of 'gspo'.* got 'kl_cov'",
    ),
    (
        from_verl,
        {"policy_loss": {"loss_mod": "gspo"}},
        r"got 'policy_loss\.loss_mod' \(is it 'policy_loss\.loss_mode'\?\)",
    ),
    (
        from_verl,
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        "loss_scale_factor must be a number of tokens.* got None",
    ),
    (from_verl, {"use_kl_loss": True, "kl_loss_type": "full"}, "kl_loss_type must be one of .* got 'full'"),
    (
        from_verl,
        {"policy_loss": {"loss_mode": "sapo"}, "entropy_coeff": 0.1},
        r"entropy_coeff must be 0 with sapo.* got 0\.1",
    ),
    (from_verl, {"clip_ratio_c": 0.9}, r"clip_ratio_c must be a number > 1, got 0\.9"),
    (from_verl, {"clip_ratio_low": "wide"}, "clip_ratio_low must be a number >= 0, or None, got 'wide'"),
    (from_verl, {"policy_loss": {"loss_mode": ["gspo"]}}, r"loss_mode must be .* got \['gspo'\]"),
    (from_verl, {**GSPO, "policy_loss.loss_mode": "gpg"}, r"policy_loss\.loss_mode must be given once, got it twice"),
    (from_verl, {**GSPO, "clip_ratio_low": 1.5}, r"from_verl: no Objective has these settings .*clip_low.* got 1\.5"),
    (from_stateset, {"num_generations": 2.5}, r"num_generations must be a whole number >= 1, got 2\.5"),
    (from_verl, {"policy_loss": 3}, "policy_loss must be a mapping or a dataclass instance, got 3"),
    (from_verl, [GSPO], "settings must be a mapping or a dataclass instance"),
    (from_roll, {**ROLL, "loss_agg_mode": "mean"}, "loss_agg_mode must be one of 'seq-mean-token-mean'.* got 'mean'"),
    (from_roll, {"adv_estimator": "reinforce"}, "loss_agg_mode must be given"),
    (from_roll, {**ROLL, "adv_estimator": "gae"}, "adv_estimator must be one of 'reinforce', 'grpo'.* got 'gae'"),
    (from_roll, {**ROLL, "use_topr_loss": True}, "use_topr_loss must be 0 .* got True"),
    (
        from_roll,
        {**ROLL, "rl_loss_coef": 0.5},
        r"rl_loss_coef must be 1\.0 \(multiply the loss by this factor yourself\), got 0\.5",
    ),
    (
        from_roll,
        {**ROLL, "actor_train": {"worker_cls": "roll.x.ActorPGWorker"}},
        r"actor_train\.worker_cls must be None or",
    ),
    (from_roll, {**ROLL, "whiten_rewards": True}, "whiten_rewards must be False"),
    (
        from_roll,
        {**ROLL, "reward_norm": "group", "norm_mean_type": "group"},
        "reward_norm must be None beside norm_mean",
    ),
    (
        from_roll,
        {**ROLL, "norm_mean_type": "batch", "norm_std_type": "group"},
        "norm_std_type must be 'batch' as norm_mean",
    ),
    (
        from_roll,
        {**ROLL, "reward_norm": "running", "reward_shift": True, "reward_scale": True},
        "reward_shift must be False",
    ),
    (from_roll, {**ROLL, "loss_agg_mode": "seq-mean-token-sum-norm"}, "response_length must be given"),
    (from_roll, {**ROLL, "add_token_level_kl": True, "target_kl": 0.1}, r"target_kl must be None .* got 0\.1"),
    (from_roll, {**ROLL, "use_kl_loss": "yes"}, "use_kl_loss must be True or False, got 'yes'"),
    (from_roll, {**ROLL, "pg_clip": "${clip}"}, r"pg_clip must be a number >= 0, got '\$\{clip\}'"),
    (from_stateset, {"beta": 0.01, "use_reference_model": True}, r"beta must be 0\.0 \(its KL is k3 .* got 0\.01"),
    (from_stateset, {"objective": "gepo"}, "objective must be None or .* got 'gepo'"),
    (from_stateset, {"use_gspo_token": True}, "use_gspo_token must be False, or given together with `objective`"),
    (from_ms_swift, {"rlhf_type": "dpo"}, "rlhf_type must be 'grpo' .* got 'dpo'"),
    (from_ms_swift, {"loss_type": "real"}, "loss_type must be one of 'grpo'.* got 'real'"),
    (from_ms_swift, {"loss_type": "cispo"}, "epsilon_high must be at least 1 with cispo.* got None"),
    (from_ms_swift, {"top_entropy_quantile": 0.2}, r"top_entropy_quantile must be 1\.0 .* got 0\.2"),
    (from_ms_swift, {"teacher_model": "m"}, "teacher_model must be None .* got 'm'"),
    (
        from_ms_swift,
        {"use_vllm": True, "rollout_importance_sampling_mode": "token_mask"},
        "rollout_importance_sampling_mode must be None with a KL term.* got 'token_mask'",
    ),
    (
        from_ms_swift,
        {"use_vllm": True, "beta": 0, "rollout_importance_sampling_mode": "sequence_mask"},
        "rollout_importance_sampling_mode must be one of 'token_truncate'.* got 'sequence_mask'",
    ),
    (from_ms_swift, ["--beta", "0"], "rlhf_type must be 'grpo' .* got 'dpo'"),
    (from_ms_swift, ["swift", "rlhf"], "arguments must be flags that begin with --.* got 'swift'"),
    (from_ms_swift, ["--beta", "0", "--beta", "1"], "--beta must be given once"),
    (from_ms_swift, ["--importance_level", "token"], r"got 'importance_level' \(is it 'importance_sampling_level'\?\)"),
    (from_trl, GSPO, "from_trl: config must be a GRPOConfig"),
]


@pytest.mark.parametrize("read, settings, message", REFUSED)
def test_unsupported_settings_are_named(read: Callable[..., Reading], settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        read(settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loss_type": "vespo"}, "loss_type must be one of 'grpo'.* got 'vespo'"),
        ({"top_entropy_quantile": 0.2}, r"top_entropy_quantile must be 1\.0 .* got 0\.2"),
        ({"loss_type": "cispo"}, "epsilon_high must be at least 1 with cispo.* got None"),
        ({"entropy_coef": 0.01}, r"entropy_coef must be 0 unless loss_type is 'bnpo'.* got 0\.01"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy must be False .* got True"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation must be 'sum_then_normalize'",
        ),
        ({"delta": 1.1}, r"delta must be a number > 1 \+ clip_high = 1\.2.* got 1\.1"),
    ],
)
def test_unsupported_trl_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_trl(trl_config(**settings))


@pytest.mark.parametrize(
    "algorithm, message",
    [
        ({}, "adv_estimator must be one of 'grpo'.* got 'gae'"),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": 0.9}, r"algorithm\.gamma must be 1\.0 .* got 0\.9"),
        (
            {"adv_estimator": "grpo", "use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}},
            "kl_ctrl.type must be 'fixed'",
        ),
        (
            {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "1_2_3"}},
            "rollout_is_threshold must be a number > 0, or a string",
        ),
        (
            {
                "adv_estimator": "grpo",
                "rollout_correction": {"rollout_is": "token", "rollout_is_batch_normalize": True},
            },
            "rollout_is_batch_normalize must be False",
        ),
        ({"adv_estimator": "grpo", "rollout_corection": {}}, r"got 'algorithm\.rollout_corection'"),
    ],
)
def test_unsupported_settings_of_verls_algorithm_are_named(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_verl(GSPO, algorithm)


def test_contradictory_verl_settings_are_named() -> None:
    geo_mean = {"policy_loss": {"loss_mode": "geo_mean"}}
    with pytest.raises(ValueError, match=r"rollout_is must be 'sequence' or None with geo_mean.* got 'token'"):
        from_verl(geo_mean, {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}})
    with pytest.raises(ValueError, match=r"policy_loss\.loss_mode must be another one unless .* got 'bypass_mode'"):
        from_verl({"policy_loss": {"loss_mode": "bypass_mode"}}, {"adv_estimator": "grpo"})


@pytest.mark.parametrize(
    "read, settings, ignored",
    [
        (from_verl, {**GSPO, "clip_ratio_c": 10.0}, {"clip_ratio_c": 10.0}),  # verl's own GSPO recipe
        (from_verl, {"clip_ratio": 3e-4}, {"clip_ratio": 3e-4}),  # clip_ratio_low and _high have defaults
        (from_verl, {**GSPO, "kl_loss_coef": 0.1}, {"kl_loss_coef": 0.1}),
        (from_verl, {**GSPO, "policy_loss": {"loss_mode": "gspo", "dro_beta": 1.0}}, {"policy_loss.dro_beta": 1.0}),
        (from_roll, {**ROLL, "pg_clip": 0.1, "pg_clip_low": 3e-4}, {"pg_clip_low": 3e-4}),
        (from_roll, {**ROLL, "use_pg_clip_range": True, "pg_clip": 0.1}, {"pg_clip": 0.1}),
        (from_roll, {**ROLL, "pg_variant": "topr"}, {"pg_variant": "topr"}),
        (from_roll, {**ROLL, "reward_norm": "group", "reward_scale": True}, {"reward_scale": True}),
        (from_stateset, {"beta": 0.01}, {"beta": 0.01}),
        (from_stateset, {"reward_clip": 5.0, "clip_ratio": 0.2}, {"reward_clip": 5.0}),
        (from_ms_swift, {"kl_coef": 0.1, "tau_pos": 2.0}, {"kl_coef": 0.1, "tau_pos": 2.0}),
        (
            from_ms_swift,
            {"rollout_importance_sampling_mode": "token_mask"},
            {"rollout_importance_sampling_mode": "token_mask"},
        ),
    ],
)
def test_settings_that_the_trainer_ignores_are_named(
    read: Callable[..., Reading], settings: dict[str, Any], ignored: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=f"does not read .*{next(iter(ignored))}="):
        reading = read(settings)
    assert reading.ignored == ignored and not ignored.keys() & set(reading.not_the_loss)


def test_settings_that_trl_ignores_are_named() -> None:
    with pytest.warns(UserWarning, match="sapo_temperature_pos=2.0"):
        reading = from_trl(trl_config(sapo_temperature_pos=2.0, vllm_importance_sampling_clip_max=5.0))
    assert reading.ignored == {"sapo_temperature_pos": 2.0, "vllm_importance_sampling_clip_max": 5.0}


# No setting is silently dropped. A case: the reader, valid settings, names of settings of the loss, other known names.

Case = tuple[Callable[..., Reading], dict[str, Any], Mapping[str, Any], frozenset[str]]
SYSTEMS: dict[str, Case] = {
    "verl": (from_verl, GSPO, tables.VERL, tables.VERL_OTHERS),
    "roll": (from_roll, ROLL, tables.ROLL, tables.ROLL_OTHERS),
    "stateset": (from_stateset, {}, tables.STATESET, tables.STATESET_OTHERS),
    "ms-swift": (from_ms_swift, {"beta": 0.0}, tables.SWIFT, tables.SWIFT_OTHERS),
}


def nested(settings: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the settings with a value added under a dotted name: "a.b" is the entry "b" of section "a"."""
    section, dot, inner = name.partition(".")
    return {**settings, section: nested(settings.get(section) or {}, inner, value) if dot else value}


@pytest.mark.parametrize("system", SYSTEMS)
@given(name=st.text(min_size=1).filter(lambda name: "." not in name), value=st.none() | st.booleans() | st.floats())
def test_an_unknown_key_is_always_named(system: str, name: str, value: Any) -> None:
    read, settings, of_the_loss, other_names = SYSTEMS[system]
    sections = {known.split(".")[0] for known in of_the_loss}
    if name in other_names | of_the_loss.keys() | sections | tables.training_arguments():
        return
    with pytest.raises(ValueError) as error:
        read({**settings, name: value})
    assert repr(name) in str(error.value)


@given(name=st.from_regex("[a-z_]{1,20}", fullmatch=True))
def test_an_unknown_trl_field_is_always_named(name: str) -> None:
    if keyword.iskeyword(name) or name in tables.TRL.keys() | tables.TRL_OTHERS | tables.training_arguments():
        return
    with pytest.raises(ValueError, match=f"got {name!r}"):
        from_trl(dataclass_of(plain_config(), {name: 1}))


@functools.cache
def plain_config() -> Any:
    return trl_config()


def test_unknown_fields_are_listed_with_similar_names() -> None:
    with pytest.raises(ValueError, match=r"got 'epsilon_higher' \(is it 'epsilon_high'\?\), 'ours'"):
        from_trl(dataclass_of(trl_config(), {"epsilon_higher": 0.3, "ours": 1}))


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_setting_of_the_loss_is_dropped(system: str) -> None:
    """An invalid value raises or is listed in `beside` if the setting is read; otherwise it is in `ignored`."""
    read, settings, of_the_loss, _ = SYSTEMS[system]
    for name in of_the_loss:
        value = ["?"]
        try:
            reading = read(nested(settings, name, value))
        except (ValueError, TypeError) as error:
            assert name in str(error)
        else:
            assert (reading.ignored | reading.beside).get(name) == value, name


@pytest.mark.parametrize("system", SYSTEMS)
@given(data=st.data())
def test_other_settings_change_nothing_and_are_listed(system: str, data: st.DataObject) -> None:
    read, settings, _, other_names = SYSTEMS[system]
    plain = sorted(name for name in other_names if "." not in name and name != "num_generations")
    chosen = data.draw(st.dictionaries(st.sampled_from(plain), st.none() | st.integers() | st.text(), max_size=5))
    if "use_vllm" in chosen or "gradient_accumulation_steps" in chosen:
        return
    before, after = read(settings), read({**settings, **chosen})
    assert set(after.not_the_loss) == set(before.not_the_loss) | chosen.keys()
    assert vars(after) | {"not_the_loss": 0} == vars(before) | {"not_the_loss": 0}
