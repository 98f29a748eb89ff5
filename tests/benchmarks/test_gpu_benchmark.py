"""`python -m gspo_kernels.benchmarks gpu` makes a dry run with interpreted kernels, and refuses bad options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import LOG_PROB_RMS_ON_TENSOR_CORES, RELATIVE_RMS

from gspo_kernels.benchmarks.gpu import command, times, tune
from gspo_kernels.benchmarks.gpu.times import tiny

CPU = torch.device("cpu")


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu", *options, "--tiny", "--device", "cpu", "--output", str(output)])
    assert command.main() == 0
    return json.loads(output.read_text())


def test_a_dry_run_times_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(times, "SECONDS", 0.0)
    file = run(monkeypatch, tmp_path / "new" / "gpu.json", "--times")
    assert file["suite"] == "gpu" and file["results"]["gpu"] == {"name": "cpu, interpreted"}
    timed = [r for t in file["results"]["times"] for r in t["results"]]
    names = {"copy", "vendor h W'", "ours forward", "ours backward", "full logits both", "kernel finish"}
    assert names <= {r["what"] for r in timed} and all(r["ms"] > 0 for r in timed)
    assert "complete" in capsys.readouterr().out.splitlines()[-1]


def test_a_failed_measurement_is_recorded_and_sets_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = [("broken", lambda: 1 / 0), ("copy", lambda: [times.copy_bandwidth(tiny(CPU))])]
    monkeypatch.setattr(command, "times", lambda *_: iter(measurements))
    monkeypatch.setattr(sys, "argv", ["gpu", "--times", "--device", "cpu", "--output", str(tmp_path / "gpu.json")])
    assert command.main() == 1
    broken, copied = json.loads((tmp_path / "gpu.json").read_text())["results"]["times"]
    assert "ZeroDivisionError" in broken["fault"] and copied["results"] and not copied["fault"]


def test_block_shapes_are_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "REFINED", 1)
    tuning = run(monkeypatch, tmp_path / "gpu.json", "--tune", "--widths", "64")["results"]["tuning"]
    assert {r["kernel"] for r in tuning} == set(tune.KERNELS)
    assert all(r["fault"] is None and r["ms"] > 0 and r["config"]["block_n"] for r in tuning)


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_a_block_shape_with_wrong_results_is_not_ranked(kernel: str) -> None:
    assert tune.LOG_PROB_RMS == LOG_PROB_RMS_ON_TENSOR_CORES
    assert tune.GRADIENT_RELATIVE_RMS == RELATIVE_RMS[torch.bfloat16]
    bench, config = tune.KernelBench(tiny(CPU), kernel, 64), tune.shapes(CPU)[-1]
    assert bench.measure([config])[0]["fault"] is None
    bench.expected = bench.expected * 1.01
    record = bench.measure([config])[0]
    assert record["fault"].startswith("off by") and record not in tune.ranked([record])


@pytest.mark.skipif(torch.cuda.is_available(), reason="one case needs a machine without a GPU")
def test_bad_options_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in {
        "--times --device warp": "--device: expected a device that torch has here",
        "--times --device xpu": "got 'xpu'",
        "--times": "got 'cuda'",
        "--device cpu": "give --times or --tune",
    }.items():
        monkeypatch.setattr(sys, "argv", ["gpu", *options.split()])
        with pytest.raises(SystemExit):
            command.main()
        assert message in capsys.readouterr().err
