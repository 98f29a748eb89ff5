"""Check the compiled kernels: spills, matrix instructions, golden counts. Check that tests interpret the same kernels.

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

from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton import launch, tuning
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.tools.doctor import compile_cases as cases
from gspo_kernels.tools.doctor import compile_gate

GOLDEN = Path(__file__).parent / "golden_kernels.json"
GATED = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
KERNELS = {
    "forward_tile",
    "reduce_rows",
    "gradient_tile",
    "kept_tile",
    "hidden_product",
    "weight_product",
    "list_cells",
    "count_tokens",
    "sequence_loss",
    "finish",
}
PRODUCTS = ("hidden_product", "weight_product")
# Binds the launches of a step, and some with wrong arguments. Prints the errors.
BIND = """
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.backends.triton.tuning import assume
from gspo_kernels.tools.doctor.binding import assume_driver, bind
from gspo_kernels.tools.doctor.compile_cases import forward_and_backward, meta_head
for architecture in ("sm_90", "gfx942"):
    with assume(architecture), assume_driver(architecture), launches() as recorded:
        forward_and_backward(meta_head())
        assert len({id(bind(launch)) for launch in recorded}) == (3 if architecture == "sm_90" else 6)
        tile = recorded[0]
        missing = {name: x for name, x in tile.arguments.items() if name != "n_rows"}
        for arguments in (missing, tile.arguments | {"rows": 8}, tile.arguments | {"n_rows": 8.0},
                          tile.arguments | {"tile_top": "text"}):
            try:
                print("bound", bind(tile._replace(arguments=arguments)))
            except TypeError as error:
                print(error)
"""
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


@pytest.fixture(scope="module")
def rows() -> list[list[Any]]:
    return compiled()


def test_the_plain_kernels_of_sm_90_compile_as_in_the_golden_file() -> None:
    rows = json.loads(output_of(PLAIN + SURVEY, "sm_90"))
    assert {"forward_tile", "gradient_tile"} <= {row[1] for row in rows}
    assert {key(row): row[5] for row in rows if row[5]} == {}
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] == triton.__version__:
        assert {k: v for k, v in counts_of(rows).items() if v != golden["kernels"][k]} == {}


@pytest.mark.slow
def test_no_kernel_spills_and_matrix_kernels_use_matrix_instructions(rows: list[list[Any]]) -> None:
    assert {key(row): row[5] for row in rows if row[5]} == {}


@pytest.mark.slow
def test_counts_equal_the_golden_file(rows: list[list[Any]]) -> None:
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] != triton.__version__:
        pytest.skip(f"counts were taken with Triton {golden['triton']}")
    counts = counts_of(rows)
    assert set(counts) == set(golden["kernels"])
    assert {k: v for k, v in counts.items() if v != golden["kernels"][k]} == {}


def test_the_golden_file_covers_all_kernels_without_spills() -> None:
    golden = json.loads(GOLDEN.read_text())["kernels"]
    assert {k.split(" | ")[1] for k in golden} == KERNELS
    assert {k.split(" | ")[0] for k in golden} == set(GATED)
    for name, report in golden.items():
        _, kernel, case, _ = name.split(" | ")
        assert report["spilled_bytes"] <= (0 if kernel in compile_gate.MATRIX_KERNELS else compile_gate.ONE_REGISTER)
        if kernel in compile_gate.MATRIX_KERNELS and case[:4] in ("bf16", "fp16"):
            assert report["matrix_instructions"] > 0


@pytest.mark.slow
def test_triton_binds_the_launches_and_refuses_wrong_arguments() -> None:
    errors = output_of(BIND).splitlines()
    assert errors[4:] == errors[:4], errors
    for error, words in zip(errors, ("n_rows", "rows", "n_rows is i64, received float", "str"), strict=False):
        assert error.startswith("forward_tile: ") and words in error


def gated(architecture: str) -> set[tuple[str, Any]]:
    """Return (kernel, configuration) of all kernels that the gate compiles for an architecture."""
    with tuning.assume(architecture), launches() as seen:
        for _name, _dtype, run in cases.runs():
            run()
    return listed(seen)


def listed(seen: list[Launch]) -> set[tuple[str, Any]]:
    return {(x.kernel.__name__, x.config) for x in seen}


def table(architecture: str) -> set[tuple[str, Any]]:
    """Return (kernel, configuration) of all entries of the tuning table for an architecture."""
    entries: set[tuple[str, Any]] = {("reduce_rows", tuning.REDUCE_ROWS)}
    entries |= {(name, tuning.LIST) for name in ("list_cells",)}
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


def small(head: HeadRows) -> HeadRows:
    """Return a small random head on the CPU with the same options: 40 rows, 601 columns, H with the same remainder."""
    n = 40
    v = 601
    width = 64 + head.hidden.shape[1] % 64

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
def test_the_interpreted_kernels_are_those_compiled_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret the gate's calls with real numbers. They must launch the same kernels with the same block shapes."""
    both, loss, live_cells = cases.forward_and_backward, cases.loss, cases.live_cells
    per_row = torch.empty

    def on_cpu(*shape: Any, **options: Any) -> torch.Tensor:
        return per_row(*shape, **{**options, "device": "cpu"}).zero_()

    monkeypatch.setattr(cases, "forward_and_backward", lambda head, **options: both(small(head), **options))
    monkeypatch.setattr(cases, "live_cells", lambda head, **options: live_cells(small(head), **options))
    monkeypatch.setattr(cases, "loss", lambda objective, dtype: loss(objective, dtype, 8, 2))
    on_meta = gated("sm_90")
    heads = cases.CASES | cases.CELL_CASES | cases.CACHE_CASES
    with launches() as seen:  # on a CPU the block shapes are Hopper's
        for name, _dtype, run in list(cases.runs()):
            if not {name, name.removesuffix(" added"), name.removesuffix(" cache")} & heads.keys():
                monkeypatch.setattr(torch, "empty", on_cpu)
            run()
            monkeypatch.setattr(torch, "empty", per_row)
    assert listed(seen) == on_meta == table("sm_90")
    assert {name for name, _ in on_meta} == KERNELS
    for launched in seen:
        assert all(not x.is_meta for x in launched.arguments.values() if isinstance(x, torch.Tensor))


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
