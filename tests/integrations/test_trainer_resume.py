"""Runs that are stopped and resumed. For every pair of settings, test_trainer_array.py compares their bits.

A run is resumed with the arguments, options and prompts with which it was started, or says what differs.
"""

from __future__ import annotations

import errno
import fcntl
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers.reference_runs import rows_of, small, stopping, write_jsonl
from typer.testing import CliRunner

from gspo_kernels.integrations.reference_trainer import (
    InputError,
    policy,
    read_config,
    train,
)
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.checkpoints import replacing
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.tasks import Example, RewardComponent, Rewards, Task, task_by_name
from gspo_kernels.tools.cli import app


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        ("bac", "teacher: expected a model with the policy's vocabulary, where 'a' has the id 3, got one .* 4"),
        (policy.SORTING, "distillation_k: expected at most the 15 ids of the vocabulary, got 16"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(characters: str, message: str, tmp_path: Path) -> None:
    policy.demo_policy(characters).save(tmp_path / "model")
    with pytest.raises(InputError, match=f"^{message}$"):
        train(small(tmp_path, teacher=str(tmp_path / "model")))


def test_a_run_stopped_in_its_first_evaluation_keeps_the_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = train(small(tmp_path, steps=1)).folder
    files = {path.name: path.read_bytes() for path in earlier.iterdir()}
    with monkeypatch.context() as patch:
        stopping(patch, loop, "collect", [signal.SIGTERM], call=1)
        with pytest.raises(SystemExit) as caught:
            train(small(tmp_path, steps=2))
    assert caught.value.code == 143 and {path.name: path.read_bytes() for path in earlier.iterdir()} == files
    assert capsys.readouterr().out.splitlines()[-1] == "stopped before training seed 0"


# Arguments from Python


def length(completion: str, answer: str) -> float:
    return float(len(completion))


SORTING = task_by_name("sorting", 8)
MINE = Task("mine", SORTING.train, SORTING.held_out[:3], Rewards((RewardComponent("length", 1.0, length),)))


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int = 2, **arguments: Any) -> Path:
    """Return the folder of a run that was stopped before its step `at`, with the options of `small`."""
    options = {"output": tmp_path, "name": "mine", **arguments.pop("options", {})}
    with monkeypatch.context() as patch:
        stopping(patch, loop.Training, "train_step", [signal.SIGTERM], at)
        with pytest.raises(SystemExit):
            train(small(**{"tmp_path": tmp_path, **options}), **arguments)
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("name", "value", "held_out"), [("reward", length, SORTING.held_out), ("task", MINE, MINE.held_out)]
)
def test_a_run_with_an_argument_from_python_continues_with_it_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: Any,
    held_out: list[Example],
) -> None:
    folder = stopped(tmp_path, monkeypatch, **{name: value})
    call = f'train(read_config(resume="{folder}"), {name}=...)'
    assert capsys.readouterr().out.splitlines()[-1] == f"continue: {call}"
    with pytest.raises(
        InputError, match=rf"was started with {name}= from Python, .* Continue it with {re.escape(call)}"
    ):
        train(read_config(resume=folder))
    with pytest.raises(InputError, match=rf"expected all options of a run, but its {name} came from Python"):
        read_config(folder / "config.json")
    train(read_config(resume=folder), **{name: value})
    assert [row["step"] for row in rows_of(folder)] == [0, 1, 2, 3]
    lines = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [example.prompt for example in held_out]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples and all(x["reward"] == x["components"]["length"] == len(x["completion"]) for x in samples)


def test_the_line_after_a_resume_is_of_all_steps_since_the_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stopped(tmp_path, monkeypatch, at=3, options={"eval_every": 3})
    train(read_config(resume=folder))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "step 3 of 3" in line]
    assert f"training reward {fmean(row['reward'] for row in rows_of(folder)[1:]):.3f}  clip" in line


def test_checkpoints_are_saved_at_multiples_of_checkpoint_every_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    monkeypatch.setattr(RunFolder, "save_checkpoint", lambda _, state: saved.append(state["step"]))
    sizes = {"steps": 5, "prompts_per_step": 2, "group_size": 2, "eval_every": 9, "eval_prompts": 2}
    train(small(tmp_path, **sizes, checkpoint_every=2))
    assert saved == [2, 4, 5]


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


