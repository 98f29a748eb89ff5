"""Check the compiled kernels: spills, matrix instructions, golden counts. Check that the interpreter changes little.

A process can either interpret or compile, so a second process compiles. To rewrite the golden counts, run this file as
a program, and read the difference.
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
from helpers.marks import slow

from gspo_kernels.backends.triton import launch, tuning
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.tools.doctor import compile_cases as cases
from gspo_kernels.tools.doctor.machine_code import count_amd, narrow_accesses

GOLDEN = Path(__file__).parent / "golden_kernels.json"
GATED = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
PRODUCTS = ("hidden_product", "weight_product")
SURVEY = """
import json, sys
from gspo_kernels.tools.doctor.compile_gate import survey
rows = survey(sys.argv[1:])
print(json.dumps([[*row[:4], row.report and row.report.__dict__, row.faults] for row in rows]))
"""
# Only the kernels of a plain head in bf16.
PLAIN = """
from gspo_kernels.tools.doctor import compile_gate
runs = compile_gate.runs
compile_gate.SHAPES = ()
compile_gate.runs = lambda *shape: [run for run in runs(*shape) if run[0] == "bf16"]
"""


def key(row: list[Any]) -> str:
    return " | ".join(row[:4])


def output_of(program: str, *arguments: str) -> str:
    """Run a program in a process that does not interpret kernels; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def compiled() -> list[list[Any]]:
    """Compile every kernel and configuration for every gated architecture."""
    return json.loads(output_of(SURVEY, *GATED))


def counts_of(rows: list[list[Any]]) -> dict[str, Any]:
    """Return the reports by key, without those that differ from a case's kernel only by the shape of the head."""
    return {key(row): row[4] for row in rows if "," not in row[2]}


def assert_as_in_the_golden_file(rows: list[list[Any]]) -> None:
    """Assert that no kernel has a fault, such as a spill, and that counts equal those taken with the same Triton."""
    assert {key(row): row[5] for row in rows if row[5]} == {}
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] == triton.__version__:
        assert {k: v for k, v in counts_of(rows).items() if v != golden["kernels"].get(k)} == {}


def test_the_plain_kernels_of_sm_90_compile_as_in_the_golden_file() -> None:
    rows = json.loads(output_of(PLAIN + SURVEY, "sm_90"))
    assert {"forward_tile", "gradient_tile"} <= {row[1] for row in rows}
    assert_as_in_the_golden_file(rows)


@pytest.mark.slow
def test_all_kernels_of_every_architecture_compile_as_in_the_golden_file() -> None:
    rows = compiled()
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
    with tuning.assume(architecture):
        cpu = torch.device("cpu")
        products = [tuning.product_config(dtype, cpu) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    entries |= {(name, config) for name in PRODUCTS for config in products}
    for dtype_table in (tuning._HALF, tuning._SINGLE, tuning._DOUBLE):
        blocks = dtype_table[architecture]
        entries |= {("forward_tile", blocks.forward), ("forward_tile", blocks.heavy_forward)}
        for kernel in ("gradient_tile", "kept_tile"):
            entries |= {(kernel, blocks.gradient), (kernel, blocks.heavy_gradient)}
    return entries


@pytest.mark.parametrize("architecture", [x if x == "sm_90" else slow(x) for x in tuning.ARCHITECTURES])
def test_the_gate_compiles_exactly_the_tuning_table(architecture: str) -> None:
    assert gated(architecture) == table(architecture)


AMD = """
\t.globl\tforward_tile
forward_tile:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_nop 0
\tglobal_load_ushort v1, v0, s[2:3]
\tglobal_load_dwordx4 v[4:7], v0, s[2:3]
\tbuffer_store_byte v1, v0, s[8:11], 0 offen
\ts_endpgm
    .private_segment_fixed_size: 4
    .vgpr_count:     96
"""


def test_resources_and_instructions_of_amds_assembly_are_counted() -> None:
    assert count_amd(AMD) == (96, 4, 2, 5)


@pytest.mark.parametrize(
    ("ptx", "expected"),
    [
        ("@%p1 ld.global.L1::evict_last.b16 { %rs1 }, [ %rd1 + 0 ];", 1),
        ("ld.global.b16 %rs1, [%rd1]; st.global.u8 [%rd2], %rs1;", 2),
        ("st.global.v4.b32 [ %rd1 ], { %r1, %r2, %r3, %r4 }; ld.global.v4.b16 %rs1, [%rd1];", 0),
        ("ld.shared.b16 %rs1, [%r1]; st.global.b32 [%rd2], %r1;", 0),
    ],
)
def test_accesses_of_at_most_two_bytes_are_counted(ptx: str, expected: int) -> None:
    assert narrow_accesses(ptx) == expected


def test_interpretation_only_changes_dtype_of_operands_and_rounding_to_bf16() -> None:
    """INTERPRETED and UPCAST, which are true under the interpreter, may only decide these two things."""
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
        ("elementary", "UPCAST and DTYPE == tl.bfloat16"),  # the interpreter truncates kept exponentials
        ("elementary", "a, b = (a.to(ACC), b.to(ACC))"),  # operands of every product
        ("elementary", "bits = x.to(tl.int32, bitcast=True)"),  # the first line under that condition
        ("gradient_rows", "INTERPRETED and head.hidden.dtype == torch.bfloat16"),  # torch rounds d_logits to bf16
    ]


if __name__ == "__main__":
    reports = counts_of(compiled())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(report)}" for name, report in reports.items())
    GOLDEN.write_text(f'{{\n "triton": "{triton.__version__}",\n "kernels": {{\n{lines}\n }}\n}}\n')
