"""The benchmark suites write results to the right files, and run with --tiny."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from gspo_kernels.benchmarks import measure
from gspo_kernels.benchmarks.__main__ import COMMANDS

CPU = torch.device("cpu")


def test_a_file_that_cannot_be_written_or_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "other.json").write_text('{"a": 1}')
    for bad in (tmp_path, tmp_path / "notes.json", tmp_path / "other.json", tmp_path / "notes.json" / "a.json"):
        with pytest.raises(SystemExit, match="--output: expected a new file, or results of an earlier run"):
            measure.destination("step", CPU, bad)
    good = measure.destination("step", CPU, tmp_path / "new" / "a.json")
    before = measure.save("step", CPU, {"a": 1}, good).read_text()
    with pytest.raises(TypeError):
        measure.save("step", CPU, {"a": object()}, good)
    assert good.read_text() == before


@pytest.mark.parametrize("suite", ["step", "skip", "kept_sets", "operands"])
def test_a_trial_runs(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "fresh", lambda *_, **__: {"peak_bytes": 1})
    output = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", [suite, "--tiny", "--output", str(output)])
    importlib.import_module(f"gspo_kernels.benchmarks.{COMMANDS[suite]}").main()
    file = json.loads(output.read_text())
    assert file["suite"] == suite and file["commit"] and file["versions"]["torch"]
