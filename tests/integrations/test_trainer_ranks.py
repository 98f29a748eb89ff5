"""Two processes train like one: same parameters, one run folder, an exact resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.reference_runs import rows_of, small
from tolerance import FP16_RUN_RELATIVE, TRAINER_ABSOLUTE

from gspo_kernels.integrations.reference_trainer import InputError, TrainingError, held_out, read_config, train, trainer
from gspo_kernels.integrations.reference_trainer.loading import load_policy
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.reference_trainer.sampling import Answer, answers_to
from gspo_kernels.integrations.tasks import Example, RewardComponent

OPTIONS: dict[str, Any] = dict(steps=2, learning_rate=3e-4, save=True, micro_batch_size=2, updates_per_rollout=2)
OPTIONS |= dict(prompts_per_step=4, group_size=4, kl_coef=0.1, objective="dapo", checkpoint_every=1, epochs=2)
ONE, SHARDED = {}, {"parallel": "fsdp2"}
THREE_EACH = {"prompts_per_step": 6, "group_size": 2, "micro_batch_size": 3}
# In bf16, one process and two must agree to the bit, on every processor. So both compute batches of the same shapes
# (`two_at_a_time`), and with one micro-batch per process both add the same two gradients. Otherwise an activation may
# round the other way, and AdamW divides small gradients by their size: no useful limit follows from bf16's rounding.
SHARDED_FP16 = {"parallel": "fsdp2", "precision": "fp16", "micro_batch_size": 4, "threads": 1}
LORA = {"lora_rank": 4, "lora_head": True, "precision": "bf16", "micro_batch_size": 4, "threads": 1}


def two_at_a_time(policy: Any, examples: Sequence[Example], *, seeds: Any = None, **options: Any) -> list[Answer]:
    """Sample the answers to two prompts at a time."""
    answers: list[Answer] = []
    for i in range(0, len(examples), 2):
        pair = slice(i, i + 2)
        answers += answers_to(policy, examples[pair], seeds=seeds and seeds[pair], **options)
    return answers


def config_of(folder: Path, **changes: Any) -> Any:
    texts = [f"{name}={value}" for name, value in {**OPTIONS, **changes}.items()]
    return read_config(texts=[f"output={folder}", "seeds=0", "eval_prompts=8", "eval_every=1", *texts])


def train_in_ranks(rank: int, folder: Path, changes: dict[str, Any]) -> None:
    same_shapes = "precision" in changes
    with patch.object(held_out, "answers_to", two_at_a_time) if same_shapes else nullcontext():
        train(config_of(folder, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [ONE, THREE_EACH, SHARDED, SHARDED_FP16, LORA],
    ids=["ddp", "ddp with other shares", "fsdp2", "fsdp2 in fp16", "ddp with LoRA and bf16"],
)
def test_two_processes_train_like_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    train_in_ranks(0, tmp_path / "alone", {**changes, "parallel": "ddp"})
    run_ranks(train_in_ranks, 2, tmp_path, changes, deadline=120.0)
    alone, together = tmp_path / "alone" / "demo", tmp_path / "demo"
    relative = FP16_RUN_RELATIVE if changes is SHARDED_FP16 else 1e-3
    for expected, row in zip(rows_of(alone)[1:], rows_of(together)[1:], strict=True):
        for name in ("reward", "eval_reward", "groups_without_signal", "answer_tokens", "truncated"):
            assert row.get(name) == pytest.approx(expected.get(name)), name
        stds = ("token_log_ratio_std", "sequence_log_ratio_std")
        for name in ("loss", "kl", "kl_to_old", "entropy", "ratio_mean", *stds, "grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=relative, abs=1e-5), name
    states = [torch.load(folder / "checkpoint.pt")["optimizer"]["weights"] for folder in (alone, together)]
    before = load_policy_weights(tmp_path, changes)
    # One process adds the gradients of its micro-batches in fp16, FSDP2 in fp32.
    limit = 0.0 if changes is LORA else 4 * OPTIONS["learning_rate"] if changes is SHARDED_FP16 else TRAINER_ABSOLUTE
    for name, values in states[0].items():
        torch.testing.assert_close(states[1][name]["weight"], values["weight"], rtol=0, atol=limit)
        if name in before:
            assert (values["weight"] - before[name]).abs().max() > 20 * TRAINER_ABSOLUTE, name
    if not changes.get("lora_rank"):
        assert load_policy(str(together / "model-seed0"))
        expected, row = (rows_of(train(read_config(texts=["steps=3"], resume=x)).folder)[3] for x in (alone, together))
        assert row["reward"] == expected["reward"] > 0  # one process continues what two began
        assert row["loss"] == pytest.approx(expected["loss"], rel=relative, abs=1e-5)


def load_policy_weights(folder: Path, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the trainable weights before training."""
    from gspo_kernels.integrations.reference_trainer.loading import initial_policy, set_seed

    set_seed(0)
    policy = initial_policy(config_of(folder, **{**changes, "parallel": "ddp"}))
    return {name: weight.detach() for name, weight in policy.model.named_parameters() if weight.requires_grad}


