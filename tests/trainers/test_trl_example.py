"""Run examples/trl_gspo.py as it stands, and the README's lines with the folder of a tiny model for the hub's id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.readme import WITH_TRL

pytest.importorskip("trl", minversion="1.15")
pytest.importorskip("datasets")
from gspo_kernels.integrations.reference_trainer.policy import demo_policy


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
