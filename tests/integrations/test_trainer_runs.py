"""Runs of the reference trainer: printed lines, signals, refused settings, warnings."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.reference_runs import SMALL, rows_of, small
from rich.console import Console
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import (
    InputError,
    TrainingError,
    progress,
    train,
)
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.loading import load_policy
from gspo_kernels.integrations.reference_trainer.optimizer import Optimizer
from gspo_kernels.integrations.reference_trainer.stopping import StopSignals
from gspo_kernels.integrations.tasks import RewardComponent, task_by_name
from gspo_kernels.tools.cli import app

SIZES = [f"{name}={value}" for name, value in SMALL.items() if name != "steps"]


# Refused before anything is written


def test_an_existing_folder_is_kept_and_the_error_names_both_options(tmp_path: Path) -> None:
    earlier = tmp_path / "mine" / "model-seed0" / "model.safetensors"
    checkpoint, another = tmp_path / "mine" / "checkpoint.pt", tmp_path / "mine" / "model-seed7" / "config.json"
    for path in (earlier, another, checkpoint):  # without metrics.jsonl, as if that file had been moved
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(InputError, match=r"mine exists already .* resume=true .* overwrite=true .* name=NAME"):
        train(small(tmp_path, steps=1, name="mine"))
    assert earlier.exists() and another.exists() and checkpoint.exists()
    train(small(tmp_path, steps=1, name="mine", overwrite=True, checkpoint_every=0))
    assert not (earlier.exists() or another.parent.exists() or checkpoint.exists())


# Rewards that fail


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise KeyError('a\\nb')",
            "the reward 'short' failed for all 8 answers in the evaluation before the",
        ),
        ("return None", "no answer has a reward: 'short' returned None for all 8 answers in the evaluation before"),
    ],
)
def test_a_run_without_any_reward_stops_before_its_first_step(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "rewards.py").write_text(f"def short(completion, answer):\n    {body}\n")
    arguments = [f"reward={tmp_path}/rewards.py:short", f"output={tmp_path}/runs", "seeds=0", *SIZES]
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists() and "stopped before training seed 0" in result.stdout


class Flaky:
    """Rewards the length of a completion. The calls `first` to `last`, counted from 1, fail, in this process only."""

    def __init__(self, first: int, last: int) -> None:
        self.failing, self.calls = range(first, last + 1), 0

    def __call__(self, completion: str, answer: str) -> float:
        self.calls += 1
        if self.calls in self.failing:
            raise ConnectionError("no server")
        return float(len(completion))


def test_a_reward_whose_every_call_fails_in_a_step_stops_before_its_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls: 8 of the first evaluation, 16 of each step, 8 of the evaluation after step 2."""
    step, first = 3, 49
    message = (
        f"the reward 'flaky' failed for all 16 answers in step {step}. One of them: flaky: ConnectionError: no server; "
    )
    with pytest.raises(TrainingError, match=f"^{message}"):
        train(small(tmp_path), reward=[RewardComponent("flaky", 1.0, Flaky(first, first + 15))])
    folder = tmp_path / "demo"
    assert len(rows_of(folder)) == step
    line = f'continue: train(read_config(resume="{folder}"), reward=...)'
    assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.parametrize(("first", "last", "failures"), [(9, 23, [15, None, None]), (41, 48, [None] * 3)])
def test_training_goes_on_if_a_call_succeeds_or_only_a_later_evaluation_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int, last: int, failures: list[int | None]
) -> None:
    folder = train(small(tmp_path), reward=[RewardComponent("flaky", 1.0, Flaky(first, last))]).folder
    assert [row.get("reward_failures") for row in rows_of(folder)[1:]] == failures
    when = (
        "15 reward calls failed in step 1." if failures[0] else "8 reward calls failed in the evaluation after step 2."
    )
    assert f"{when} One of them: flaky: ConnectionError" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_stops_before_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Optimizer, "clip", lambda _: math.inf)
    monkeypatch.setattr(Optimizer, "step", lambda _: pytest.fail("the weights are updated"))
    with pytest.raises(TrainingError, match=r"^an update is not finite \(loss -?\d\S*, gradient norm inf\); "):
        train(small(tmp_path))
    assert len(rows_of(tmp_path / "demo")) == 1
    assert "stopped in the updates of step 1 of seed 0, which are not saved" in capsys.readouterr().out


# Stopping


