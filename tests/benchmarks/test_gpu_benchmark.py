"""`python -m gspo_kernels.benchmarks gpu` makes a dry run with interpreted kernels, resumes, and survives crashes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import costs

from gspo_kernels.benchmarks import measure
from gspo_kernels.benchmarks.gpu import command, groups, times, tune

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *options, "--device", "cpu"])
    return command.main()


def results_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["results"]


def test_a_dry_run_measures_every_group_and_a_second_run_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(groups.shutil, "which", lambda name: None)
    for library in ("OMP", "OPENBLAS"):  # the shapes are so small that more threads are slower
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")
    path, chosen = tmp_path / "new" / "gpu.json", [*groups.DEFAULT, "checks"]
    assert run(monkeypatch, *chosen, "--tiny", "--output", str(path)) == 0
    results, printed = results_in(path), capfd.readouterr().out
    assert list(results) == [name for name in chosen if name != "profile"]
    assert set(chosen) == {name for name in groups.GROUPS if not name.startswith("tune-")}
    assert "profile: skipped, because ncu is not installed" in printed and printed.endswith("no faults\n")
    assert f"torch {torch.__version__}" in printed.splitlines()[0]
    assert ("not installed, so not measured: verl" in printed) == (measure.version("verl") is None)
    assert path.with_suffix(".log").read_text().count(": done after ") == printed.count(": done after ") > len(chosen)
    timed = {(r.get("shape"), r.get("batch"), r["what"]) for group in results.values() for r in group["results"]}
    kernels = {f"kernel {name}" for name in (*tune.KERNELS, "reduce_rows", "count_tokens", "sequence_loss", "finish")}
    assert kernels <= {what for *_, what in timed}
    assert {("A", "dense", "ours both"), ("B", "rl-like", "ours backward"), ("A", "cells 1", "ours backward")} <= timed
    assert {("A", "rl-like, 128 tokens", x) for x in ("naive GSPO", "ours", "ours, budget 1e-3")} <= timed
    assert all(r["seconds"] > 0 for group in results.values() for r in group["results"] if "seconds" in r)
    before = path.read_text()
    assert run(monkeypatch, *chosen, "--tiny", "--output", str(path)) == 0
    assert capfd.readouterr().out.count(": kept, measured at commit ") == len(results) and path.read_text() == before


def child(path: Path, name: str, fault: str, end: str) -> list[str]:
    """Return a command that saves one measurement of a group, prints a line, then runs the code `end`."""
    group = {"measured": {"machine": {}, "commit": "0"}, "fault": fault, "results": [{"what": "first"}]}
    code = f"import json, os, time; file = json.load(open({str(path)!r})); file['results'][{name!r}] = {group!r}; "
    code += f"json.dump(file, open({str(path)!r}, 'w')); print('[gw0] FAILED a test\\na line', flush=True); {end}"
    return [sys.executable, "-c", code]


def test_crashed_and_killed_groups_keep_their_measurements_and_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, begun = tmp_path / "gpu.json", []
    ends = {"A": "os.abort()", "B": "time.sleep(600)", "C": "pass"}

    def command_of(name: str, *_: Any) -> list[str]:
        begun.append(name)
        return child(path, name, "" if ends[name] == "pass" else groups.UNFINISHED, ends[name])

    monkeypatch.setattr(command, "command_of", command_of)
    monkeypatch.setattr(groups.Group, "deadline", 3.0)
    assert run(monkeypatch, "A", "B", "C", "--output", str(path)) == 1
    printed = "[gw0] FAILED a test\na line"
    faults = {"A": f"exit status -6: {printed}", "B": f"killed after 3 s: {printed}", "C": ""}
    assert {name: group["fault"] for name, group in results_in(path).items()} == faults
    assert all(group["results"] == [{"what": "first"}] for group in results_in(path).values())
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED: A, B" in lines[-1] and lines.count("  [gw0] FAILED a test") == 3  # printed as they come
    ends |= {"A": "pass", "B": "pass"}
    assert run(monkeypatch, "A", "B", "C", "--output", str(path)) == 0
    assert run(monkeypatch, "A", "--again", "--output", str(path)) == 0
    assert begun == ["A", "B", "C", "A", "B", "A"]
    assert run(monkeypatch, "B", "--again", "--minutes", "0.1", "--output", str(path)) == 0
    assert "B: not started, because 6 s are left" in capsys.readouterr().out


def test_a_failed_measurement_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = [("broken", lambda: 1 / 0), ("next", lambda: [{"what": "next", "seconds": 1.0}])]
    monkeypatch.setitem(groups.GROUPS, "A", groups.Group("two", lambda setting: iter(measurements), 0.0))
    assert run(monkeypatch, "A", "--in-process", "--output", str(tmp_path / "gpu.json")) == 1
    group = results_in(tmp_path / "gpu.json")["A"]
    assert [r["what"] for r in group["results"]] == ["broken", "next"]
    assert "ZeroDivisionError" in group["fault"] and group["fault"] == group["results"][0]["fault"]


def test_the_profilers_counters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
    row = '"0","forward_tile","Memory Workload Analysis","L2 Hit Rate","%","81.5"'
    (tmp_path / "ncu").write_text(f"#!/bin/sh\necho '==PROF== 1'\necho '{header}'\necho '{row}'\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ((_, counters),) = times.profile(times.TINY)
    assert counters()[1:] == [{"what": "Memory Workload Analysis, L2 Hit Rate, 81.5, %"}]


def test_results_are_printed_beside_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    (known,) = (r for r in predictions() if (r["shape"], r["batch"], r["what"]) == ("A", "dense", "ours both"))
    record = {"shape": "A", "batch": "dense", "what": "ours both", "seconds": 2e-3 * known["H200"]}
    group = {"measured": {"machine": {"gpu": "NVIDIA H200"}}, "fault": "", "results": [record]}
    command.print_results({"A": group})
    assert f"predicted {known['H200']:.3f} ms, measured 2.00 of it" in capsys.readouterr().out


def predictions() -> list[dict[str, Any]]:
    return results_in(command.PREDICTION)["milliseconds"]


def test_the_committed_predictions_follow_from_the_code() -> None:
    """After a change: `PYTHONPATH=tests python -m helpers.predictions`, and read the difference."""
    now = measure.jsonable(costs.in_new_process("collect", "predictions"), digits=6)
    assert now == results_in(command.PREDICTION)


def test_the_plan_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--plan"])
    assert command.main() == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == groups.DEFAULT
    assert int(total.split()[0]) < 570 and "not measured" in total


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="one case needs a machine without a GPU")
def test_bad_options_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in {
        "": "--device: PyTorch sees no GPU",
        "--device warp": "argument --device: invalid choice: 'warp'",
        "--device cpu rows": "groups: expected names such as ceilings, A,",
    }.items():
        monkeypatch.setattr(sys, "argv", ["gpu", *options.split()])
        with pytest.raises(SystemExit):
            command.main()
        assert message in capsys.readouterr().err
