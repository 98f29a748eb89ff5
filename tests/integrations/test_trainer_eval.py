"""`gspo eval`: a run's model on its held-out prompts, other models and prompts, pass@k, refused arguments."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers.reference_runs import rows_of, small, write_jsonl
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import evaluate, read_evaluation, train
from gspo_kernels.integrations.reference_trainer.evaluation import EvalReport
from gspo_kernels.integrations.reference_trainer.held_out import Estimate
from gspo_kernels.tools.cli import app

REWARDS = """
def length(completion):
    return float(len(completion))

def long(completions, answer):
    return [None if len(expected) == 4 else len(text) >= 7 for text, expected in zip(completions, answer)]

def of_level(completion, level):
    return level
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the sorting task with two rewards."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "rewards.py").write_text(REWARDS)
    reward = (f"{folder}/rewards.py:length", f"0.5*{folder}/rewards.py:long")
    return train(small(folder, seeds=(3, 0), steps=1, eval_prompts=12, reward=reward, save=True)).folder


def gspo_eval(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_run_is_evaluated_as_its_last_evaluation_was(run: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    for seed, options in ((3, []), (0, ["seed=0"])):
        last = [row for row in rows_of(run) if row["seed"] == seed][-1]
        report = gspo_eval(run, "n=4", "batch_size=5", *options, *(["--answers", answers] if seed == 3 else []))
        assert (report["prompts"], report["samples"], list(report["rewards"])) == (12, 4, ["total", "length", "long"])
        for name, measures in report["rewards"].items():
            suffix = "" if name == "total" else f"/{name}"
            shown = [last[f"eval_reward{part}{suffix}"] for part in ("", "_low", "_high", "_prompts")]
            assert list(measures["greedy"].values()) == pytest.approx(shown)
            assert list(measures) == ["greedy", "sampled", "pass@1", "pass@2", "pass@4"]
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["greedy"] * 12 + ["sampled"] * 48
    written = [json.loads(line)["prompt"] for line in (run / "held_out.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines[12:]] == [prompt for prompt in written for _ in range(4)]
    assert read_evaluation(str(run), ["reward_timeout=7"]).task.rewards.timeout == 7
    report = gspo_eval(run, "n=4", "passing=7")
    lengths = [line["components"]["length"] for line in lines[12:]]
    assert report["rewards"]["length"]["sampled"]["mean"] == pytest.approx(fmean(lengths))  # in batches of another size
    by_prompt = [lengths[i : i + 4] for i in range(0, 48, 4)]
    assert report["rewards"]["length"]["pass@4"]["mean"] == fmean(max(x) >= 7 for x in by_prompt)
    assert report["rewards"]["length"]["pass@1"]["mean"] == pytest.approx(fmean(x >= 7 for x in lengths))
    applies = [line["components"]["long"] for line in lines[12:] if line["components"]["long"] is not None]
    assert 0 < len(applies) < 48 and report["rewards"]["long"]["sampled"]["mean"] == pytest.approx(fmean(applies))


def test_a_model_is_evaluated_on_a_file_or_a_task(run: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"sort {x}:", "answer": x, "level": i} for i, x in enumerate("abcd")]
    longer = {"prompt": "sort dcba:", "answer": "abcd", "level": 99}
    data = write_jsonl(tmp_path / "data.jsonl", *rows, longer)
    reward = f"reward={run.parent}/rewards.py:of_level"
    for source in (run, run / "model-seed3"):
        report = gspo_eval(source, f"data={data}", reward, "n=0", "max_new_tokens=3", "max_prompt_tokens=7")
        assert report["prompts"] == 4  # without the longer one
        assert report["rewards"] == {
            "total": {"greedy": pytest.approx({"mean": 1.5, "low": 0.5, "high": 2.5, "prompts": 4}, abs=0.26)}
        }
    many = write_jsonl(tmp_path / "many.jsonl", *({"prompt": f"sort {i}:", "answer": "a"} for i in range(140)))
    for cut, expected in (([], 140), (["eval_prompts=9"], 9)):
        task = read_evaluation(str(run), [f"data={many}", *cut]).task
        assert len(task.held_out) == expected and [x.name for x in task.rewards.components] == ["length", "long"]
    assert read_evaluation(str(run), ["task=sorting", "eval_prompts=5"]).prompts.startswith("sorting: ")
    report = gspo_eval(run / "model-seed3", "task=sorting", "eval_prompts=5", "n=1", "max_new_tokens=7", "k=1")
    assert report["prompts"] == 5 and list(report["rewards"]["total"]) == ["greedy", "sampled", "pass@1"]


def test_the_table_has_each_estimate() -> None:
    of_total: dict[str, Estimate | None] = {
        "greedy": Estimate(0.5, 0.25, 0.75, 3),
        "sampled": Estimate(0.125, 0.0, 1.0, 3),
        "pass@1": None,
    }
    of_long: dict[str, Estimate | None] = dict.fromkeys(of_total, Estimate(1.0, 0.5, 2.0, 3))
    table = EvalReport("model", 3, "data", 4, 1.0, {"total": of_total, "long": of_long}, []).table()
    labels, total, long = ([*column.cells] for column in table.columns)
    assert labels == ["greedy", "mean of 4 samples", "pass@1"]
    assert total == ["0.500 [0.250, 0.750]", "0.125 [0.000, 1.000]", "-"]
    assert long == ["1.000 [0.500, 2.000]"] * 3


def test_samples_depend_on_the_seed_and_on_how_tokens_are_chosen(run: Path, tmp_path: Path) -> None:
    sampled: dict[str, list[str]] = {}
    for options in ("seed=1", "seed=2", "seed=1 batch_size=5", "temperature=1e-4", "min_p=0.99", "top_p=1e-6"):
        answers = tmp_path / f"{options}.jsonl"
        sizes = ("eval_prompts=4", "n=2", "max_new_tokens=7")
        gspo_eval(run / "model-seed3", "task=sorting", *sizes, *options.split(), "--answers", answers)
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        greedy = [line["completion"] for line in lines if line["kind"] == "greedy" for _ in range(2)]
        sampled[options] = [line["completion"] for line in lines if line["kind"] == "sampled"]
        assert (sampled[options] == greedy) == ("seed" not in options), options
    assert sampled["seed=1"] == sampled["seed=1 batch_size=5"] != sampled["seed=2"]


def test_a_run_of_the_demo_has_the_rewards_and_the_sampling_options_of_its_run(tmp_path: Path) -> None:
    of_run: dict[str, Any] = {"temperature": 0.75, "top_k": 1, "top_p": 0.875, "min_p": 0.125}
    folder = train(small(tmp_path, steps=1, save=True, reward_timeout=3.5, **of_run)).folder
    config = read_evaluation(str(folder)).config
    assert config.reward_timeout == 3.5
    assert {name: getattr(config, name) for name in of_run} == of_run
    last = rows_of(folder)[-1]["eval_reward"]
    report = gspo_eval(folder, "n=1", "--answers", tmp_path / "answers.jsonl")
    assert 0 < last == pytest.approx(report["rewards"]["total"]["greedy"]["mean"])
    lines = [json.loads(line)["completion"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]  # with top_k=1, sampled answers are the greedy ones
    assert gspo_eval(folder, "n=0", "eval_prompts=3")["prompts"] == 3


def test_a_reward_from_python_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def short(completion: str) -> float:
        return float(len(completion) < 9)

    folder = train(small(tmp_path, steps=1, save=True, threads=3), reward=short).folder
    result = CliRunner().invoke(app, ["eval", str(folder)])
    assert result.exit_code == 1 and "was started with reward= from Python, got none" in result.stderr
    report = evaluate(read_evaluation(str(folder), ["n=0"], reward=short))
    assert report.rewards["total"]["greedy"].mean == pytest.approx(rows_of(folder)[-1]["eval_reward"])
    assert threads == [3, 3]  # of the run, and of its evaluation


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("{run}", "batch_size=0", "batch_size: expected a number from 1 to 2**32 - 1, got 0"),
        ("{run}", "n=2 k=1,3", "k: expected numbers from 1 to n=2, got [1, 3]"),
        ("{run}", "data={run}/held_out.jsonl reward={rewards}:of_level", "got 'level', which 12 of 12 rows lack"),
        (
            "{run}",
            "--answers {run}/metrics.jsonl",
            "--answers: expected a new file in a folder that exists, got {run}",
        ),
    ],
)
def test_wrong_arguments_print_one_line(run: Path, source: str, options: str, message: str) -> None:
    names = {"run": run, "rewards": run.parent / "rewards.py"}
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    result = CliRunner().invoke(app, ["eval", source.format(**names), *options.format(**names).split()])
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message.format(**names) in result.stderr
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before
