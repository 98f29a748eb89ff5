"""Runs of the reference trainer for every pair of settings: right in float64, and the same bits after an interruption.

To repeat the row 202648-7: GSPO_ARRAY_SEED=202648 python -m pytest tests/integrations/test_trainer_array.py -k 202648-7
"""

from __future__ import annotations

import os
import random
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import chat_model, killed_run
from helpers.pair_cover import pair_cover, seed_of_the_week, value_cover
from helpers.ranks import meet, run_ranks
from helpers.reference_runs import moe_checkpoint, rows_of, small, stopping, write_jsonl
from helpers.trainer_truth import Truth
from safetensors.torch import load_file
from torch.multiprocessing import ProcessExitedException  # pyright: ignore[reportPrivateImportUsage]

from gspo_kernels.integrations.reference_trainer import (
    InputError,
    TrainingError,
    optimizer,
    policy,
    read_config,
    train,
)
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.tasks import RewardComponent

CLOCK = ("seconds", "tokens_per_second")
PRESETS = "gspo gspo-token grpo dapo dr_grpo luspo cispo sapo gmpo reinforce dppo_tv dppo_kl vespo topr".split()
# A setting -> its values, each with the options that it stands for.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "objective": {x: {"objective": x} | ({"length_norm": 7} if x == "dr_grpo" else {}) for x in PRESETS},
    "kl": {
        "none": {},
        "KL": {"kl_coef": 0.1},
        "KL of tokens": {"kl_coef": 0.3, "kl_aggregation": "token-mean"},
        "KL of answers": {"kl_coef": 0.3, "kl_aggregation": "seq-mean-token-mean", "kl_estimator": "k2"},
    },
    "bonus": {"none": {}, "entropy": {"entropy_coef": 0.01}, "less entropy": {"entropy_coef": -0.01}},
    "correction": {
        "none": {},
        "old from the sampler": {"old_log_probs": "sampler"},
        "tokens": {"rollout_correction": {"level": "token", "mode": "mask", "low": 0.999, "high": 1.001}},
        "two": {"rollout_correction": [{"level": "geometric", "mode": "gate", "low": 0.99}, {"high": 1.1}]},
    },
    "sampler": {"exact": {}, "bf16": {"sampler_precision": "bf16"}},
    "advantages": {
        "of groups": {},
        "not scaled": {"advantages": [{"group_advantages": {"scale": "none"}}]},
        "running": {"advantages": [{"normalize_rewards": {"by": "running"}}]},
        "running, some 0": {"advantages": [{"normalize_rewards": {"by": "running"}}, {"clamp": {"min": 0.0}}]},
        "of tokens": {"advantages": ["group_advantages", "token_returns"]},
        "whitened": {"advantages": ["group_advantages", "whiten"]},
        "less KL": {"advantages": [{"subtract_kl": {"kl_coef": 0.1, "kl_estimator": "k3"}}, "group_advantages"]},
    },
    "tokens": {
        "all": {},
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.05, "top_k": 8},
        "top_p, not replayed": {"top_p": 0.8, "replay_kept_sets": False},
    },
    "temperature": {"1": {}, "0.7": {"temperature": 0.7}},
    "sizes": {  # odd numbers, and micro-batches that differ in tokens
        "5 x 3": {"prompts_per_step": 5, "group_size": 3, "updates_per_rollout": 3},
        "3 x 3, micro-batches": {
            "prompts_per_step": 3, "group_size": 3, "updates_per_rollout": 3, "micro_batch_size": 1,
        },
        "3 x 5, one update": {
            "prompts_per_step": 3, "group_size": 5, "updates_per_rollout": 1, "micro_batch_size": 5,
        },
        "7 x 2": {"prompts_per_step": 7, "group_size": 2, "updates_per_rollout": 2},
    },
    "epochs": {"1": {}, "2": {"epochs": 2}},
    "precision": {x: {"precision": x} for x in ("fp32", "bf16", "autocast", "fp16", "fp16-autocast")},
    "head": {"as the body": {}, "fp32": {"head_precision": "fp32"}},
    "trained": {"all": {}, "LoRA": {"lora_rank": 3}, "LoRA of the head": {"lora_rank": 2, "lora_head": True}},
    "checkpointing": {"off": {}, "on": {"gradient_checkpointing": True}},
    "skipping": {"default": {}, "off": {"skip_zero_advantage": False}},
    "budget": {"exact": {}, "budget": {"gradient_budget": 0.3}},
    "cache": {"default": {}, "1 MiB": {"cache_mib": 1}},
    "rate": {
        "constant": {"learning_rate": 3e-3},
        "cosine": {"schedule": "cosine", "warmup_updates": 2, "weight_decay": 0.1, "max_grad_norm": 0.01},
        "linear": {"schedule": "linear", "learning_rate": 3e-3, "max_grad_norm": 1e9},
        "none": {"learning_rate": 1e-30},
    },
    "teacher": {"none": {}, "teacher": {"distillation_k": 3, "distillation_coef": 0.5}},
    "rewards": {"all differ": {}, "half dead": {}, "all dead": {}, "of some answers": {}, "fail at times": {}},
    "model": {"demo": {}, "experts": {"task": "sorting"}, "dialogues": {"max_new_tokens": 5}},
    "evaluation": {"every step": {"eval_every": 1}, "at the end": {"eval_every": 9, "eval_prompts": 3}},
    "checkpoints": {
        "every step": {"checkpoint_every": 1},
        "every 2": {"checkpoint_every": 2},
        "none": {"checkpoint_every": 0},
    },
    "seeds": {"one": {"seeds": (0,)}, "two": {"seeds": (3, 1), "steps": 2}},
}  # fmt: skip  # a table
# Where a run is interrupted: a function, of which any call may be the one, and what happens.
STOPS: dict[str, tuple[Any, str, list[int] | Exception]] = {
    "sampling": (loop, "collect", [signal.SIGINT]),
    "before the advantages": (loop, "advantages_of", [signal.SIGTERM]),
    "after the advantages": (loop, "with_log_probs", [signal.SIGINT]),
    "update": (loop, "update", [signal.SIGTERM]),
    "update, twice": (loop, "update", [signal.SIGINT, signal.SIGINT]),
    "failed update": (loop, "update", TrainingError("an update is not finite")),
    "evaluation": (loop.Learner, "evaluate", [signal.SIGINT]),
    "metrics": (loop.RunFolder, "write", [signal.SIGTERM]),
    "one rank": (loop.Training, "train_step", [signal.SIGTERM]),  # the last; the others stop after the same step
    "killed": (loop.RunFolder, "write", OSError("as if killed: nothing is saved")),
}
RESUMES: dict[str, tuple[Any, str, list[int]] | None] = {
    "at once": None,
    "stopped while opening": (loop.RunFolder, "open", [signal.SIGINT]),
    "stopped while loading": (loop.Optimizer, "load", [signal.SIGTERM]),
    "stopped at the start": (loop.TrainingProgress, "begin", [signal.SIGINT]),
}
FACTORS = {name: list(values) for name, values in SETTINGS.items()} | {"stop": [*STOPS, "extended"]}
FACTORS |= {"resume": list(RESUMES)}


