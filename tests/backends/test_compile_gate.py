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
import torch
import triton
from helpers import compile_cases as cases
from helpers.marks import slow

from gspo_kernels.backends.triton import tuning
from gspo_kernels.backends.triton.launch import launches

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


def gated(architecture: str) -> set[tuple[str, Any]]:
    """Return (kernel, configuration) of all kernels that the gate compiles for an architecture."""
    with tuning.assume(architecture), launches() as seen:
        for _name, _dtype, run in cases.runs():
            run()
    return {(x.kernel.__name__, x.config) for x in seen}


def table(architecture: str) -> set[tuple[str, Any]]:
    """Return (kernel, configuration) of all entries of the tuning table for an architecture."""
    entries: set[tuple[str, Any]] = {("reduce_rows", tuning.REDUCE_ROWS)}
    entries.add(("list_cells", tuning.LIST))
    sequences = (tuning.sequence_config(dtype) for dtype in (torch.float32, torch.float64))
    entries |= {(name, config) for config in sequences for name in ("count_tokens", "sequence_loss", "finish")}
    for dtype in (torch.float32, torch.float64):
        entries |= {("multiply_pairs", tuning.pair_config("products", dtype))}
        entries |= {("sum_pairs", tuning.pair_config("sums", dtype))}
    with tuning.assume(architecture):
        cpu = torch.device("cpu")
        products = [tuning.product_config(dtype, cpu) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    entries |= {(name, config) for name in PRODUCTS for config in products}
    for dtype_table in (tuning._HALF, tuning._SINGLE, tuning._DOUBLE):
        blocks = dtype_table[architecture]
        entries |= {("forward_tile", blocks.forward), ("forward_tile", blocks.heavy_forward)}
        for kernel in ("gradient_tile", "cached_tile"):
            entries |= {(kernel, blocks.gradient), (kernel, blocks.heavy_gradient)}
    return entries


@pytest.mark.parametrize("architecture", [x if x == "sm_90" else slow(x) for x in tuning.ARCHITECTURES])
def test_the_gate_compiles_exactly_the_tuning_table(architecture: str) -> None:
    assert gated(architecture) == table(architecture)


if __name__ == "__main__":
    reports = counts_of(compiled(*GATED))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(report)}" for name, report in reports.items())
    GOLDEN.write_text(f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{lines}\n }}\n}}\n')
