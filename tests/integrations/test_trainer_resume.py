"""A run that is stopped at any moment and resumed gives the same numbers, to the bit, as one that was not.

A run is resumed with the arguments, options and prompts with which it was started, or says what differs.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import slow
from helpers.reference_runs import rows_of, small, write_jsonl
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import (
    InputError,
    TrainConfig,
    TrainingError,
    forecast,
    policy,
    read_config,
    read_evaluation,
    report,
    train,
)
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.checkpoints import (
    WriteError,
    read_checkpoint,
    replacing,
)
from gspo_kernels.integrations.reference_trainer.loading import load_policy
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.tasks import Example, RewardComponent, Rewards, Task
from gspo_kernels.tools.cli import app

CLOCK = ("seconds", "tokens_per_second")
OPTIONS: dict[str, Any] = dict(steps=5, checkpoint_every=2, eval_every=3, updates_per_rollout=2, epochs=2)
OPTIONS |= dict(schedule="cosine", warmup_updates=3, weight_decay=0.1, seeds=(0, 1), save=True)
OPTIONS |= dict(advantages=[{"normalize_rewards": {"by": "running"}}])  # so that the moments change the numbers
OPTIONS |= dict(precision="fp16", kl_coef=0.1)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on the clock."""
    return [{name: x for name, x in row.items() if name not in CLOCK} for row in rows_of(folder)]


def head_of(folder: Path, seed: int) -> torch.Tensor:
    return load_policy(str(folder / f"model-seed{seed}")).head.weight.detach()  # type: ignore[union-attr, return-value]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return train(small(folder, **OPTIONS)).folder


def interrupt(
    patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, number: int = signal.SIGINT, times: int = 1
) -> None:
    """Send this process a signal, `times` times, at the given call of a function, counted from 1."""
    original = getattr(owner, name)
    calls = itertools.count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            for _ in range(times):
                signal.raise_signal(number)
        return original(*arguments, **options)

    patch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # shells may ignore SIGINT
    patch.setattr(owner, name, interrupted)


# The function in which the signal arrives, its call, and the number of steps that are done when the run stops.
MOMENTS: dict[str, tuple[Any, str, int, int]] = {
    "before the first step": (loop.Training, "train_step", 1, 0),
    "sampling": (loop, "collect", 4, 2),  # the first call evaluates
    "old log-probs": (loop, "with_log_probs", 4, 3),
    "advantages": (loop, "advantages_of", 4, 3),
    "first update": (loop, "update", 5, 2),
    "evaluation after a step": (loop.Training, "evaluate", 2, 3),
    "metrics": (loop.RunFolder, "write", 4, 3),
    "samples": (loop.RunFolder, "write_samples", 1, 3),
    "checkpoint": (loop.RunFolder, "save_checkpoint", 2, 4),
    "evaluation before the second seed": (loop.Training, "evaluate", 4, 5),
    "first step of the second seed": (loop.Training, "train_step", 6, 6),
}
FAST = ("sampling", "first update", "checkpoint")


@pytest.mark.parametrize("moment", [x if x in FAST else slow(x) for x in MOMENTS])
def test_an_interrupted_run_continues_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Path, moment: str
) -> None:
    """A signal while sampling stops at once; one in the updates stops at the end of the step."""
    owner, name, call, done = MOMENTS[moment]
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            train(small(tmp_path, **OPTIONS))
    folder = tmp_path / "demo"
    assert len(rows_of(folder)) == done + 1
    train(read_config(resume=folder))
    assert numbers(folder) == numbers(uninterrupted)