def is_allowed(row: dict[str, str]) -> bool:
    """Leave out what the trainer refuses (tests of bad options have the messages), and what has no meaning."""
    corrected = row["correction"] in ("tokens", "two")
    return not (
        (row["budget"] == "budget" and row["bonus"] != "none")
        or (corrected and row["objective"] == "vespo")
        or (row["stop"] == "extended" and (row["rate"] in ("cosine", "linear") or row["resume"] != "at once"))
        or (row["stop"] == "extended" and (row["seeds"] == "two" or row["checkpoints"] == "none"))
        or (row["evaluation"] == "at the end" and row["stop"] == "extended")
    )


SEED = seed_of_the_week()
QUICK = 7  # rows without the mark slow: 40 seconds of one core
FIRST = {name: values[0] for name, values in FACTORS.items()}
# These rows always run, because each detects a fault that few of the week's rows detect.
PINNED: dict[str, dict[str, str]] = {
    "half precision": {"precision": "bf16", "sizes": "3 x 3, micro-batches"},
    "KL of tokens": {
        "kl": "KL of tokens", "temperature": "0.7", "teacher": "teacher", "sizes": "3 x 3, micro-batches",
    },
    "dead answers": {"objective": "dapo", "rewards": "half dead", "sampler": "bf16", "epochs": "2"},
    "less entropy": {"bonus": "less entropy", "rewards": "half dead"},
    "fp16": {"precision": "fp16", "rate": "cosine", "advantages": "running", "stop": "after the advantages"},
}  # fmt: skip  # a table
ROWS = [pytest.param(FIRST | changes, id=name, marks=pytest.mark.slow) for name, changes in PINNED.items()]
# Objectives have no state to save, so they are not paired with interruptions. Those pairs would add half as many rows.
OF_WEEK = pair_cover(FACTORS, is_allowed, SEED, independent=[("objective", "stop")])
for i, of_week in enumerate(OF_WEEK):
    ROWS.append(pytest.param(of_week, id=f"{SEED}-{i}", marks=[] if i < QUICK else pytest.mark.slow))


