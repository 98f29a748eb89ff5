"""`python -m gspo_kernels.benchmarks gpu` runs to its end as on a GPU: torch.cuda is patched, the driver is a stub."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from stub.driver import COMPILER, environment

from gspo_kernels.benchmarks.gpu.groups import GROUPS

CHOSEN = [name for name in GROUPS if name not in ("checks", "profile")]  # these two start other programs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason="needs a C compiler, as Triton does")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("benchmark") / "gpu.json"
    command = [sys.executable, "-m", "stub.benchmark", *CHOSEN, "--tiny", "--minutes", "0.001", "--output", str(path)]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert path.exists(), run.stderr[-2000:]
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize("group", CHOSEN)
def test_every_measurement_is_made(results: dict[str, Any], group: str) -> None:
    assert results[group]["fault"] == ""
    assert results[group]["results"]
    conditions = results[group]["measured"]["conditions"]
    assert (conditions["device"], conditions["kind of kernels"]) == ("NVIDIA H200", "compiled")
    for record in results[group]["results"]:
        assert "failed" not in record and "absent" not in record
        assert not record.get("failure", "").removeprefix("off by nan, allowed 0.004")  # the results are wrong