def test_a_run_that_skips_answers_continues_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives after the advantages, which change the running moments, and before the old log-probs."""
    advantages = [*OPTIONS["advantages"], {"clamp": {"min": 0.0}}]
    options = {**OPTIONS, "kl_coef": 0.0, "advantages": advantages, "seeds": (0,), "name": "skips"}
    whole = train(small(tmp_path / "whole", **options)).folder
    with monkeypatch.context() as patch:
        interrupt(patch, loop, "with_log_probs", 3)
        with pytest.raises(KeyboardInterrupt):
            train(small(tmp_path, **options))
    folder = train(read_config(resume=tmp_path / "skips")).folder
    assert numbers(folder) == numbers(whole) and numbers(folder)[3]["rows_run"] < 1


def train_until_killed(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, loop.RunFolder, "write", 9, signal.SIGKILL)
        train(small(folder, **OPTIONS))


@pytest.mark.slow
def test_a_killed_run_continues_to_the_bit(tmp_path: Path, uninterrupted: Path) -> None:
    """The process dies before it logs step 2 of the second seed. Its last checkpoint is from the end of the first."""
    process = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=(tmp_path,))
    process.start()
    process.join(120)
    folder = tmp_path / "demo"
    assert process.exitcode == -signal.SIGKILL and len(rows_of(folder)) == 8
    report = train(read_config(resume=folder))
    assert numbers(folder) == numbers(uninterrupted)
    assert [result.seed for result in report.results] == [0, 1]
    for seed in (0, 1):
        assert torch.equal(head_of(folder, seed), head_of(uninterrupted, seed))


@pytest.mark.parametrize("owner", ["first", "later"])
def test_a_second_signal_in_the_updates_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Path, capsys: pytest.CaptureFixture[str], owner: str
) -> None:
    """Half of a step would be saved as a whole one."""
    call = {"first": 2, "later": 14}[owner]  # in step 1, before a checkpoint; in step 4, after that of step 2
    with monkeypatch.context() as patch:
        interrupt(patch, loop, "update", call, times=2)
        with pytest.raises(KeyboardInterrupt):
            train(small(tmp_path, **OPTIONS))
    folder = tmp_path / "demo"
    out = capsys.readouterr().out
    assert f"stopped in the updates of step {(call + 3) // 4} of seed 0, which are not saved" in out
    assert (
        (f"continue: gspo train --resume {folder}" in out) == (owner == "later") == (folder / "checkpoint.pt").exists()
    )
    with monkeypatch.context() as patch:  # the files were cut to their sizes at the checkpoint, and are saved like that
        interrupt(patch, loop, "collect", 1)
        with pytest.raises(KeyboardInterrupt):
            train(read_config(resume=folder))
    train(read_config(resume=folder))
    assert numbers(folder) == numbers(uninterrupted)


def test_a_run_stopped_in_its_first_evaluation_keeps_the_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = train(small(tmp_path, steps=1)).folder
    files = {path.name: path.read_bytes() for path in earlier.iterdir()}
    with monkeypatch.context() as patch:
        interrupt(patch, loop, "collect", 1, signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            train(small(tmp_path, steps=2))
    assert caught.value.code == 143 and {path.name: path.read_bytes() for path in earlier.iterdir()} == files
    assert capsys.readouterr().out.splitlines()[-1] == "stopped before training seed 0"


def test_an_interrupted_resume_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Path
) -> None:
    """The weights of the policy are those of the checkpoint only at the end of `restore`."""
    folder = tmp_path / "demo"
    for owner, name, call in [
        (loop.Training, "train_step", 4),
        (loop.RunFolder, "open", 1),
        (loop.Optimizer, "load", 1),
        (loop.TrainingProgress, "begin", 1),
    ]:
        with monkeypatch.context() as patch:
            interrupt(patch, owner, name, call)
            with pytest.raises(KeyboardInterrupt):
                train(small(tmp_path, **OPTIONS) if call == 4 else read_config(resume=folder))
    train(read_config(resume=folder))
    assert numbers(folder) == numbers(uninterrupted)


def test_a_stopped_run_can_end_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step was not evaluated, so the report has the reward of the evaluation before it."""
    with monkeypatch.context() as patch:
        interrupt(patch, loop.Training, "train_step", 3)
        with pytest.raises(KeyboardInterrupt):
            train(small(tmp_path, **{**OPTIONS, "seeds": (0,)}))
    folder = tmp_path / "demo"
    (result,) = train(read_config(texts=["steps=2", "save=true"], resume=folder)).results
    assert result.end_reward == result.start_reward == rows_of(folder)[0]["eval_reward"]
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2] and (folder / "model-seed0").is_dir()


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    options = dict(OPTIONS, seeds=(0,), steps=2, schedule="constant", eval_every=2, lora_rank=4, lora_head=True)
    long = train(small(tmp_path / "long", **{**options, "steps": 3})).folder
    short = train(small(tmp_path / "short", **options)).folder
    train(read_config(texts=["steps=3"], resume=short))
    assert numbers(short) == numbers(long)


# Arguments from Python


