"""Two processes train like one: same parameters, one run folder, an exact resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.reference_runs import rows_of, small
from tolerance import TRAINER_ABSOLUTE

from gspo_kernels.integrations.reference_trainer import InputError, read_config, train, trainer
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.tasks import Example

OPTIONS: dict[str, Any] = dict(steps=2, learning_rate=3e-4, micro_batch_size=2, updates_per_rollout=2, eval_every=1)
OPTIONS |= dict(prompts_per_step=4, group_size=4, objective="dapo", checkpoint_every=1, epochs=2, seeds=0)
# With one held-out prompt, the second process has none. Without a KL term, answers with advantage 0 do not run.
CASES: dict[str, dict[str, Any]] = {"ddp": {"kl_coef": 0.1, "eval_prompts": 8}, "fsdp2": {"eval_prompts": 1}}


def config_of(folder: Path, parallel: str, **changes: Any) -> Any:
    options = {**OPTIONS, **CASES[parallel], "parallel": parallel, "output": folder, **changes}
    return read_config(texts=[f"{name}={value}" for name, value in options.items()])


def train_in_ranks(rank: int, folder: Path, parallel: str) -> None:
    """Train. With ddp, try a folder that is in use first. With fsdp2, stop a second run and resume it."""

    def next_port() -> None:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)

    if parallel == "ddp":
        with pytest.raises(InputError, match=r"used is in use: another process"):
            train(config_of(folder, parallel, name="used"))
        next_port()
    train(config_of(folder, parallel, name="whole"))
    if parallel == "ddp":
        return
    original = trainer.Training.train_step

    def stopped(self: trainer.Training, examples: list[Example]) -> None:
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)
        original(self, examples)

    next_port()
    with patch.object(trainer.Training, "train_step", stopped), pytest.raises(SystemExit):
        train(config_of(folder, parallel, name="stopped"))
    assert len(rows_of(folder / "stopped")) == 2  # both processes stop after step 1
    next_port()
    train(read_config(resume=folder / "stopped"))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", CASES)
def test_two_processes_train_like_one(tmp_path: Path, parallel: str) -> None:
    train(config_of(tmp_path, parallel, name="alone"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").touch()
    with RunFolder(config_of(tmp_path, parallel, name="used")):
        run_ranks(train_in_ranks, 2, tmp_path, parallel)
    for expected, row in zip(rows_of(tmp_path / "alone")[1:], rows_of(tmp_path / "whole")[1:], strict=True):
        for name in ("reward", "eval_reward", "groups_without_signal", "answer_tokens", "truncated"):
            assert row[name] == pytest.approx(expected[name]), name
        of_answers_that_ran = ("kl", "entropy", "ratio_mean", "token_log_ratio_std", "sequence_log_ratio_std")
        for name in ("loss", "grad_norm", *(of_answers_that_ran if parallel == "ddp" else ())):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    alone, whole = (
        torch.load(tmp_path / name / "checkpoint.pt")["optimizer"]["weights"] for name in ("alone", "whole")
    )
    for name, values in alone.items():
        torch.testing.assert_close(whole[name]["weight"], values["weight"], rtol=0, atol=TRAINER_ABSOLUTE)
    if parallel == "fsdp2":
        rows, resumed = (rows_of(tmp_path / name) for name in ("whole", "stopped"))
        clock = dict.fromkeys(("seconds", "tokens_per_second"))
        assert [{**row, **clock} for row in resumed] == [{**row, **clock} for row in rows]


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"WORLD_SIZE: .* multiples of the 3 processes, got prompts_per_step with 4"):
        train(small(tmp_path))
    assert not (tmp_path / "demo").exists()
