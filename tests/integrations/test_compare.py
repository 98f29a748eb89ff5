"""`gspo compare`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import slow
from tolerance import MODEL_LOG_PROB_ABSOLUTE
from typer.testing import CliRunner

from gspo_kernels.benchmarks.studies import compare, scores
from gspo_kernels.integrations.reference_trainer import trainer
from gspo_kernels.tools.cli import app

CONFIG = replace(compare.config_of("sorting", 2), prompts_per_step=8, group_size=4, eval_prompts=8, eval_every=1)


def trained(names: list[str], study: str, seed: int, **options: Any) -> dict[str, Any]:
    """Results of a study with one seed and one setting."""
    return compare.compare(compare.arms_of(names, study, CONFIG), [seed], [replace(CONFIG, **options)], study, str)


def test_all_arms_begin_alike_and_gspo_token_trains_as_gspo() -> None:
    (gspo,), (token,), (grpo,) = trained(["gspo", "gspo-token", "grpo"], "dense", 3)["runs"].values()
    assert gspo["held-out reward"] == token["held-out reward"]
    assert gspo["held-out reward"][0] == grpo["held-out reward"][0] and len(grpo["held-out reward"]) == 3
    for run in (gspo, token, grpo):
        first = {name: values[0] for name, values in run["by update"].items() if name != "entropy"}
        assert set(first.values()) == {0.0}
        assert run["by update"]["token_log_ratio_std"][-1] > run["by update"]["sequence_log_ratio_std"][-1] > 0


def test_bodies_and_samplers_in_half_precision_are_compared_with_fp32() -> None:
    """In the first update, log-ratios are 0 unless the old log-probs are those of the rounded sampler.

    Full logits in half precision change log-probs, and so the training.
    """
    results = trained(["gspo"], "rounding", 0, learning_rate=5e-3)
    _, rows = scores.rows(results)
    bodies = [f"GSPO + {body}{head}" for body in compare.BODIES for head in ("", scores.FULL_LOGITS)]
    assert [row[0] for row in rows[:10]] == ["GSPO", *bodies, "GSPO + bf16 sampler"]
    by_update = {arm: runs[0]["by update"] for arm, runs in results["runs"].items()}
    for arm, x in by_update.items():
        first = x["token_log_ratio_std"][0]
        assert first > MODEL_LOG_PROB_ABSOLUTE if arm.endswith(scores.SAMPLER) else first == 0, arm
        assert ("rollout_weight_mean" in x) == arm.endswith(("TIS", "MIS"))
    assert by_update["gspo" + scores.TIS]["rollout_weight_mean"][0] != 1
    assert len({str(by_update[label.replace("GSPO", "gspo")]["entropy"]) for label in bodies}) == len(bodies)


def test_a_training_that_is_not_finite_stops_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def diverge(*arguments: Any) -> Any:
        # the first update of the first training's second rollout, and of the second training's first rollout
        if next(calls) in (CONFIG.updates_per_rollout, CONFIG.updates_per_rollout + 1):
            arguments[1].head.weight.data.fill_(torch.nan)
        return update(*arguments)

    update = trainer.update
    monkeypatch.setattr(trainer, "update", diverge)
    results = trained(["gspo", "grpo"], "dense", 0)
    (gspo,), (grpo,) = results["runs"].values()
    assert gspo["held-out reward"][1] > 0 == gspo["held-out reward"][2] and scores.collapsed(gspo)
    assert grpo["held-out reward"][0] > 0 == sum(grpo["held-out reward"][1:]) and grpo["by update"] == {}
    header, rows = scores.rows(results)
    assert rows[1][header.index("tokens clipped")] == "-"


def runs_of(*grid: tuple[float, list[float]]) -> list[dict[str, Any]]:
    """Trainings with a score by setting and seed: the learning rate, and a score for each seed."""
    shared = {"updates": 4, "by update": {"token_clip_fraction": [0.0, 0.5]}}
    return [
        {"seed": seed, "learning rate": rate, "held-out reward": [0.0, score, 2 * score], **shared}
        for rate, scores in grid
        for seed, score in enumerate(scores)
    ]


def test_each_seed_is_judged_at_the_setting_that_is_best_for_the_other_seeds() -> None:
    runs = runs_of((1.0, [0.3, 0.3, 0.3]), (2.0, [0.9, 0.1, 0.2]))
    assert scores.scores(scores.at_best(runs)) == pytest.approx([0.3, 0.1, 0.2])
    assert scores.over_grid(runs) == pytest.approx([0.6, 0.2, 0.25])
    assert scores.chosen(runs) == "2 x 4 (2 seeds), 1 x 4 (1 seed)"
    (single,) = scores.at_best(runs_of((1.0, [0.1]), (2.0, [0.2])))
    assert single["learning rate"] == 2.0


def test_collapse_and_differences() -> None:
    fell, kept = ({"held-out reward": [0.1, 0.6, end]} for end in (0.29, 0.3))
    assert scores.collapsed(fell) and not scores.collapsed(kept)
    gap = scores.gap([0.3, 0.4, 0.4], [0.25, 0.35, 0.3])
    assert gap["95 %"] == pytest.approx([0.2 / 3 - 4.303 * 0.05 / 3, 0.2 / 3 + 4.303 * 0.05 / 3])
    assert scores.about([0.5]) == {"mean": 0.5, "95 %": None}
    names = {"gspo": 0.1, "gspo + bf16": 0.2, "grpo": 0.4, "grpo + bf16": 0.8}
    runs = {name: runs_of((1.0, [x] * 3)) for name, x in names.items()}
    found = [scores.difference(runs, name, scores.best_scores) for name in names]
    expected = ["-", *(f"{x} ({x} to {x})" for x in ("+0.100", "+0.300", "+0.400"))]  # to the objective, or to GSPO
    assert found == expected and len(scores.changes(runs)) == 2


@pytest.mark.parametrize("study", ["dense", slow("long"), "teachers"])
def test_the_command_writes_results(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "compare-cpu.json"
    small = compare.STUDIES[study]._replace(learning_rates=(1e-3, 3e-3), updates=(4,))
    monkeypatch.setitem(compare.STUDIES, study, small)
    for longer in (compare.WARM_UP, compare.TAUGHT):
        monkeypatch.setitem(longer, "steps", 2)
    options = ["--study", study, "--seeds", "0", "--steps", "1", "--output", str(path)]
    result = CliRunner().invoke(app, ["compare", *options])
    assert result.exit_code == 0, result.output
    assert "GSPO" in result.output and str(path) in result.output
    for runs in json.loads(path.read_text())["results"]["runs"].values():
        assert [(r["learning rate"], r["updates"]) for r in runs] == [(1e-3, 4), (3e-3, 4)]
        assert [len(run["by update"]["clip_fraction"]) for run in runs] == [4, 4]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--objectives", "gspo,gsop"], "--objectives: "),
        (["--study", "mix"], "--study: expected dense, rounding, long, teachers, got 'mix'"),
        (["--seeds", "1,1"], "got '1,1'"),
        (["--seeds", f"0,{2**32}"], "--seeds: expected at most 10 different numbers from 0 to 2**32 - 1, such as"),
    ],
)
def test_bad_options_of_compare_print_one_line(option: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", *option, "--output", str(tmp_path / "x.json")])
    assert result.exit_code == 1 and message in result.stderr
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
