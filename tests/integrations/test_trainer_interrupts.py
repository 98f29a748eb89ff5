"""A run that is interrupted at every place of a step, and resumed each time, equals one that was not, to the bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.reference_runs import rows_of, small

from gspo_kernels import Objective
from gspo_kernels.integrations.reference_trainer import read_config, train
from gspo_kernels.integrations.reference_trainer import trainer as loop
from gspo_kernels.integrations.reference_trainer.report import RunFolder
from gspo_kernels.integrations.settings import Step

# Where a run is interrupted: (owner of a function, its name, which call of it in a step, whether before it or after)
PLACES: dict[str, tuple[Any, str, int, str]] = {
    "before sampling": (loop.Training, "collect", 1, "before"),
    "after sampling": (loop.Training, "collect", 1, "after"),
    "after the advantages": (loop, "advantages_of", 1, "after"),
    "between updates": (loop, "update", 2, "before"),
    "in the evaluation": (loop.Training, "collect", 2, "after"),
    "after the row": (RunFolder, "write", 1, "after"),
    "before the checkpoint": (RunFolder, "save_checkpoint", 1, "before"),
    "after the checkpoint": (RunFolder, "save_checkpoint", 1, "after"),
    "before the model": (RunFolder, "save_model", 1, "before"),
}
# (seed, step, place) of each interrupt of one run, in this order; step 0 is the evaluation before training
INTERRUPTS = [
    (0, 1, "before sampling"),
    (0, 1, "after sampling"),
    (0, 1, "between updates"),
    (0, 2, "after sampling"),
    (0, 2, "in the evaluation"),
    (0, 3, "after sampling"),
    (0, 3, "after the row"),
    (0, 4, "before the checkpoint"),
    (0, 5, "after sampling"),
    (0, 5, "after the advantages"),
    (0, 6, "after the checkpoint"),
    (0, 6, "before the model"),
    (1, 0, "after sampling"),
    (1, 1, "after sampling"),
]
KINDS: dict[str, dict[str, Any]] = {
    "killed": {"precision": "bf16"},
    "Ctrl-C": {"lora_rank": 4, "lora_head": True},
}
WEIGHTS = {"killed": "model.safetensors", "Ctrl-C": "adapter_model.safetensors"}


class Killed(BaseException):
    """Ends a run without a last checkpoint, like SIGKILL."""


def interrupt(patch: pytest.MonkeyPatch, at: tuple[int, int, str], stop: Callable[[], None]) -> list[str]:
    """Call `stop` once, at a place of a step. Return a list that then contains the place."""
    step_of = {"begin": 0, "restore": 0, "train_step": 1}  # relative to the number of finished steps
    now: list[Any] = [None, None, {}]  # seed, step, calls of each function in this step
    stopped: list[str] = []

    def note(name: str) -> None:
        original = getattr(loop.Training, name)

        def noting(self: loop.Training, saved: Any = None) -> Any:
            done = saved["step"] if name == "restore" else self.step
            now[:] = [self.seed, done + step_of[name], {}]
            return original(self, *([] if saved is None else [saved]))

        patch.setattr(loop.Training, name, noting)

    for name in step_of:
        note(name)
    owner, name, call, when = PLACES[at[2]]
    original = getattr(owner, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        calls = now[2]
        calls[name] = calls.get(name, 0) + 1
        is_here = (*now[:2], calls[name]) == (*at[:2], call) and not stopped
        if is_here and when == "before":
            stopped.append(at[2])
            stop()
        result = original(*arguments, **options)
        if is_here and when == "after":
            stopped.append(at[2])
            stop()
        return result

    patch.setattr(owner, name, stopping)
    return stopped


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics without those that depend on the clock."""
    return [
        {name: x for name, x in row.items() if name not in ("seconds", "tokens_per_second")} for row in rows_of(folder)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_interrupted_at_every_place_continues_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The options are those whose state a checkpoint must restore.

    They are the moments and masters of the optimizer, schedules, the order of prompts, running moments of rewards, and
    the reference, which is the policy before training.
    """

    def stop() -> None:
        if kind == "killed":
            raise Killed
        signal.raise_signal(signal.SIGINT)

    options: dict[str, Any] = dict(steps=6, checkpoint_every=2, eval_every=2, updates_per_rollout=2, epochs=2)
    options |= dict(schedule="cosine", warmup_updates=3, weight_decay=0.1, learning_rate=3e-3, initial_new_tokens=3)
    options |= dict(advantages=(Step("normalize_rewards", {"by": "running"}),), length_steps=4, seeds=(0, 1), save=True)
    options |= dict(objective=Objective(kl_coef=0.1), **KINDS[kind])
    whole = train(small(tmp_path / "whole", **options)).folder
    config = small(tmp_path, **options)
    folder = config.folder
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # shells may ignore SIGINT
    for at in INTERRUPTS:
        with monkeypatch.context() as patch:
            stopped = interrupt(patch, at, stop)
            with pytest.raises(Killed if kind == "killed" else KeyboardInterrupt):
                train(config)
            assert stopped, at
        if (folder / "checkpoint.pt").is_file():
            config = read_config(resume=folder)
    train(config)
    assert numbers(folder) == numbers(whole)
    for name in ("samples.jsonl", *(f"model-seed{seed}/{WEIGHTS[kind]}" for seed in (0, 1))):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