@pytest.mark.parametrize("seeds", ["0,1", "0,1,5"])  # a seed that has not begun is dropped or replaced
def test_seeds_that_have_not_begun_may_change(two_seeds: Path, seeds: str) -> None:
    result = CliRunner().invoke(app, ["train", "--resume", str(two_seeds), "--dry-run", f"seeds={seeds}"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("steps=1", "steps: expected at least 2, which seed 1 of {} has reached, got 1"),
        ("steps=9", "steps: expected 3, after which earlier seeds of {} have ended, got 9"),
        ("seeds=1,0,2", "seeds: expected [0, 1] first, on which {} has trained, got [1, 0, 2]"),
        ("model=x", 'model: expected null, with which {} was started, got "x"'),
        ("lora_rank=4", "lora_rank: expected 0, with which {} was started, got 4"),
        ("lora_alpha=64", "lora_alpha: expected 32.0, with which {} was started, got 64.0"),
        ("name=other", "name: expected no such option with --resume, which continues {}, got 'other'"),
        ("eval_prompts=9", "got 648 prompts, which, or their answers, columns or order, differ"),
    ],
)
def test_changes_with_which_a_run_cannot_continue_are_refused(two_seeds: Path, changes: str, message: str) -> None:
    before = contents(two_seeds)
    result = CliRunner().invoke(app, ["train", "--resume", str(two_seeds), changes])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert message.format(two_seeds) in result.output
    assert contents(two_seeds) == before


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 2 of its second seed."""
    folder = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch:
        return stopped(folder, patch, 6, options={"seeds": (0, 1, 2)})


def test_changed_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.demo_policy().save(tmp_path / "model")
    lines = [{"prompt": f"sort {x}:", "answer": x} for x in "abcdefsort"]
    data, another = write_jsonl(tmp_path / "data.jsonl", *lines), {"prompt": "sort z:", "answer": "z"}
    options = {"model": str(tmp_path / "model"), "data": data, "max_new_tokens": 2}
    folder = stopped(tmp_path, monkeypatch, options=options)
    of_line = [[*lines[:5], {**lines[5], **change}, *lines[6:]] for change in ({"answer": "z"}, {"level": "z"})]
    for changed in (*of_line, [*lines, another], lines[::-1]):
        moved = write_jsonl(tmp_path / "moved.jsonl", *changed)
        expected = f"^data: expected the prompts with which {folder} was started, got {len(changed)} prompts, which"
        with pytest.raises(InputError, match=expected):
            train(read_config(texts=[f"data={moved}"], resume=folder))
    moved = write_jsonl(tmp_path / "moved.jsonl", *lines)
    train(read_config(texts=[f"data={moved}"], resume=folder))


# The folder of a run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "demo"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small(tmp_path_factory.mktemp("finished"), save=True, checkpoint_every=1)).folder


def test_a_folder_is_written_by_one_run_at_a_time(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path)
    before = contents(folder)
    with RunFolder(read_config(resume=folder)):
        for config in (read_config(resume=folder), small(tmp_path, name="demo", overwrite=True)):
            with pytest.raises(InputError, match=f"^{folder} is in use: another process trains in this folder"):
                train(config)
    assert contents(folder) == before
    train(read_config(resume=folder))  # the lock is released


def test_without_file_locks_a_run_starts_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    message = "metrics.jsonl cannot be locked, so another process may write to it: .*No locks available"
    with pytest.warns(UserWarning, match=message), RunFolder(small(tmp_path)) as folder:
        folder.write(0, {"step": 0})
    assert rows_of(folder.path) == [{"seed": 0, "step": 0}]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()], ids=repr)
def test_a_folder_that_cannot_be_replaced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("earlier")

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(type(error)), replacing(tmp_path / "model") as partial:
        partial.mkdir()
        (partial / "weights").write_text("later")
    assert list(contents(tmp_path)) == [tmp_path / "model" / "weights"]
    assert (tmp_path / "model" / "weights").read_text() == "earlier"


# Damaged files


HEAD = "lm_head.weight"


def flip_a_bit(folder: Path) -> None:
    path = folder / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    weight = torch.load(path)["optimizer"]["weights"][HEAD]["weight"].numpy().tobytes()
    content[content.index(weight) + len(weight) // 2] ^= 64
    path.write_bytes(content)


def lose_weights(folder: Path) -> None:
    state = torch.load(folder / "checkpoint.pt")
    del state["optimizer"]["weights"][HEAD]
    torch.save(state, folder / "checkpoint.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, r"checkpoint.pt: damaged: .* checksum of \S*/data/\d+ is wrong"),
        (lose_weights, f"expected a checkpoint with the trained weights of this model; {HEAD} differs"),
        (
            lambda folder: (folder / "metrics.jsonl").write_text(""),
            "metrics.jsonl: damaged: expected a line for each step of seed 0, got",
        ),
        (
            lambda folder: (folder / "samples.jsonl").write_text(""),
            "samples.jsonl: damaged: shorter than when the checkpoint was written",
        ),
    ],
)
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
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**options, "reward": [spec]}))
    result = CliRunner().invoke(app, ["train", "--resume", str(folder), "--dry-run"])
    said = f"# importing the reward {spec}, named by config.json of {folder}: this runs its Python code"
    assert result.output.splitlines()[:2] == [said, "imported"]
