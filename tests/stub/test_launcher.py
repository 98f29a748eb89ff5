"""Triton's JIT, launcher and TMA encoder accept every launch of forward and backward, on a stub of the CUDA driver.

The stub (`cu.c`) checks shared memory, grids, blocks and TMA descriptors, and refuses to load a kernel during a
capture. `driver.py` compares what it receives with the arguments of the launch. No kernel is run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stub.cases import CAPTURED, CASES, Report
from stub.driver import COMPILER, environment

TESTS = Path(__file__).parent.parent
FEW = [
    "kept sets",
    "bf16 budget and cache",
    "bf16 extras",
    "bf16 adapter",
    "fp16",
    "fp32 budget and cache",
    "fp64 extras",
]
RUNS = {"sm_90": [], "sm_80": FEW, "sm_100": FEW}  # architectures and their cases; [] are all
pytestmark = pytest.mark.skipif(not COMPILER, reason="needs a C compiler, as Triton does")


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """Run the cases for every architecture, each in its own process, which compiles instead of interpreting."""
    pipes: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    started = {
        name: subprocess.Popen([sys.executable, "-m", "stub.cases", name, *cases], **pipes)
        for name, cases in RUNS.items()
    }
    ended = {name: (*process.communicate(), process.returncode) for name, process in started.items()}
    errors = [error[-2000:] for _, error, status in ended.values() if status]
    assert not errors, "\n".join(errors)
    return {name: Report(**json.loads(output)) for name, (output, *_) in ended.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "case"), [(name, case) for name in RUNS for case in RUNS[name] or CASES])
def test_every_launch_is_legal(reports: dict[str, Report], architecture: str, case: str) -> None:
    report = reports[architecture]
    assert report.faults[case] == ""
    assert report.counts[case]["launches"] > 0
    has_descriptors = architecture != "sm_80" and not case.startswith(("fp32", "fp64", "no rows", "kept sets"))
    assert (report.counts[case]["descriptors"] > 0) == has_descriptors


@pytest.mark.slow
@pytest.mark.parametrize("architecture", RUNS)
def test_every_kernel_is_launched(reports: dict[str, Report], architecture: str) -> None:
    compiled = json.loads((TESTS / "backends" / "golden_kernels.json").read_text())["kernels"]
    assert set(reports[architecture].kernels) == {name.split(" | ")[1] for name in compiled}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_loads_no_kernel(reports: dict[str, Report], name: str) -> None:
    """With a gradient budget, the step before computes selected cells, and the captured one computes all."""
    assert reports["sm_90"].captured[name] == ""
