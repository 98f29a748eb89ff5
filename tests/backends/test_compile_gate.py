"""The kernels that are interpreted are the kernels that are compiled, and what the compilers make of them.

Interpretation and compilation exclude each other in one process, so everything is compiled in another. Run this file
as a program to write the golden counts anew, and read the difference.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton import launch, tuning
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.tools import compile_cases as cases
from gspo_kernels.tools import compile_gate

GOLDEN = Path(__file__).parent / "golden_kernels.json"
GATED = ("sm_80", "sm_90", "sm_100", "gfx942")
KERNELS = {
    "forward_tile",
    "reduce_rows",
    "gradient_tile",
    "hidden_product",
    "weight_product",
    "count_tokens",
    "sequence_loss",
    "finish",
}
PRODUCTS = ("hidden_product", "weight_product")
SURVEY = """
import json, sys
from gspo_kernels.tools.compile_gate import survey
rows = survey(sys.argv[1:])
print(json.dumps([[*row[:4], row.report and row.report.__dict__, row.faults] for row in rows]))
"""


def key(row: list[Any]) -> str:
    return " | ".join(row[:4])


def compiled() -> list[list[Any]]:
    """Every kernel and configuration on every gated architecture, compiled by a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SURVEY, *GATED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def rows() -> list[list[Any]]:
    return compiled()


@pytest.mark.slow
def test_nothing_spills_and_every_matrix_kernel_uses_the_matrix_unit(rows: list[list[Any]]) -> None:
    assert {key(row): row[5] for row in rows if row[5]} == {}


@pytest.mark.slow
def test_the_counts_are_the_golden_ones(rows: list[list[Any]]) -> None:
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] != triton.__version__:
        pytest.skip(f"counts were taken with Triton {golden['triton']}")
    found = {key(row): row[4] for row in rows}
    assert set(found) == set(golden["kernels"])
    assert {k: v for k, v in found.items() if v != golden["kernels"][k]} == {}


def test_the_golden_file_is_of_these_kernels_and_has_no_fault() -> None:
    golden = json.loads(GOLDEN.read_text())["kernels"]
    assert {k.split(" | ")[1] for k in golden} == KERNELS
    assert {k.split(" | ")[0] for k in golden} == set(GATED)
    unit = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
    for name, report in golden.items():
        architecture, kernel, case, _ = name.split(" | ")
        assert report["spilled_bytes"] <= (0 if kernel in compile_gate.MATRIX_KERNELS else compile_gate.ONE_REGISTER)
        if kernel in compile_gate.MATRIX_KERNELS and case[:4] in ("bf16", "fp16"):
            assert report["instructions"][unit[architecture]] > 0


def wanted(architecture: str) -> set[tuple[str, Any]]:
    """(kernel, configuration) of all that the gate compiles for an architecture."""
    with tuning.assume(architecture), launches() as seen:
        for _name, _dtype, run in cases.runs():
            run()
    return listed(seen)


def listed(seen: list[Launch]) -> set[tuple[str, Any]]:
    return {(x.kernel.__name__, x.config) for x in seen}


def table(architecture: str) -> set[tuple[str, Any]]:
    """(kernel, configuration) of the whole tuning table."""
    found: set[tuple[str, Any]] = {("reduce_rows", tuning.REDUCE_ROWS)}
    found |= {(name, tuning.SEQUENCE) for name in ("count_tokens", "sequence_loss", "finish")}
    found |= {(name, config) for name in PRODUCTS for config in tuning._PRODUCT.values()}
    for blocks in (tuning._HALF[architecture], tuning._SINGLE, tuning._DOUBLE):
        found |= {("forward_tile", blocks.forward), ("forward_tile", blocks.heavy_forward)}
        found |= {("gradient_tile", blocks.gradient), ("gradient_tile", blocks.heavy_gradient)}
    return found


@pytest.mark.parametrize("architecture", tuning.ARCHITECTURES)
def test_the_gate_compiles_the_whole_table_and_nothing_else(architecture: str) -> None:
    assert wanted(architecture) == table(architecture)


def small(head: HeadRows) -> HeadRows:
    """The same head on the CPU with numbers in it: 40 rows, 601 columns, a hidden dimension with the same remainder."""
    n, v, width = 40, 601, 64 + head.hidden.shape[1] % 64

    def like(x: torch.Tensor | None, *shape: int) -> torch.Tensor | None:
        return None if x is None else torch.randn(shape, dtype=torch.float64).to(x.dtype)

    rank = 0 if head.adapter_weight is None else head.adapter_weight.shape[1]
    return head._replace(
        hidden=like(head.hidden, n, width),
        weight=like(head.weight, v, width),
        bias=like(head.bias, v),
        adapter_hidden=like(head.adapter_hidden, n, rank),
        adapter_weight=like(head.adapter_weight, v, rank),
        target_ids=torch.randint(0, v, (n,)),
        mask=torch.rand(n) > 0.3,
        vocab_size=v,
        temperature=None if head.temperature is None else torch.rand(n, dtype=head.temperature.dtype) + 0.5,
    )


@pytest.mark.slow
def test_what_an_h200_would_run_is_what_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's host calls, on real numbers under the interpreter: the same kernels, the same block shapes."""
    both_passes, loss, live_cells = cases.both_passes, cases.loss, cases.live_cells
    per_row = torch.empty

    def on_cpu(*shape: Any, **options: Any) -> torch.Tensor:
        return per_row(*shape, **{**options, "device": "cpu"}).zero_()

    monkeypatch.setattr(cases, "both_passes", lambda head: both_passes(small(head)))
    monkeypatch.setattr(cases, "live_cells", lambda head: live_cells(small(head)))
    monkeypatch.setattr(cases, "loss", lambda objective, dtype: loss(objective, dtype, 8, 2))
    on_meta = wanted("sm_90")
    with launches() as seen:  # on a CPU the table's row is Hopper's
        for name, _dtype, run in list(cases.runs()):
            if name not in cases.CASES | cases.CELL_CASES:
                monkeypatch.setattr(torch, "empty", on_cpu)
            run()
            monkeypatch.setattr(torch, "empty", per_row)
    assert listed(seen) == on_meta == table("sm_90")
    assert {name for name, _ in on_meta} == KERNELS
    for launched in seen:
        assert all(not x.is_meta for x in launched.arguments.values() if isinstance(x, torch.Tensor))


def test_interpretation_changes_the_dtype_of_operands_and_nothing_else() -> None:
    """INTERPRETED and UPCAST stand where an operand's dtype is chosen, and nowhere else."""
    places = []
    for path in sorted(Path(launch.__file__).parent.glob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.If | ast.IfExp | ast.BoolOp) and any(
                isinstance(x, ast.Name) and x.id in ("INTERPRETED", "UPCAST")
                for x in ast.walk(node.test if isinstance(node, ast.If | ast.IfExp) else node)
            ):
                body = node.body if isinstance(node, ast.If) else node
                places.append((path.stem, ast.unparse(body) if not isinstance(body, list) else ast.unparse(body[0])))
    assert sorted(places) == [
        ("elementary", "a, b = (a.to(ACC), b.to(ACC))"),  # operands of every product
        ("gradient_rows", "INTERPRETED and head.hidden.dtype == torch.bfloat16"),  # where torch rounds d_logits
    ]


if __name__ == "__main__":
    reports = {key(row): row[4] for row in compiled()}
    GOLDEN.write_text(json.dumps({"triton": triton.__version__, "kernels": reports}, indent=1) + "\n")