def stop_and_resume(rank: int, folder: Path) -> None:
    original = trainer.Training.train_step

    def stopped(self: trainer.Training, examples: list[Example]) -> None:
        if self.step == 1 and rank == 1:
            signal.raise_signal(signal.SIGTERM)
        original(self, examples)

    changes = {"checkpoint_every": 100, "steps": 4, "parallel": "fsdp2"}
    trainer.Training.train_step = stopped  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        train(config_of(folder, name="stopped", **changes))
    trainer.Training.train_step = original  # type: ignore[method-assign]
    assert len(rows_of(folder / "stopped")) == 3  # both processes stop after step 2
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    train(read_config(resume=folder / "stopped"))
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    train(config_of(folder, name="whole", **changes))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_they_resume_to_the_bit(tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 2, tmp_path, deadline=120.0)
    stopped, whole = (rows_of(tmp_path / name) for name in ("stopped", "whole"))
    clock = ("seconds", "tokens_per_second")
    assert [{**row, **dict.fromkeys(clock)} for row in stopped] == [{**row, **dict.fromkeys(clock)} for row in whole]


def train_with_one_held_out_prompt(rank: int, folder: Path) -> None:
    train(config_of(folder, parallel="fsdp2", eval_prompts=1))


@pytest.mark.slow
def test_a_process_without_held_out_prompts_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """Sharded weights are gathered for an evaluation by all processes, whatever prompts each has."""
    run_ranks(train_with_one_held_out_prompt, 2, tmp_path, deadline=120.0)
    assert all("eval_reward" in row for row in rows_of(tmp_path / "demo"))


def train_with_failures(rank: int, folder: Path) -> None:
    """Fail in all calls of the first process, then in all calls of both."""

    def failing(*ranks: int) -> list[RewardComponent]:
        def reward(completion: str, answer: str) -> float:
            if rank in ranks:
                raise ConnectionError("no server")
            return float(len(completion))

        return [RewardComponent("server", 1.0, reward)]

    train(config_of(folder, name="first", steps=1), reward=failing(0))
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    with pytest.raises(TrainingError, match=r"^the reward 'server' failed for all 8 answers in the evaluation before"):
        train(config_of(folder, name="both", steps=1), reward=failing(0, 1))


@pytest.mark.slow
def test_processes_stop_together_if_the_calls_of_all_fail(tmp_path: Path) -> None:
    run_ranks(train_with_failures, 2, tmp_path, deadline=120.0)
    assert [row.get("reward_failures") for row in rows_of(tmp_path / "first")] == [None, 8]
    assert not (tmp_path / "both").exists()


def train_where_nothing_can_be_written(rank: int, folder: Path) -> None:
    with pytest.raises(InputError, match=r"demo is in use: another process"):
        train(config_of(folder))
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    original = RunFolder.save_checkpoint

    def blocked(self: RunFolder, state: dict[str, Any]) -> None:
        self.checkpoint.mkdir(exist_ok=True)  # a file cannot replace a folder
        original(self, state)

    with (
        patch.object(RunFolder, "save_checkpoint", blocked),
        pytest.raises(TrainingError, match=r"checkpoint\.pt cannot be written: .*Is a directory"),
    ):
        train(config_of(folder, name="other", parallel="fsdp2"))


@pytest.mark.slow
def test_what_the_first_process_may_not_write_stops_all(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "metrics.jsonl").touch()
    with RunFolder(config_of(tmp_path)):
        run_ranks(train_where_nothing_can_be_written, 2, tmp_path, deadline=120.0)


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"WORLD_SIZE: .* multiples of the 3 processes, got prompts_per_step with 4"):
        train(small(tmp_path))
    assert not (tmp_path / "demo").exists()