def length(completion: str, answer: str) -> float:
    return float(len(completion))


def own_task() -> Task:
    examples = [Example(f"sort {letter}:", letter) for letter in "abcdefg"]
    rewards = Rewards((RewardComponent("length", 1.0, length),))
    return Task("own", examples[3:], examples[:3], rewards, characters="sort abcdefg:")


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int = 2, **arguments: Any) -> Path:
    """Return the folder of a run that was stopped before its step `at`, with the options of `small`."""
    options = {"output": tmp_path, "name": "mine", **arguments.pop("options", {})}
    with monkeypatch.context() as patch:
        interrupt(patch, loop.Training, "train_step", at, signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(small(**{"tmp_path": tmp_path, **options}), **arguments)
    return tmp_path / "mine"


@pytest.mark.parametrize("arguments", [{"reward": length}, {"task": own_task(), "reward": length}])
def test_a_run_with_arguments_from_python_continues_with_them_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any]
) -> None:
    whole = train(small(tmp_path, name="whole"), **arguments).folder
    folder = stopped(tmp_path, monkeypatch, **arguments)
    call = f'train(read_config(resume="{folder}"){"".join(f", {name}=..." for name in arguments)})'
    assert capsys.readouterr().out.splitlines()[-1] == f"continue: {call}"
    before = contents(folder)
    for mode in ([], ["--dry-run"]):
        result = CliRunner().invoke(app, ["train", "--resume", str(folder), *mode])
        assert result.exit_code == 1 and f"was started with {' and '.join(f'{x}=' for x in arguments)}" in result.output
        assert result.output.endswith(f"Continue it with {call}\n") and result.output.count("\n") == 1
    assert contents(folder) == before
    train(read_config(resume=folder), **arguments)
    assert numbers(folder) == numbers(whole)


def test_the_options_of_a_run_with_arguments_from_python_are_no_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stopped(tmp_path, monkeypatch, reward=length) / "config.json"
    with pytest.raises(InputError, match=r"expected all options of a run, but its reward came from Python"):
        read_config(file)
    file = stopped(tmp_path / "options", monkeypatch) / "config.json"
    assert read_config(file).steps == 3


# Changes


