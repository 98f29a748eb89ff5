"""Padding, answers with advantage 0, and the backward of clipped answers do not run, and no update changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from helpers.reference_runs import moe_checkpoint, rows_of, small
from tolerance import LOSS_PER_ADVANTAGE, METRIC_ABSOLUTE, TRAINER_ABSOLUTE, TRAINER_LOG_RELATIVE
from torch import nn

from gspo_kernels.integrations.reference_trainer import InputError, train, update, zero_advantage
from gspo_kernels.integrations.reference_trainer.config import TrainConfig
from gspo_kernels.integrations.reference_trainer.loading import initial_policy
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.reference_trainer.zero_advantage import live_rows, rows_to_run, skipping
from gspo_kernels.integrations.tasks import RewardComponent
from gspo_kernels.sampler_mismatch import RolloutCorrection

# The share of the prompts whose answers all have the same reward, and options. An update has four answers.
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "one micro-batch": (0.5, {}),
    "gradient budget": (0.5, {"micro_batch_size": 2, "gradient_budget": 0.3, "epochs": 2}),
    "no live answers": (1.0, {}),
    "kept sets": (0.5, {"top_p": 0.9, "micro_batch_size": 2}),
    "advantages of tokens": (0.5, {"objective": "gspo-token", "advantages": ["group_advantages", "token_returns"]}),
    "divided by tokens": (0.5, {"objective": "dapo", "old_log_probs": "sampler"}),
    "correction of the sampler": (0.5, {"rollout_correction": RolloutCorrection(), "precision": "autocast"}),
}
SAME = ("loss", "grad_norm", "clip_fraction", "token_clip_fraction_low", "zero_coefficient_share", "reward")


def rewards_of(dead: float) -> list[RewardComponent]:
    """Make a reward: 1 for every answer to a share of the prompts, otherwise the share of distinct characters."""

    def reward(completion: str, answer: str) -> float:
        return 1.0 if crc32(answer.encode()) % 4 < 4 * dead else len(set(completion)) / 8

    return [RewardComponent("reward", 1.0, reward)]


def run(folder: Path, skips: bool, dead: float, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train. Return the metrics of each step and the optimizer's state."""
    sizes = {"steps": 1, "checkpoint_every": 1, "learning_rate": 1e-3, "weight_decay": 0.1, "group_size": 8}
    config = small(folder, name=str(skips), skip_zero_advantage=skips, **{**sizes, **options})
    run_folder = train(config, reward=rewards_of(dead)).folder
    return rows_of(run_folder)[1:], torch.load(run_folder / "checkpoint.pt")["optimizer"]["weights"]


def compare(runs: list[tuple[list[dict[str, Any]], dict[str, Any]]]) -> None:
    (rows, weights), (our_rows, our_weights) = runs
    for row, ours in zip(rows, our_rows, strict=True):
        for name in SAME:
            limit = LOSS_PER_ADVANTAGE if name == "loss" else METRIC_ABSOLUTE
            assert ours[name] == pytest.approx(row[name], rel=TRAINER_LOG_RELATIVE, abs=limit), name
    for name, values in weights.items():
        torch.testing.assert_close(our_weights[name]["weight"], values["weight"], rtol=0, atol=TRAINER_ABSOLUTE)
        assert our_weights[name].keys() == values.keys()  # moments, also of weights whose gradient is 0


