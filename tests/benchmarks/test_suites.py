"""The benchmark suites write results to the right files, refuse bad options, and run with --tiny."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_kernels.benchmarks import measure
from gspo_kernels.benchmarks.__main__ import COMMANDS
from gspo_kernels.benchmarks.suites import step

CPU = torch.device("cpu")


def parsed(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["step", *options])
    return step.parsed()[1]


def test_trials_do_not_replace_published_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parsed(monkeypatch, "--device", "cpu", "--tiny") == {"step": Path("runs/trials/step-cpu.json")}
    paths = parsed(monkeypatch, "--device", "cpu", "--time", "--vocab")
    assert paths == {suite: measure.RESULTS / f"{suite}-cpu.json" for suite in ("step", "vocab")}


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


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("skip", ["--rounds", "0"], "--rounds: expected a whole number of at least 1, got '0'"),
        ("step", ["--device", "zz"], "--device: expected a device that torch has here, such as cpu, got 'zz'"),
        ("step", ["--time", "--vocab", "--output", "a.json"], "--output: --vocab writes another file"),
        ("precision", ["--device", "meta"], "--device: expected cpu or cuda, got 'meta'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    suite: str, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [suite, *options])
    with pytest.raises(SystemExit):
        importlib.import_module(f"gspo_kernels.benchmarks.{COMMANDS[suite]}").main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["step", "skip", "kept_sets", "operands"])
def test_a_trial_runs(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "fresh", lambda *_, **__: {"peak_bytes": 1})
    output = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", [suite, "--tiny", "--output", str(output)])
    importlib.import_module(f"gspo_kernels.benchmarks.{COMMANDS[suite]}").main()
    file = json.loads(output.read_text())
    assert file["suite"] == suite and file["commit"] and file["versions"]["torch"]
