"""Run the TRL example of the README as it stands."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.readme import TRL_EXAMPLE, WITH_TRL

pytest.importorskip("trl", minversion="0.29")
pytest.importorskip("datasets")
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.trl import GSPOTrainer


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the example in a folder; return its variables."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(TRL_EXAMPLE), *arguments])
    return runpy.run_path(str(TRL_EXAMPLE), run_name="__main__")


def test_the_readme_shows_the_example() -> None:
    assert TRL_EXAMPLE.read_text().endswith(WITH_TRL)


def test_a_random_model_learns_and_is_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = run(monkeypatch, tmp_path)
    ((first, last),) = re.findall(r"mean reward: (\d\.\d+) .* updates, (\d\.\d+) in", capsys.readouterr().out)
    assert float(last) > float(first) + 0.2
    assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in variables["trainer"].state.log_history)


def test_a_checkpoint_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_policy().save(tmp_path / "model")
    trainer = run(monkeypatch, tmp_path, "--model", str(tmp_path / "model"), "--steps", "4")["trainer"]
    assert isinstance(trainer, GSPOTrainer) and trainer.epsilon_high == 4e-4 and trainer.state.global_step == 4