def test_changed_options_are_said_and_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped(tmp_path, monkeypatch)
    changes = ["learning_rate=1e-2", "clip_high=5e-4", "steps=4"]
    notes = [
        "resume: steps: 3 -> 4, taken from here on",
        "resume: learning_rate: 0.0005 -> 0.01, taken from here on",
        "resume: clip_high: 0.0004 -> 0.0005, taken from here on",
    ]
    result = CliRunner().invoke(app, ["train", "--resume", str(folder), "--dry-run", *changes])
    assert result.exit_code == 0 and all(f"# {note}\n" in result.output for note in notes)
    capsys.readouterr()
    train(read_config(texts=changes, resume=folder))
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume")] == notes
    assert [row.get("learning_rate") for row in rows_of(folder)] == [None, 5e-4, 1e-2, 1e-2, 1e-2]
    assert json.loads((folder / "config.json").read_text())["learning_rate"] == 1e-2
    train(read_config(resume=folder))
    assert "resume" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("steps=1", "steps: expected at least 2, which seed 1 of {} has reached, got 1"),
        ("steps=9", "steps: expected 3, after which earlier seeds of {} have ended, got 9"),
        ("seeds=1", "seeds: expected [0, 1] first, on which {} has trained, got [1]"),
        ("seeds=1,0,2", "seeds: expected [0, 1] first, on which {} has trained, got [1, 0, 2]"),
        ("model=x", 'model: expected null, with which {} was started, got "x"'),
        ("lora_rank=4", "lora_rank: expected 0, with which {} was started, got 4"),
        ("name=other", "name: expected no such option with --resume, which continues {}, got 'other'"),
        (
            "eval_prompts=9",
            "got 648 prompts, which, or their answers, columns or order, differ; eval_prompts: 8 -> 9",
        ),
    ],
)
def test_changes_with_which_a_run_cannot_continue_are_refused(two_seeds: Path, changes: str, message: str) -> None:
    before = {path.name: path.read_bytes() for path in two_seeds.iterdir()}
    for mode in ([], ["--dry-run"]):
        result = CliRunner().invoke(app, ["train", "--resume", str(two_seeds), *mode, changes])
        assert result.exit_code == 1 and result.output.count("\n") == 1
        assert message.format(two_seeds) in result.output
    assert {path.name: path.read_bytes() for path in two_seeds.iterdir()} == before


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 2 of its second seed."""
    folder = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch:
        return stopped(folder, patch, 6, options={"seeds": (0, 1, 2)})


def test_a_stopped_run_may_drop_seeds_that_have_not_begun(two_seeds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(two_seeds, folder)
    report = train(read_config(texts=["seeds=0,1"], resume=folder))
    assert [result.seed for result in report.results] == [0, 1]
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2, 3] * 2


def test_changed_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.demo_policy().save(tmp_path / "model")
    lines = [{"prompt": f"sort {x}:", "answer": x} for x in "abcdefsort"]
    data, another = write_jsonl(tmp_path / "data.jsonl", *lines), {"prompt": "sort z:", "answer": "z"}
    options = {"model": str(tmp_path / "model"), "data": data, "max_new_tokens": 2}
    folder = stopped(tmp_path, monkeypatch, options=options)
    for changed in (
        [*lines[:5], {**lines[5], "answer": "z"}, *lines[6:]],
        [*lines[:-1], another],
        [*lines, another],
        lines[::-1],
    ):
        moved = write_jsonl(tmp_path / "moved.jsonl", *changed)
        expected = f"^data: expected the prompts with which {folder} was started, got {len(changed)} prompts, which"
        with pytest.raises(InputError, match=expected):
            train(read_config(texts=[f"data={moved}"], resume=folder))
    write_jsonl(tmp_path / "moved.jsonl", *lines)
    train(read_config(texts=[f"data={moved}"], resume=folder))


def test_a_run_continues_from_another_folder_and_in_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Relative paths of its options lead where they led when it was started."""
    (project := tmp_path / "project").mkdir()
    monkeypatch.chdir(project)
    policy.demo_policy().save(Path("tiny"))
    write_jsonl(Path("data.jsonl"), *({"prompt": f"sort {x}:", "answer": x} for x in "abcdef"))
    Path("rewards.py").write_text("def length(completion):\n    return float(len(completion))\n")
    options = {
        "model": "tiny",
        "data": "data.jsonl",
        "reward": "0.5*rewards.py:length",
        "max_new_tokens": 2,
        "save": True,
    }
    train(small(tmp_path, **options, output="runs", name="mine", steps=1, checkpoint_every=1))
    project.rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    assert read_evaluation(str(tmp_path / "moved" / "runs" / "mine")).task.rewards.components[0].weight == 0.5
    capsys.readouterr()
    folder = train(read_config(texts=["steps=2"], resume=tmp_path / "moved" / "runs" / "mine")).folder
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume")]
    assert len(rows_of(folder)) == 3 and notes == ["resume: steps: 1 -> 2, taken from here on"]
    assert json.loads((folder / "config.json").read_text())["reward"] == [f"0.5*{tmp_path}/moved/rewards.py:length"]


def test_other_weights_of_rewards_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped(tmp_path, monkeypatch, reward=length)
    train(read_config(resume=folder), reward=[RewardComponent("other", 2.0, length)])
    assert 'resume: weights of rewards: {"length": 1.0} -> {"other": 2.0}, taken from' in capsys.readouterr().out


# Folders without a run or a checkpoint


def test_resume_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, got in [("none", f"no folder: {tmp_path / 'none'}"), ("empty", str(tmp_path / "empty"))]:
        message = f"resume: expected the folder of a run, with a config.json, got {got}"
        result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / name)])
        assert (result.exit_code, result.output) == (1, f"error: {message}\n")
        with pytest.raises(InputError, match=re.escape(message)):
            train(TrainConfig(output=tmp_path, name=name, resume=True))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "demo"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small(tmp_path_factory.mktemp("finished"), save=True, checkpoint_every=1)).folder


