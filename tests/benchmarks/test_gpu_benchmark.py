"""`python -m gspo_kernels.benchmarks gpu` makes a dry run with interpreted kernels, and survives crashes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_kernels.benchmarks import measure
from gspo_kernels.benchmarks.gpu import command, groups, times, tune

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *options, "--device", "cpu"])
    return command.main()


def results_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["results"]


def test_a_dry_run_measures_every_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for library in ("OMP", "OPENBLAS"):  # the shapes are so small that more threads are slower
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")
    path = tmp_path / "new" / "gpu.json"
    assert run(monkeypatch, "--tiny", "--output", str(path)) == 0
    results = results_in(path)
    printed = capfd.readouterr().out
    assert list(results) == groups.DEFAULT
    first, second, *_, last = printed.splitlines()
    assert first == "Dry run: interpreted kernels on a CPU, small shapes. The times mean nothing."
    assert last == f"{path}: no faults. This was a dry run: the times mean nothing."
    assert f"torch {torch.__version__}" in second and re.search(r"^  D +vendor d_logits", printed, re.M)
    absent = ", ".join(p for p in ("nvidia-cutlass-dsl", "verl") if measure.version(p) is None)
    assert (f"not installed, so not measured: {absent}\n" in printed) == bool(absent)
    assert path.with_suffix(".log").read_text().count(": done after ") == printed.count(": done after ") > len(results)
    timed = {(r.get("shape"), r.get("batch"), r["what"]) for group in results.values() for r in group["results"]}
    kernels = {f"kernel {name}" for name in (*tune.TILES, "reduce_rows", "count_tokens", "sequence_loss", "finish")}
    assert kernels <= {what for *_, what in timed}
    assert {("A", "dense", "ours forward"), ("C", "dense", "ours backward")} <= timed
    assert {("D", "rl-like, 64 tokens", x) for x in ("naive GSPO", "ours", "ours, budget 1e-3")} <= timed
    assert all(r["seconds"] > 0 for group in results.values() for r in group["results"] if "seconds" in r)


def child(path: Path, name: str, fault: str, end: str) -> list[str]:
    """Return a command that saves one measurement of a group, prints a line, then runs the code `end`."""
    group = {"measured": {"machine": {}, "commit": "0"}, "fault": fault, "results": [{"what": "first"}]}
    code = f"import json, os, time; file = json.load(open({str(path)!r})); file['results'][{name!r}] = {group!r}; "
    code += f"json.dump(file, open({str(path)!r}, 'w')); print('x: done after 1 s', flush=True); "
    code += f"os.write(1, b'a \\xff line\\n'); {end}"
    return [sys.executable, "-c", code]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Replace the processes of groups. Return the code with which each of them ends."""
    ends = {"A": "os.abort()", "D": "time.sleep(600)", "C": "pass"}

    def command_of(name: str, *_: Any) -> list[str]:
        fault = "" if ends[name] == "pass" else groups.UNFINISHED
        return child(tmp_path / "gpu.json", name, fault, ends[name])

    monkeypatch.setattr(command, "command_of", command_of)
    monkeypatch.setattr(command, "DEADLINE", 3.0)
    return ends


def test_crashed_and_killed_groups_keep_their_measurements(
    begun: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    assert run(monkeypatch, "A", "D", "C", "--output", str(path)) == 1
    printed = "x: done after 1 s\na \N{REPLACEMENT CHARACTER} line"
    faults = {"A": f"exit status -6: {printed}", "D": f"killed after 3 s: {printed}", "C": ""}
    assert {name: group["fault"] for name, group in results_in(path).items()} == faults
    assert all(group["results"] == [{"what": "first"}] for group in results_in(path).values())
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED: A, D" in lines[-1] and lines.count("  x: done after 1 s") == 3  # printed as they come
    begun |= dict.fromkeys("AD", "pass")
    assert run(monkeypatch, "A", "D", "--output", str(path)) == 0
    assert not any(group["fault"] for group in results_in(path).values())


def test_a_failed_measurement_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = [("broken", lambda: 1 / 0), ("next", lambda: [{"what": "next", "seconds": 1.0}])]
    monkeypatch.setitem(groups.GROUPS, "A", groups.Group("two", lambda setting: iter(measurements)))
    assert run(monkeypatch, "A", "--in-process", "--output", str(tmp_path / "gpu.json")) == 1
    group = results_in(tmp_path / "gpu.json")["A"]
    assert [r["what"] for r in group["results"]] == ["broken", "next"]
    assert "ZeroDivisionError" in group["fault"] and group["fault"] == group["results"][0]["fault"]


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_block_shapes_are_ranked_and_wrong_results_are_not(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "REFINED", 1)
    records = [r for _, measurement in tune.tune(times.TINY, kernel, 64) for r in measurement()]
    assert len(tune.ranked(records)) == len(records) == (5 if kernel in tune.TILES else 2)
    assert all(r["seconds"] > 0 and r["config"]["block_n"] for r in records)
    bench = tune.KernelBench(times.TINY, kernel, 64)
    bench.expected = bench.expected * 1.01
    (record,) = bench.measure(tune.shapes(CPU, kernel)[-1:])
    assert record["failure"].startswith("off by") and tune.ranked([record]) == []
