"""A run that is killed and resumed gives the same numbers, to the bit, as one that was not."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.reference_runs import rows_of, small

from gspo_kernels.integrations.reference_trainer import InputError, TrainConfig, policy, read_config, train
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.checkpoints import read_checkpoint, write_checkpoint
from gspo_kernels.integrations.reference_trainer.loading import load_policy

CLOCK = ("seconds", "tokens_per_second")
TRAIN = """
import json, sys
from pathlib import Path
from gspo_kernels.integrations.reference_trainer import read_config, train
train(read_config(texts=sys.argv[1:]))
"""
OPTIONS: dict[str, Any] = dict(steps=8, checkpoint_every=2, eval_every=3, updates_per_rollout=2, epochs=2)
OPTIONS |= dict(schedule="cosine", warmup_updates=3, weight_decay=0.1, seeds=(0, 1), save=True)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on the clock."""
    return [{name: x for name, x in row.items() if name not in CLOCK} for row in rows_of(folder)]


def head_of(folder: Path, seed: int) -> torch.Tensor:
    return load_policy(str(folder / f"model-seed{seed}")).head.weight.detach()  # type: ignore[union-attr, return-value]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return train(small(folder, **OPTIONS)).folder


def test_a_killed_run_continues_to_the_bit(tmp_path: Path, uninterrupted: Path) -> None:
    options = {name: x for name, x in small(tmp_path, **OPTIONS).to_dict().items() if x is not None}
    texts = [f"{name}={x if isinstance(x, str) else json.dumps(x)}" for name, x in options.items()]
    process = subprocess.Popen([sys.executable, "-c", TRAIN, *texts], stdout=subprocess.DEVNULL)
    folder, generator = tmp_path / "demo", random.Random()
    lines = generator.randint(1, 16)  # of 18, in either seed, before or after the first checkpoint
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").is_file() or len((folder / "metrics.jsonl").read_text().splitlines()) < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(generator.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    report = train(read_config(resume=folder))
    assert numbers(folder) == numbers(uninterrupted), f"killed after {lines} lines"
    assert [result.seed for result in report.results] == [0, 1]
    for seed in (0, 1):
        assert torch.equal(head_of(folder, seed), head_of(uninterrupted, seed))


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_interrupted_run_continues_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Path, at: int
) -> None:
    """Ctrl-C during sampling, and during an update, which is postponed to the end of the step."""
    steps: list[int] = []
    place = "collect" if at == 3 else "train_step"
    original = getattr(loop.Training, place)

    def interrupted(self: loop.Training, *arguments: Any) -> Any:
        steps.append(self.step)
        if self.step == at and steps.count(at) == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # shells may ignore SIGINT
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(small(tmp_path, **OPTIONS))
    folder = tmp_path / "demo"
    assert len(rows_of(folder)) == at + 1
    assert policy and (folder / "model-seed0").is_dir()
    train(read_config(resume=folder))
    assert numbers(folder) == numbers(uninterrupted)


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    options = dict(OPTIONS, seeds=(0,), steps=4, schedule="constant", eval_every=2)
    long = train(small(tmp_path / "long", **{**options, "steps": 6})).folder
    short = train(small(tmp_path / "short", **options)).folder
    train(read_config(texts=["steps=6"], resume=short))
    assert numbers(short) == numbers(long)


def test_a_kill_while_a_checkpoint_is_written_keeps_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(path, {"step": 1})

    class Killed(dict):  # type: ignore[type-arg]
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(path, {"step": 2, "optimizer": Killed()})
    assert read_checkpoint(path)["step"] == 1
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"resume: .*checkpoint.pt cannot be read"):
        read_checkpoint(path)


def test_resume_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(resume=tmp_path / "none")
    with pytest.raises(InputError, match="resume: expected a run in"):
        train(TrainConfig(output=tmp_path, name="none", resume=True))
