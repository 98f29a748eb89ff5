"""Run examples/trl_gspo.py as it stands, and the README's lines with the folder of a tiny model for the hub's id."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.readme import TRL_EXAMPLE, WITH_TRL

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.trl import GSPOTrainer


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the example in a folder; return its variables."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(TRL_EXAMPLE), *arguments])
    return runpy.run_path(str(TRL_EXAMPLE), run_name="__main__")


def test_the_lines_of_the_readme_train_with_the_papers_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_policy().save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    lines = WITH_TRL.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path / "model"))
    assert lines != WITH_TRL
    lines = lines.replace(
        'GSPOConfig("runs/gspo", ', 'GSPOConfig("runs/gspo", max_steps=8, logging_steps=1, use_cpu=True, bf16=False, '
    )
    scope: dict[str, Any] = {}
    exec(lines, scope)
    state = scope["trainer"].state
    assert state.global_step == 8 and scope["trainer"].epsilon_high == 4e-4
    assert any(row.get("gspo/passes", 0) > 1 for row in state.log_history)


def test_a_checkpoint_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_policy().save(tmp_path / "model")
    trainer = run(monkeypatch, tmp_path, "--model", str(tmp_path / "model"), "--steps", "4")["trainer"]
    assert isinstance(trainer, GSPOTrainer) and trainer.epsilon_high == 4e-4 and trainer.state.global_step == 4