def rows_of_ranks() -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Return rows for two processes: two plain ones, and some that have every value but of the factors `replaced`.

    With each row, return more options.
    """
    replaced = ("objective", "sizes", "stop", "resume")
    others = value_cover([{name: x for name, x in row.items() if name not in replaced} for row in OF_WEEK])
    size = {"group_size": 3, "prompts_per_step": 6, "updates_per_rollout": 3}
    rows = []
    for i, row in enumerate([{"rewards": "half dead"}, {"kl": "KL", "epochs": "2"}, *others]):
        is_sharded = i % 2 == 0
        more = size | {"parallel": "fsdp2" if is_sharded else "ddp"} | ({"micro_batch_size": 1} if i % 3 else {})
        sampler = {"sampler": "exact"} if is_sharded else {}  # sharded weights are not rounded
        row = {**FIRST, **row, **sampler, "objective": PRESETS[i], "stop": "one rank"}
        more["save"] = row["model"] != "demo" or row["trained"] == "all"  # an adapter names a saved base
        rows.append((row, more))
    return rows


def number(text: str, answer: Any, of: int) -> int:
    """Return a number of two texts, below `of`."""
    return zlib.crc32(f"{text} {answer}".encode()) % of


def rewards_of(kind: str) -> list[RewardComponent]:
    """Make two rewards of the kind."""
    dead = {"half dead": 2, "all dead": 4}.get(kind, 0)

    def score(completion: str, answer: Any) -> float:
        return 1.0 if number("", answer, 4) < dead else float(number(completion, answer, 10))

    def sometimes(completion: str, answer: Any) -> float | None:
        if dead or number(completion, answer, 3):
            return 1.0
        return {"of some answers": None, "fail at times": float("nan")}.get(kind, 0.0)

    def score_of_some(completion: str, answer: Any) -> float | None:
        return None if kind == "of some answers" and number("", answer, 5) < 2 else score(completion, answer)

    return [RewardComponent("score", 0.5, score_of_some), RewardComponent("sometimes", 2.0, sometimes)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return saved_models(tmp_path_factory.mktemp("models"))


def saved_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each model, and of its teacher."""
    torch.manual_seed(9)
    teacher = policy.demo_policy()
    teacher.model.resize_token_embeddings(19)  # more rows than the policy's head, with large logits
    with torch.no_grad():
        teacher.head.get_parameter("weight")[-4:] = 100 * teacher.head.get_parameter("weight")[:4]
    teacher.save(folder / "demo")
    chat = chat_model.save(folder / "chat")
    turns = [("user", "a"), ("assistant", "bc"), ("user", "def")]
    prompts = [
        [{"role": role, "content": text[i % 2 :] + str(i)} for role, text in turns[-1 - i % 3 :]] for i in range(12)
    ]
    data = write_jsonl(folder / "data.jsonl", *({"prompt": x, "answer": str(i)} for i, x in enumerate(prompts)))
    return {
        "demo": {"teacher": str(folder / "demo")},
        "experts": {
            "model": str(moe_checkpoint(folder / "experts", output_router_logits=True)),
            "teacher": str(folder / "demo"),
        },
        "dialogues": {"model": chat, "data": data, "teacher": chat},
    }


