"""The commands of the benchmarks: where their results go, and what they say of bad options before they begin."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gspo_kernels.benchmarks import measure, table
from gspo_kernels.benchmarks.__main__ import COMMANDS
from gspo_kernels.benchmarks.report import pages as report
from gspo_kernels.benchmarks.studies import budgets
from gspo_kernels.benchmarks.suites import sparsity, step

CPU = torch.device("cpu")
SUITES = ("step", "vocab", "busy", "trainer", "sparsity", "fidelity", "overhead", "policy", "budgets", "ratio_range")


def test_a_trial_does_not_touch_what_the_report_tells_of() -> None:
    assert measure.place("step", CPU) == report.RESULTS / "step-cpu.json"
    assert measure.place("step", CPU, trial=True) == Path("runs/trials/step-cpu.json")


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "other.json").write_text('{"a": 1}')
    for bad in (tmp_path, tmp_path / "notes.json", tmp_path / "other.json", tmp_path / "notes.json" / "a.json"):
        with pytest.raises(SystemExit, match="--output: expected a file to make, or results of an earlier run"):
            measure.destination("step", CPU, bad)
    assert (tmp_path / "notes.json").read_text() == "mine"
    good = measure.destination("step", CPU, tmp_path / "new" / "a.json")
    assert not good.exists() and measure.save("step", CPU, {"a": 1}, good) == good
    assert measure.destination("step", CPU, good) == good


def test_what_cannot_be_told_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = measure.save("step", CPU, {"a": 1}, tmp_path / "a.json")
    before = path.read_text()
    with pytest.raises(TypeError):
        measure.save("step", CPU, {"a": object()}, path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("suite", "options", "said"),
    [
        ("step", ["--tokens", "5"], "--tokens: expected at least 8"),
        ("step", ["--memory-tokens", "x"], "expected a number such as 4096 or 4k, got 'x'"),
        ("step", ["--rounds", "0"], "--rounds: expected a whole number of at least 1, got '0'"),
        ("vocab", ["--device", "zz"], "--device: expected a device that torch has here, such as cpu, got 'zz'"),
        ("trainer", ["--against", "nobody"], "--against: nobody: choose from naive"),
        ("fidelity", ["--device", "meta"], "--device: expected cpu or cuda, got 'meta'"),
        ("fidelity", ["--tokens", "1"], "--tokens: expected a whole number of at least 64, got '1'"),
        ("fidelity", ["--sequences", "5"], "expected a whole number of at least 1000, got '5'"),
        ("policy", ["--threads", "-1"], "--threads: expected a whole number of at least 1, got '-1'"),
        ("budgets", ["--workers", "0"], "--workers: expected a whole number of at least 1, got '0'"),
        ("budgets", ["--policy", "nowhere"], "--policy: nowhere holds no policy"),
    ],
)
def test_bad_options_are_said_before_anything_is_measured(
    suite: str, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [suite, *options])
    with pytest.raises(SystemExit):
        importlib.import_module(f"gspo_kernels.benchmarks.{COMMANDS[suite]}").main()
    assert said in capsys.readouterr().err


def test_one_file_is_about_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measure.save_part("step", CPU, "time", {"model": "qwen3-8b", "runs": []}, tmp_path / "step.json")
    before = path.read_text()
    monkeypatch.setattr(sys, "argv", ["step", "--memory", "--tiny", "--output", str(path)])
    with pytest.raises(SystemExit):
        step.main()
    assert "would keep {'time': 'qwen3-8b'} beside tiny" in capsys.readouterr().err and path.read_text() == before


def test_tokens_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step.bench, "costs", lambda spec, *_, **__: [])
    for asked, rows in ((15, 8), (9001, 9000), (4096, 4096)):
        spec = step.Spec(step.MODELS["qwen2.5-0.5b"], asked, "rl-like")
        assert step.memory(spec, [])["tokens"] == rows


def test_memory_ends_where_the_batch_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(spec: Any, chosen: Any) -> dict[str, Any]:
        if spec.tokens > 100:
            raise MemoryError("the batch")
        return {"tokens": spec.tokens, "candidates": []}

    monkeypatch.setattr(step, "memory", memory)
    options = ["--memory", "--memory-tokens", "64", "128", "256", "--output", str(tmp_path / "step.json")]
    monkeypatch.setattr(sys, "argv", ["step", *options])
    step.main()
    points = json.loads((tmp_path / "step.json").read_text())["results"]["memory"]["points"]
    assert [point["tokens"] for point in points] == [64]


def test_sparsity_takes_no_time_of_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    w = sparsity.make(64, **sparsity.TIMED, width=64, vocab=1000)
    assert sparsity._times(w, ["exact"], 1)["exact"]["seconds"] > 0
    right = sparsity.ours_at

    def doubled(*arguments: Any) -> Any:
        one = right(*arguments)
        return one._replace(loss=lambda w, old, hidden, weight: one.loss(w, old, 2 * hidden - hidden.detach(), weight))

    monkeypatch.setattr(sparsity, "ours_at", doubled)
    with pytest.raises(RuntimeError, match=r"exact: wrong gradients, d_hidden is off by"):
        sparsity._times(w, ["exact"], 1)


def test_a_training_that_fails_is_the_last_one_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, failed = [], threading.Event()

    def fresh(*_: Any, **how: Any) -> None:
        begun.append(how["name"])
        if len(begun) > 1:
            failed.wait(10)  # until the first one's failure has reached who waits for it
        raise RuntimeError("no room on the disk")

    cancel = budgets.ThreadPoolExecutor.shutdown

    def shutdown(self: Any, wait: bool = True, *, cancel_futures: bool = False) -> None:
        cancel(self, wait=False, cancel_futures=cancel_futures)
        failed.set()

    monkeypatch.setattr(budgets.measure, "fresh", fresh)
    monkeypatch.setattr(budgets, "moved", lambda model, *_: model)
    monkeypatch.setattr(budgets.ThreadPoolExecutor, "shutdown", shutdown)
    with pytest.raises(RuntimeError, match="no room on the disk"):
        budgets.trainings(budgets.FULL, budgets.FULL_SEEDS, tmp_path, tmp_path, tmp_path, 1)
    assert len(begun) <= 2 < len(budgets.ARMS) * len(budgets.FULL_SEEDS)


def test_small_times_are_not_rounded_away_and_a_log_hears_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert [table._short(x) for x in (0.4812, 1.04, 9.96, 12.3, 1234.5)] == ["0.48", "1.0", "10.0", "12", "1234"]
    with table.progress(Console(force_terminal=False), 3) as tick:
        for what in ("memory", "time", "time"):
            tick(what)
    assert capsys.readouterr().err.splitlines() == ["memory", "time"]


def test_everyone_who_saves_says_where() -> None:
    for suite in SUITES:
        text = Path(measure.__file__).parent.joinpath(*COMMANDS[suite].split(".")).with_suffix(".py").read_text()
        assert "destination(" in text, suite