def test_a_signal_that_the_caller_handles_keeps_its_handler() -> None:
    arrived: list[int] = []

    def mine(number: int, _: object) -> None:
        arrived.append(number)

    handlers = {signal.SIGTERM: mine, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert arrived == [signal.SIGTERM] and stop.received is None
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert stop.received == signal.SIGINT
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
        assert stop.received is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ctrl_c_saves_the_model_and_prints_its_folder(tmp_path: Path) -> None:
    arguments = [*SIZES, "steps=1000", f"output={tmp_path}", "name=stopped", "seeds=0,1"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from gspo_kernels.tools.cli import app; app()", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores SIGINT
    )
    assert process.stdout is not None
    for line in process.stdout:  # a pipe receives lines during the run
        if "step 4 of 1000" in line:
            process.send_signal(signal.SIGINT)
            break
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "Aborted" not in errors
    model = tmp_path / "stopped" / "model-seed0"
    assert f"model: {model}" in out and load_policy(str(model))
    assert f"continue: gspo train --resume {model.parent}" in out
    assert re.search(
        r"^seed 0: .*: the held-out reward went from 0\.\d{3} to 0\.\d{3}, a change of ", out, re.MULTILINE
    )
    files = {"checkpoint.pt", "config.json", "curves.png", "held_out.jsonl", "metrics.jsonl", "samples.jsonl"}
    assert {p.name for p in model.parent.iterdir()} == files | {"model-seed0"}
    assert [row["step"] for row in rows_of(model.parent)][:5] == [0, 1, 2, 3, 4]


# What a run prints


def test_without_a_terminal_every_evaluation_prints_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readings = itertools.count(step=2.0)  # of a step: at its start, after its updates, at its end
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    train(small(tmp_path, steps=4))
    skipping, held_out, *lines = capsys.readouterr().out.splitlines()
    rows = rows_of(tmp_path / "demo")
    file = tmp_path / "demo" / "held_out.jsonl"
    assert held_out == f"held out: 8 of 648 prompts, by random.Random(0).sample; written to {file}"
    expected_prompts = [{"prompt": x.prompt, "answer": x.answer} for x in task_by_name("sorting", 8).held_out]
    assert [json.loads(line) for line in file.read_text().splitlines()] == expected_prompts
    reward = [
        f"held-out reward {row['eval_reward']:.3f} [{row['eval_reward_low']:.3f}, {row['eval_reward_high']:.3f}]"
        for row in rows
        if "eval_reward" in row
    ]
    assert skipping == "skip_zero_advantage=true: answers with advantage 0 do not run through the model"
    assert lines[0] == f"seed 0  step 0 of 4  {reward[0]}"
    for line, first, held_out in zip(lines[1:], (1, 3), reward[1:], strict=True):
        steps = rows[first : first + 2]
        mean, clipped = (sum(row[name] for row in steps) / 2 for name in ("reward", "clip_fraction"))
        expected = (
            f"seed 0  step {first + 1} of 4  {held_out}  training reward {mean:.3f}  clip fraction {clipped:.3f}  "
        )
        speed = sum(row["answer_tokens"] * 16 / 2.0 for row in steps) / 2
        assert line == f"{expected}{speed:,.0f} tokens/s"
    assert [row["seconds"] for row in rows[1:]] == [4.0] * 4


def test_each_evaluation_after_a_step_writes_its_first_four_answers(tmp_path: Path) -> None:
    sizes = {"steps": 2, "prompts_per_step": 3, "group_size": 2, "updates_per_rollout": 1, "eval_every": 1}
    folder = train(small(tmp_path, seeds=(7, 0), eval_prompts=8, **sizes)).folder  # in batches of 6
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows_of(folder) if row["step"]]
    assert [(row["seed"], row["step"]) for row in evaluated] == [(7, 1), (7, 2), (0, 1), (0, 2)]
    expected = [(row["seed"], row["step"], x) for row in evaluated for x in row["eval_rewards"]["total"][:4]]
    assert [(x["seed"], x["step"], x["reward"]) for x in samples] == expected


@pytest.mark.parametrize(("rank", "out"), [(0, "said\n"), (1, "")])
def test_only_the_first_process_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, out: str
) -> None:
    monkeypatch.setattr(progress, "rank", lambda: rank)
    progress.TrainingProgress(small(tmp_path)).say("said")
    assert capsys.readouterr().out == out


ROW = {"reward": 0.25, "clip_fraction": 0.1, "tokens_per_second": 1.0, "truncated": 0.5}


def shown(tmp_path: Path, rows: list[dict[str, float]], resumed_at: int | None = None) -> list[str]:
    """What a run has printed on a terminal after each step. `rows`: what its metrics have besides or instead of ROW."""
    screen, states = io.StringIO(), []
    console = Console(file=screen, force_terminal=True, force_interactive=True, width=400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "Console", lambda quiet: console)
        with progress.TrainingProgress(small(tmp_path, steps=len(rows))) as bar:
            before = [{"step": 0, "eval_reward": 0.0}]
            bar.begin(0, before)
            for step, row in enumerate(rows, start=1):
                if step == resumed_at:
                    bar.begin(0, before)
                before.append({**ROW, "step": step, **row})
                bar.show(before[-1])
                states.append(screen.getvalue())
    return states


@pytest.mark.parametrize("resumed_at", [None, 15, 22, 27])
def test_steps_without_a_signal_are_warned_of_once(tmp_path: Path, resumed_at: int | None) -> None:
    rows = [{"groups_without_signal": 0.5 if step in (9, 25) else 1.0} for step in range(1, 41)]
    states = shown(tmp_path, rows, resumed_at)
    assert [text.count("WARNING") for text in states] == [0] * 18 + [1] * 22
    assert (
        "In 10 consecutive steps, all answers to each prompt had the same reward, 0.25 on average, and 50%"
        in states[-1]
    )


@pytest.mark.parametrize("resumed_at", [None, 3])
@pytest.mark.parametrize(("first", "warnings"), [(1.0, 1), (0.5, 0)])
def test_a_short_run_without_any_signal_is_warned_of_at_its_end(
    tmp_path: Path, first: float, warnings: int, resumed_at: int | None
) -> None:
    states = shown(tmp_path, [{"groups_without_signal": x} for x in (first, 1.0, 1.0)], resumed_at)
    assert [text.count("WARNING") for text in states] == [0, 0, warnings]