@pytest.mark.parametrize("kept", ["model-seed0", "metrics.jsonl", "samples.jsonl", "curves.png"])
def test_without_a_checkpoint_a_run_that_has_trained_is_kept(finished: Path, tmp_path: Path, kept: str) -> None:
    folder = copied(finished, tmp_path)
    for path in [path for path in folder.iterdir() if path.name not in (kept, "config.json")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(folder)
    shown = {"metrics.jsonl": "steps in metrics.jsonl"}.get(kept, kept)
    message = f"resume: expected a checkpoint.pt in {folder}, from which to continue, got none, but {shown}; only"
    for run in (train, forecast):
        with pytest.raises(InputError, match=re.escape(message)):
            run(read_config(resume=folder))
    assert contents(folder) == before


def test_without_a_checkpoint_a_run_that_has_not_trained_starts_again(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "demo").mkdir()
    shutil.copy(finished / "config.json", folder)
    first = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "metrics.jsonl").write_text(first)
    train(read_config(resume=folder))
    assert numbers(folder) == numbers(finished)
    assert f"{folder} has trained no step yet, so training starts again from the beginning" in capsys.readouterr().out


def test_a_resumed_run_without_checkpoints_ends_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With that of the interrupt alone, the next resume would undo the steps that followed."""
    folder = stopped(tmp_path, monkeypatch, options={"checkpoint_every": 0})
    train(read_config(resume=folder))
    assert read_checkpoint(folder / "checkpoint.pt")["step"] == 3


# One run at a time


def test_a_folder_is_written_by_one_run_at_a_time(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    before = contents(folder)
    with RunFolder(read_config(resume=folder)):
        for config in (read_config(resume=folder), small(tmp_path, name="demo", overwrite=True)):
            with pytest.raises(InputError, match=f"^{folder} is in use: another process trains in this folder"):
                train(config)
    assert contents(folder) == before
    train(read_config(resume=folder))  # the lock is released
    with RunFolder(small(tmp_path, name="new")) as first, RunFolder(small(tmp_path, name="new")) as second:
        first.write(0, {"step": 0})
        before = contents(tmp_path)
        with pytest.raises(InputError, match="new is in use"):
            second.write(0, {"step": 0})
        first.__exit__()
        with RunFolder(small(tmp_path, name="other")) as third:
            third.path = first.path  # as if its folder had been empty when it began
            with pytest.raises(InputError, match="new exists already and is not empty"):
                third.write(0, {"step": 0})
        assert contents(tmp_path) == before


def test_where_files_cannot_be_locked_runs_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(report.fcntl, "flock", flock)
    with RunFolder(small(tmp_path)) as folder, pytest.warns(UserWarning, match="cannot be locked .*No locks available"):
        folder.write(0, {"step": 0})
    assert rows_of(tmp_path / "demo") == [{"seed": 0, "step": 0}]


# The system refuses to write


# File -> the function that writes it, its call, and the bytes by which the file (of a few KB) may grow.
REFUSED = {
    "metrics.jsonl": ("write", 3, 20),
    "checkpoint.pt": ("save_checkpoint", 2, 100_000),
    "model-seed0": ("save_model", 1, 100_000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_the_system_refuses_is_named_and_nothing_is_left(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "demo"
    method, call, room = REFUSED[name]
    original = getattr(RunFolder, method)
    calls = itertools.count(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            size = (folder / name).stat().st_size if name.endswith(".jsonl") else 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
        return original(*arguments, **options)

    try:
        with monkeypatch.context() as patch, pytest.raises(TrainingError) as caught:
            patch.setattr(RunFolder, method, limited)
            train(small(tmp_path, save=True, checkpoint_every=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.fullmatch(f"{folder / name} cannot be written: .*File too large.*", str(caught.value))  # one line
    has_checkpoint = (folder / "checkpoint.pt").exists()
    assert (f"continue: gspo train --resume {folder}" in capsys.readouterr().out) == has_checkpoint
    left = {path.name for path in folder.iterdir()}
    assert left <= {path.name for path in finished.iterdir()} and "model-seed0" not in left
    rows_of(folder)  # no half of a line
    train(read_config(resume=folder))
    assert numbers(folder) == numbers(finished)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()], ids=repr)
def test_a_folder_that_cannot_be_replaced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("earlier")

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", refused)
    expected = WriteError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), replacing(tmp_path / "model") as partial:
        partial.mkdir()
        (partial / "weights").write_text("later")
    assert list(contents(tmp_path)) == [tmp_path / "model" / "weights"]
    assert (tmp_path / "model" / "weights").read_text() == "earlier"


# Damaged files


def test_a_flipped_bit_is_found(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    path = folder / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    weight = torch.load(path)["optimizer"]["weights"][HEAD]["weight"].numpy().tobytes()
    content[content.index(weight) + len(weight) // 2] ^= 64
    path.write_bytes(content)
    before = contents(folder)
    with pytest.raises(InputError, match=r"checkpoint.pt is damaged: the checksum of its record \S*/data/\d+ is wrong"):
        train(read_config(texts=["steps=4"], resume=folder))
    assert contents(folder) == before


def of_checkpoint(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = torch.load(folder / "checkpoint.pt")
        torch.save(change(state), folder / "checkpoint.pt")

    return damage


def of_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        options = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**options, **changes}))

    return damage


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def of_rows(change: Callable[[list[Any]], list[Any]]) -> Callable[[Path], None]:
    """Change the rows of metrics.jsonl, and its size in the checkpoint."""

    def damage(folder: Path) -> None:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        content = "".join(json.dumps(row) + "\n" for row in change(rows))
        (folder / "metrics.jsonl").write_text(content)
        of_checkpoint(lambda state: {**state, "sizes": {**state["sizes"], "metrics.jsonl": len(content)}})(folder)

    return damage


HEAD = "lm_head.weight"
DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (text("config.json", "[]"), r"config.json: expected its content to be keys with values, got \[\]"),
    (text("config.json", "{}"), r"config.json: expected its content to have the key 'seeds', got \[\]"),
    (of_config(quantization="8bit"), r'options that this version .* in \S*config.json, got quantization="8bit"\. To'),
    (of_config(started_with={}), "config.json: expected started_with to have the key 'from_python', got"),
    (of_config(started_with={"from_python": 3}), "config.json: expected from_python to be a list, got 3"),
    (text("checkpoint.pt", ""), "checkpoint.pt cannot be read, .* File is not a zip file"),
    (of_checkpoint(lambda state: {**state, "step": -1}), "expected step to be a whole number >= 0, got -1"),
    (of_checkpoint(lambda state: {**state, "running": {"count": 1}}), "expected count to be a tensor, got 1"),
    (of_checkpoint(lambda state: {**state, "sizes": {}}), "expected sizes to have the key 'metrics.jsonl', got"),
    (
        of_checkpoint(lambda state: state["optimizer"]["weights"].pop(HEAD) is None or state),
        f"the 25 trained weights of this model, got 24; {HEAD} is in only one of them",
    ),
    (
        of_checkpoint(lambda state: state["optimizer"]["weights"][HEAD].pop("exp_avg") is None or state),
        rf"expected a checkpoint with {HEAD} of the shapes \{{'weight': .*, got \{{'weight': ",
    ),
    (
        of_rows(lambda rows: [*rows[:2], {**rows[2], "seconds": None}, *rows[3:]]),
        "metrics.jsonl, step 2 of seed 0: expected seconds to be a number, got None",
    ),
    (of_checkpoint(lambda state: {**state, "step": 1}), "metrics of seed 0 to end with step 1, .* got step 3"),
    (text("config.json", "[" * 99999), "config.json cannot be read: maximum recursion depth exceeded"),
    (
        of_rows(lambda rows: [*rows[:2], *rows[1:]]),
        r"expected seed 0 to have a line for each step from 0, got \[0, 1, 1, 2, 3\]",
    ),
    (text("metrics.jsonl", "{\n" * 9999), r"metrics.jsonl, line 1: expected a JSON object, got b'\{'"),
    (text("metrics.jsonl", ""), "metrics.jsonl is shorter than when the checkpoint was written"),
    (text("samples.jsonl", ""), "samples.jsonl is shorter than when the checkpoint was written"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_a_damaged_file_is_named_and_nothing_changes(
    finished: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = copied(finished, tmp_path)
    damage(folder)
    before = contents(folder)
    with pytest.raises(InputError) as caught:
        train(read_config(texts=["steps=4"], resume=folder))
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)
    assert contents(folder) == before


def test_a_dry_run_says_whose_code_it_runs(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    (tmp_path / "rewards.py").write_text("print('imported')\ndef length(completion, answer):\n    return 1.0\n")
    spec = f"{tmp_path}/rewards.py:length"
    of_config(reward=[spec])(folder)
    result = CliRunner().invoke(app, ["train", "--resume", str(folder), "--dry-run"])
    said = f"# importing the reward {spec}, named by config.json of {folder}: this runs its Python code"
    assert result.output.splitlines()[:2] == [said, "imported"]
