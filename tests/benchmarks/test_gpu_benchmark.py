"""A dry run of `python -m gspo_kernels.benchmarks gpu` without a GPU, and what it says of what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import LOG_PROB_RMS_ON_TENSOR_CORES, RELATIVE_RMS

from gspo_kernels.benchmarks.gpu import tune
from gspo_kernels.benchmarks.gpu.setting import tiny

ROOT = Path(__file__).parent.parent.parent
DRY_RUN = ("--times", "--tiny", "--device", "cpu")


def run(output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "gspo_kernels.benchmarks", "gpu", *arguments, "--output", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, json.loads(output.read_text()) if output.exists() else {}


@pytest.mark.slow
def test_a_dry_run_reports_everything(tmp_path: Path) -> None:
    done, report = run(tmp_path / "new" / "gpu.json", *DRY_RUN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert report["passed"] and report["seconds"] > 0 and report["machine"]["device"] == "cpu, interpreted"
    assert {"date", "commit", "versions", "asked", "tuning"} <= report.keys()
    timed = {r["what"] for t in report["times"] for r in t["results"]}
    assert {"copy", "vendor h W'", "ours forward", "ours backward", "full logits both", "kernel finish"} <= timed
    assert all(r["ms"] > 0 for t in report["times"] for r in t["results"])
    assert str(ROOT) not in json.dumps(report)  # nothing of this machine's folders is published
    assert "complete in" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_block_shapes_are_ranked(tmp_path: Path) -> None:
    done, report = run(tmp_path / "gpu.json", "--tune", "--tiny", "--device", "cpu", "--widths", "64")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert {r["kernel"] for r in report["tuning"]} == set(tune.KERNELS)
    for record in report["tuning"]:
        assert record["fault"] is None and record["ms"] > 0 and record["config"]["block_n"]


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_a_block_shape_with_wrong_results_is_a_fault(kernel: str) -> None:
    """The limits are those of the tests."""
    assert tune.LOG_PROB_RMS == LOG_PROB_RMS_ON_TENSOR_CORES
    assert tune.GRADIENT_RELATIVE_RMS == RELATIVE_RMS[torch.bfloat16]
    bench = tune._Bench(tiny(torch.device("cpu")), kernel, 64)
    config = tune.candidates(torch.device("cpu"))[-1]
    assert bench.measure([config])[0]["fault"] is None
    bench.expected = bench.expected * 1.01
    record = bench.measure([config])[0]
    assert record["fault"].startswith("off by") and record not in tune._ranked([record])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--times", "--only", "("), "expected a regular expression, got '('"),
        (("--times", "--device", "warp"), "got 'warp'"),
        (("--times", "--device", "xpu"), "got 'xpu'"),
        (("--times", "--device", "cuda"), f"python -m gspo_kernels.benchmarks gpu {' '.join(DRY_RUN)}"),
        ((*DRY_RUN, "--only", "no such model"), "no measurement's name matches 'no such model'"),
        ((), "give --times or --tune"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one case asks for a device that is not there")
def test_what_cannot_be_done_is_said_in_a_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done, report = run(tmp_path / "gpu.json", *arguments)
    assert done.returncode == 2 and not report
    assert said in done.stderr and "Traceback" not in done.stderr
