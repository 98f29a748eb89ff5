"""Check the compiled kernels: spills, matrix instructions, golden counts.

A process can either interpret or compile, so a second process compiles. To rewrite the golden counts, run this file as
a program, and read the difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

GOLDEN = Path(__file__).parent / "golden_kernels.json"
GATED = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
PRODUCTS = ("hidden_product", "weight_product")


def key(row: list[Any]) -> str:
    return " | ".join(row[:4])


def compiled(*arguments: str) -> list[list[Any]]:
    """Run the gate in a process that does not interpret kernels; return its rows."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "helpers.compile_gate", *arguments]
    run = subprocess.run(command, env=environment, cwd=GOLDEN.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def counts_of(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the reports by key, without those that differ from a case's kernel only by the shape of the head."""
    return {key(row): row[4] for row in rows if "," not in row[2]}


def assert_as_in_the_golden_file(rows: list[list[Any]]) -> None:
    """Assert that counts equal those taken with the same Triton."""
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] == triton.__version__:
        assert {k: v for k, v in counts_of(rows).items() if v != golden["kernels"].get(k)} == {}


def test_the_plain_kernels_of_sm_90_compile_as_in_the_golden_file() -> None:
    rows = compiled("sm_90", "--case", "bf16")
    assert {"forward_tile", "gradient_tile"} <= {row[1] for row in rows}
    assert_as_in_the_golden_file(rows)


@pytest.mark.slow
def test_all_kernels_of_every_architecture_compile_as_in_the_golden_file() -> None:
    rows = compiled(*GATED)
    assert counts_of(rows).keys() == json.loads(GOLDEN.read_text())["kernels"].keys()
    assert_as_in_the_golden_file(rows)


if __name__ == "__main__":
    reports = counts_of(compiled(*GATED))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(report)}" for name, report in reports.items())
    GOLDEN.write_text(f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{lines}\n }}\n}}\n')