def counting(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Count the calls of a function, in the list's only number."""
    original, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return original(*arguments, **options)

    patch.setattr(owner, name, counted)
    return calls


def files_of(folder: Path) -> Any:
    """Return what a run has written, without what depends on the clock."""
    metrics = [{name: x for name, x in row.items() if name not in CLOCK} for row in rows_of(folder)]
    return metrics, *((folder / name).read_bytes() for name in ("samples.jsonl", "held_out.jsonl"))


@pytest.mark.parametrize("row", ROWS)
def test_a_run_is_right_and_continues_to_the_bit(
    row: dict[str, str],
    models: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(row, models, tmp_path, monkeypatch)
    unsaved = row["stop"] in ("update, twice", "failed update")
    assert ("stopped in the updates of step" in capsys.readouterr().out) == unsaved


@pytest.mark.slow
def test_a_run_whose_process_is_killed_continues_to_the_bit(tmp_path: Path) -> None:
    """Send SIGKILL before a file operation, so that the process cannot clean up."""

    def run(name: str, killed_at: int = 0, resume: bool = False, overwrite: bool = False) -> Path:
        options = {"steps": 2, "prompts_per_step": 2, "eval_prompts": 2, "checkpoint_every": 1, "save": True}
        options |= {"output": tmp_path / name, "overwrite": overwrite}
        ranks = tmp_path / f"{name}, killed at {killed_at}"
        ranks.mkdir()
        run_ranks(killed_run.main, 1, ranks, killed_at, resume, options, imported=killed_run.__name__)
        return tmp_path / name / "demo"

    def all_files_of(folder: Path) -> Any:
        model = {path.name: path.read_bytes() for path in (folder / "model-seed0").iterdir()}
        return files_of(folder), model, {path.name for path in folder.iterdir()}

    truth = all_files_of(run("whole"))
    operations = int((tmp_path / "whole" / "operations").read_text())
    for killed_at in random.Random(SEED).sample(range(1, operations + 1), 8):
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            run(f"{killed_at}", killed_at)
        can_resume = (tmp_path / f"{killed_at}" / "demo" / "checkpoint.pt").exists()
        folder = run(f"{killed_at}", resume=can_resume, overwrite=not can_resume)
        assert all_files_of(folder) == truth, f"killed before operation {killed_at}"


def rank_main(rank: int, folder: Path, models: dict[str, dict[str, Any]], rows: list[Any]) -> None:
    with pytest.raises(InputError, match=r"used is in use: another process"):
        meet_and_train(small(folder, name="used", prompts_per_step=2, updates_per_rollout=1))
    for i, (row, more) in enumerate(rows):
        (folder / f"{i}").mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            check(row, models, folder / f"{i}", patch, more)


@pytest.mark.slow
def test_runs_of_two_processes_are_right_and_continue_to_the_bit(
    tmp_path: Path, models: dict[str, dict[str, Any]]
) -> None:
    """All rows run in one start of the processes. A folder that another process uses is refused by both."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").touch()
    rows = rows_of_ranks()
    with RunFolder(small(tmp_path, name="used")):
        run_ranks(rank_main, 2, tmp_path, models, rows, deadline=1800.0)
    row, more = rows[1]
    options = {**more, "steps": 1, "eval_prompts": 5, "max_new_tokens": 7}
    alone = rows_of(train(small(tmp_path / "alone", **options), reward=rewards_of(row["rewards"])).folder)
    together = rows_of(tmp_path / "1" / "whole" / "demo")
    assert together[0]["eval_rewards"] == alone[0]["eval_rewards"]
    for name in ("reward", "reward/score", "truncated", "answer_tokens"):  # of answers sampled before any update
        assert together[1][name] == alone[1][name], name


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"WORLD_SIZE: .* multiples of the 3 processes, got prompts_per_step with 4"):
        train(small(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options, message in (
        ({"prompts_per_step": 4, "group_size": 3, "updates_per_rollout": 4}, "updates_per_rollout with 3"),
        ({"updates_per_rollout": 2, "micro_batch_size": 8}, "micro_batch_size with 1"),
    ):
        with pytest.raises(InputError, match=f"multiples of the 2 processes, got {message}"):
            train(small(tmp_path, **options))
    assert not (tmp_path / "demo").exists()


def meet_and_train(*arguments: Any, **options: Any) -> Any:
    meet()
    return train(*arguments, **options)


def check_models(folder: Path, states: dict[int, Any]) -> None:
    """Compare each seed's saved model with the weights in the state of the finished training."""
    for seed, state in states.items():
        (file,) = (folder / f"model-seed{seed}").glob("*.safetensors")
        saved = load_file(file)
        trained = {name.replace(".default", ""): x["weight"] for name, x in state["optimizer"]["weights"].items()}
        assert trained.keys() - saved.keys() <= {"lm_head.weight"}  # which may be tied
        for name in trained.keys() & saved.keys():
            assert torch.equal(saved[name], trained[name].to(saved[name].dtype)), name


def check(
    row: dict[str, str],
    models: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any] | None = None,
) -> None:
    generator = random.Random(str(row))
    monkeypatch.setattr(optimizer, "FIRST_LOSS_SCALE", 2.0**20)  # overflows at first
    monkeypatch.setattr(optimizer, "UPDATES_TO_RAISE", 3)
    options: dict[str, Any] = {"steps": 3, "eval_prompts": 5, "max_new_tokens": 7} | models[row["model"]]
    for name, value in row.items():
        options |= SETTINGS.get(name, {}).get(value, {})
    options |= more or {}
    if row["teacher"] == "none":
        options.pop("teacher")
    if row["model"] == "dialogues":
        options["eval_prompts"] = 2
    rewards = rewards_of(row["rewards"])
    states: list[dict[int, Any]] = [{}, {}]
    run = loop.Training.run

    def noted(training: Any, saved: Any) -> Any:
        result = run(training, saved)
        states[-1][training.seed] = training.state()
        return result

    monkeypatch.setattr(loop.Training, "run", noted)
    monkeypatch.setattr(loop.RunFolder, "plot", lambda *_, **__: (None, ""))
    config = small(tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        Truth(config, patch)
        owner, name, what = STOPS.get(row["stop"], (loop, "update", []))
        calls = counting(patch, owner, name)
        report = meet_and_train(config, reward=rewards)
        whole = report.folder
    states[0], states[1] = states[1], {}
    if config.save:
        check_models(whole, states[0])

    call = generator.randint(1, calls[0])
    if row["stop"] == "extended":
        folder = meet_and_train(small(tmp_path, **{**options, "steps": 2}), reward=rewards).folder
    else:
        with monkeypatch.context() as patch:
            stopping(patch, owner, name, what, call)
            with pytest.raises((KeyboardInterrupt, SystemExit, TrainingError, OSError)):
                meet_and_train(small(tmp_path, **options), reward=rewards)
        folder = tmp_path / config.folder.name
    if not (folder / "checkpoint.pt").exists():
        # After the first evaluation, a run that gets a single signal must leave a checkpoint.
        is_one_signal = isinstance(what, list) and len(what) == 1
        assert not (is_one_signal and (folder / "metrics.jsonl").exists() and rows_of(folder))
        again = meet_and_train(small(tmp_path, **options, overwrite=True), reward=rewards)
    else:
        interruption = RESUMES[row["resume"]]
        if interruption is not None:
            with monkeypatch.context() as patch:
                stopping(patch, *interruption, call=1)
                with pytest.raises((KeyboardInterrupt, SystemExit)):
                    meet_and_train(read_config(resume=folder), reward=rewards)
        again = meet_and_train(read_config(texts=[f"steps={config.steps}"], resume=folder), reward=rewards)
    assert [x.held_out for x in again.results] == [x.held_out for x in report.results]
    assert os.environ.get("RANK", "0") != "0" or files_of(folder) == files_of(whole)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