@pytest.mark.parametrize("name", CASES)
def test_training_equals_training_on_all_rows_and_padding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, options = CASES[name]
    with monkeypatch.context() as patch:
        patch.setattr(update, "rows_by_length", lambda policy, rollout, live, rows: rows)
        patch.setattr(update, "columns_to_run", lambda policy, rollout: slice(0, rollout.input_ids.shape[1]))
        stock = run(tmp_path, False, dead, **options)
    ours = run(tmp_path, True, dead, gradient_checkpointing=True, **options)
    compare([stock, ours])
    row = ours[0][0]
    assert stock[0][0]["rows_run"] == 1 > row["rows_run"] and "rows_differentiated" not in stock[0][0]
    if options.get("objective") != "dapo":  # which clips tokens
        assert row.get("rows_differentiated", 0) < 1  # clipped answers ran, and were not differentiated


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 4}, {"precision": "bf16"}])
def test_old_log_probs_have_the_bits_of_the_updates(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights do not change, so every ratio is 1: old and new log-probs come from the same micro-batches."""
    fused, log_ratios = update.gspo_fused_loss, []

    def recording(*args: Any, **arguments: Any) -> Any:
        out = fused(*args, **arguments)
        log_ratios.append((arguments["old_log_probs"] is None, out.log_ratio))
        return out

    monkeypatch.setattr(update, "gspo_fused_loss", recording)
    rows, _ = run(tmp_path, True, 0.5, learning_rate=1e-30, weight_decay=0.0, **options)
    assert all((log_ratio == 0).all() for _, log_ratio in log_ratios)
    assert log_ratios[0][0] and not log_ratios[-1][0] and rows[0]["rows_run"] < 1


def test_the_first_update_stores_its_log_probs_for_the_second_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"epochs": 2, "updates_per_rollout": 2}
    reused = run(tmp_path / "reused", True, 0.5, **options)
    original = zero_advantage.skipping
    monkeypatch.setattr(
        "gspo_kernels.integrations.reference_trainer.trainer.skipping",
        lambda *arguments: original(*arguments)._replace(reuses_first=False),
    )
    recomputed = run(tmp_path / "recomputed", True, 0.5, **options)
    assert reused[0][0]["kl_to_old"] == recomputed[0][0]["kl_to_old"]
    assert all(torch.equal(x["weight"], recomputed[1][name]["weight"]) for name, x in reused[1].items())


def test_rows_are_live_by_mask_and_advantage() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]]).bool()
    advantages = torch.tensor([1e-30, 1.0, 1.0, 0.0, torch.nan])
    assert live_rows(advantages, mask).tolist() == [True, True, False, False, True]
    of_tokens = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    assert live_rows(of_tokens, mask).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(("processes", "expected"), [(1, [7, 1, 4]), (2, [7, 3, 1, 4]), (3, [7, 3, 1, 4, 5, 2])])
def test_all_processes_run_equally_many_rows(
    processes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_advantage, "world", lambda: processes)
    live = torch.zeros(8, dtype=torch.bool)
    rows = torch.tensor([7, 3, 1, 4, 5, 2])
    assert len(rows_to_run(live, rows)) == processes  # without live rows, every process runs one
    live[[1, 4, 7]] = True
    if processes == 3:
        live[0] = live[5] = True  # four live rows among `rows`
    assert rows_to_run(live, rows).tolist() == expected
    assert torch.equal(rows_to_run(None, rows), rows)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"kl_coef": 0.1}, "kl_coef=0.1"),
    ({"entropy_coef": 0.01}, "entropy_coef=0.01"),
    ({"advantages": [{"subtract_kl": {"kl_coef": 0.1, "kl_estimator": "k1"}}]}, "advantages that contain a KL"),
]


@pytest.mark.parametrize(("options", "reason"), SETTINGS)
def test_a_setting_that_makes_skipping_inexact_is_named(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    policy = demo_policy()
    assert skipping(small(tmp_path, **options), policy)[::2] == (False, f"skip_zero_advantage=false ({reason})")
    with pytest.raises(InputError, match=f"skip_zero_advantage: expected false or none with {reason}, got true"):
        skipping(small(tmp_path, skip_zero_advantage="true", **options), policy)
    assert not skipping(small(tmp_path, skip_zero_advantage=False), policy).is_on


def test_a_part_of_the_model_that_makes_skipping_inexact_is_named(tmp_path: Path) -> None:
    policy = demo_policy()
    assert skipping(TrainConfig(), policy)[:2] == (True, True)
    policy.model.model.rotary_emb.rope_type = {"full_attention": "dynamic"}
    assert "(rope_type='dynamic')" in skipping(TrainConfig(), policy).description
    policy.model.model.layers[0].experts = nn.ModuleList([nn.Linear(2, 2)])
    assert "(experts that are separate modules in model.layers.0)" in skipping(TrainConfig(), policy).description
    config = small(tmp_path, model=str(moe_checkpoint(tmp_path / "experts")))
    assert "router_aux_loss_coef=0.5" in skipping(config, initial_policy(config)).description
