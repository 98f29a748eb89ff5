"""Held-out rewards: intervals, paired differences, verdicts, files of prompts, pass@k."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from helpers.reference_runs import SMALL, rows_of, small, write_jsonl
from transformers import AutoTokenizer, GenerationConfig

from gspo_kernels.integrations.reference_trainer import InputError, policy, read_config, train, train_config
from gspo_kernels.integrations.reference_trainer.evaluation import EvalOptions, of_samples
from gspo_kernels.integrations.reference_trainer.held_out import (
    PARTS,
    Estimate,
    difference,
    estimate,
    held_out_results,
    named,
    pass_at_k,
    sentence,
    verdict,
)
from gspo_kernels.integrations.tasks import RewardComponent

# Intervals and verdicts


def known(of: Estimate | None) -> Estimate:
    assert of is not None
    return of


def test_the_interval_is_that_of_all_resamples() -> None:
    """Of four prompts, all 256 resamples can be listed."""
    values = [0.0, 1.0, 1.0, 5.0]
    means = [fmean(x) for x in itertools.product(values, repeat=4)]
    mean, low, high, prompts = known(estimate(values))
    assert (mean, prompts) == (fmean(values), 4)
    assert (low, high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.26)  # a quarter between means
    assert estimate([None, *values, None]) == estimate(values) and estimate([None]) is None


def test_a_difference_is_paired() -> None:
    """Prompts differ much more than their rewards change, so intervals of the two means overlap."""
    start = [float(i) for i in range(20)]
    now = [x + 0.1 + 0.01 * (i % 3) for i, x in enumerate(start)]
    change = known(difference(now, start))
    assert known(estimate(now)).low < known(estimate(start)).high and verdict(change) == "better"
    assert change.mean == pytest.approx(0.1095)
    assert verdict(known(difference(start, now))) == "worse"
    assert difference([1.0, None, 3.0], [0.0, 0.0, None]) == Estimate(1.0, 1.0, 1.0, 1)


def test_a_verdict_needs_an_interval_without_0_and_enough_prompts() -> None:
    for change, expected in [
        (Estimate(0.1, 0.01, 0.2, 10), "better"),
        (Estimate(0.1, 0.0, 0.2, 1000), "not decided"),
        (Estimate(-0.1, -0.2, -0.01, 10), "worse"),
        (Estimate(1.0, 1.0, 1.0, 9), "not decided"),
    ]:
        assert verdict(change) == expected


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer() -> None:
    answers = [1, 0, 0, 1, 0, 0]
    for k in range(1, 7):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(2, 6, k) == pytest.approx(fmean(any(subset) for subset in subsets))
    assert (pass_at_k(0, 6, 1), pass_at_k(6, 6, 6)) == (0.0, 1.0)
    measures = of_samples([1.0, None, None, None, 0.0, 0.0, 0.0, 1.0], EvalOptions(n=4))
    found = {name: x and (x.mean, x.prompts) for name, x in measures.items()}
    # Only one answer to the first prompt has a reward, so this prompt has no pass@2.
    assert found == {"sampled": (0.625, 2), "pass@1": (0.625, 2), "pass@2": (0.5, 1), "pass@4": (1.0, 1)}


def test_a_component_that_falls_is_named_although_the_total_rises() -> None:
    """A format bonus must not hide that fewer answers are right."""

    def row(right: float, form: float, changes: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for suffix, x in {"": right + form, "/right": right, "/form": form}.items():
            metrics |= named("eval_reward", suffix, Estimate(x, x, x, 40))
            metrics |= named("eval_change", suffix, Estimate(*changes[suffix], 40)) if changes else {}
        return metrics

    changes = {"": (0.3, 0.2, 0.4), "/right": (-0.2, -0.3, -0.1), "/form": (0.5, 0.4, 0.6)}
    results = held_out_results([row(0.3, 0.1, {}), row(0.1, 0.6, changes)])
    assert [(x.name, x.verdict) for x in results] == [
        ("total", "better"),
        ("right", "worse"),
        ("form", "better"),
    ]
    assert sentence(results) == (
        "better: the held-out reward went from 0.400 to 0.700, a change of +0.300 (95% interval +0.200 to "
        "+0.400, 40 prompts). Worse: right"
    )


# Runs


def length(completion: str, answer: str) -> float:
    return float(len(completion))


def brief(completion: str, answer: str) -> float | None:
    return None if len(answer) == 4 else float(len(completion) < 7)


REWARDS = [RewardComponent("length", 1.0, length), RewardComponent("brief", 2.0, brief)]


def test_a_run_writes_each_held_out_reward_with_its_interval_and_change(tmp_path: Path) -> None:
    report = train(small(tmp_path, eval_prompts=12, learning_rate=0.1), reward=REWARDS)
    first, *_, last = rows_of(report.folder)
    assert "eval_change" not in first and "eval_rewards" not in rows_of(report.folder)[1]
    for row in (first, last):
        by_prompt = row["eval_rewards"]
        lengths, briefs = by_prompt["components"]["length"], by_prompt["components"]["brief"]
        assert row["eval_reward_prompts"] == len(lengths) == 12 and {None} < set(briefs)
        assert by_prompt["total"] == [x + 2 * (y or 0.0) for x, y in zip(lengths, briefs, strict=True)]
        for suffix, values in {"": by_prompt["total"], "/length": lengths, "/brief": briefs}.items():
            shown = [row[f"eval_reward{part}{suffix}"] for part in PARTS]
            assert shown == pytest.approx(list(known(estimate(values)))), suffix
    changes = known(difference(last["eval_rewards"]["total"], first["eval_rewards"]["total"]))
    assert [last[f"eval_change{part}"] for part in PARTS] == list(changes) and changes.mean != 0
    (result,) = report.results
    applies = 12 - briefs.count(None)
    compared = {"total": 12, "length": 12, "brief": applies}
    assert {x.name: known(x.change).prompts for x in result.held_out} == compared and applies < 12
    assert result.held_out[0].change == changes
    table = report.table()
    assert [*table.columns[1].cells] == ["total", "length", "brief"]
    assert [*table.columns[5].cells] == ["12", "12", str(applies)]
    of_total = [next(iter(column.cells)) for column in table.columns[2:5]]
    expected = []
    for row, name, form in (
        (first, "eval_reward", ".3f"),
        (last, "eval_reward", ".3f"),
        (last, "eval_change", "+.3f"),
    ):
        numbers = [format(row[f"{name}{part}"], form) for part in PARTS[:3]]
        expected.append("{} [{}, {}]".format(*numbers))
    assert of_total == expected


def test_prompts_of_eval_data_are_evaluated_and_all_others_trained_on(tmp_path: Path) -> None:
    policy.demo_policy("sort abcdef:").save(tmp_path / "tiny")
    data = write_jsonl(tmp_path / "train.jsonl", *({"prompt": f"sort {x}:", "answer": x} for x in "abc"))
    held_out = [{"prompt": f"sort {x}:", "answer": x, "level": 2} for x in "def"]
    paths = {"data": data, "eval_data": write_jsonl(tmp_path / "eval.jsonl", *held_out)}
    sizes = {**SMALL, "eval_prompts": None, "steps": 1, "max_new_tokens": 2, "output": tmp_path}
    report = train(train_config(model=tmp_path / "tiny", name="mine", **paths, **sizes))
    written = [json.loads(line) for line in (report.folder / "held_out.jsonl").read_text().splitlines()]
    assert written == held_out and rows_of(report.folder)[0]["eval_reward_prompts"] == 3
    assert "At least 10 prompts are needed to decide" in report.summary()[0]
    write_jsonl(paths["eval_data"], *held_out[:2])
    with pytest.raises(InputError, match=r"data: expected the prompts with which .* got 5 prompts, which"):
        train(read_config(resume=report.folder))
    shared = write_jsonl(tmp_path / "shared.jsonl", *held_out, {"prompt": "sort b:", "answer": "b"})
    empty = write_jsonl(tmp_path / "empty.jsonl", "")
    for options, message in [
        ({"eval_data": shared}, "1 prompts are both trained on and held out, such as 'sort b:'"),
        ({"eval_data": empty}, "eval_data .*empty.jsonl: expected at least 1 prompt, got 0"),
        ({"eval_prompts": 2}, "eval_prompts: expected no value with eval_data, which is used entirely, got 2"),
        ({"data": None}, "eval_data: expected none without data=FILE to train on"),
    ]:
        with pytest.raises(InputError, match=message):
            train(train_config(model=tmp_path / "tiny", name="other", **{**sizes, **paths, **options}))
    assert not (tmp_path / "other").exists()


def test_held_out_rewards_that_something_else_defines_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy.demo_policy("sort abcdefgh:").save(Path("tiny"))
    write_jsonl(Path("data.jsonl"), *({"prompt": f"sort {x}:", "answer": x} for x in "abcdefgh"))
    rewards = Path("rewards.py")
    rewards.write_text("def length(completion):\n    return len(completion)\n")
    options = {"model": "tiny", "data": "data.jsonl", "reward": "rewards.py:length", "max_new_tokens": 4}
    train(small(tmp_path, **options, output="runs", steps=1, checkpoint_every=1))
    report = train(read_config(texts=["steps=2", "learning_rate=1e-3"], resume="runs/tiny"))
    assert "eval_change" in rows_of(report.folder)[-1] and "not compared" not in capsys.readouterr().out
    rewards.write_text(f"{rewards.read_text()}# changed\n")
    config, tokenizer = GenerationConfig.from_pretrained("tiny"), AutoTokenizer.from_pretrained("tiny")
    config.eos_token_id = [1, 3]
    config.save_pretrained("tiny")
    tokenizer.chat_template = "a{{ messages[0].content }}"
    tokenizer.save_pretrained("tiny")
    said = "code of the reward length, weights of rewards, reward_timeout, max_new_tokens, tokens that end an answer, "
    said += "encoding of the held-out prompts"
    changes = ["reward=3*rewards.py:length", "reward_timeout=9", "max_new_tokens=3"]
    for steps in (3, 4):  # the second resume compares with the first evaluation too
        report = train(read_config(texts=[f"steps={steps}", *changes], resume="runs/tiny"))
        assert "eval_change" not in rows_of(report.folder)[-1]
        note = "held-out rewards from here on are not compared with those of step 0. Changed since then: "
        assert f"resume: {note}{said}\n" in capsys.readouterr().out
        results = report.results[0].held_out
        assert sentence(results).startswith("not comparable: what defines the held-out rewards has changed")
