"""The printed reports of `gspo doctor`. Modules that import torch are imported inside the functions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table


def diagnose(interpret: bool, console: Console) -> tuple[str, bool, dict[str, Any]]:
    """Run `gspo doctor` and print its report. Return the verdict, whether it is good, and the details for JSON."""
    from . import doctor

    def print_line(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    with console.status("checking") as status:
        diagnosis = doctor.diagnose(interpret, status.update)
    print_line(", ".join(f"{name} {release}" for name, release in diagnosis.versions.items() if release))
    for device in diagnosis.devices:
        shapes = f", block shapes of {device.block_shapes}" if device.block_shapes else ""
        auto = f"backend='auto' takes {device.auto or 'nothing'}: {device.why}"
        print_line(f"{device.name}: {device.description}{shapes}; {auto}")
    for remark in diagnosis.remarks:
        print_line(remark)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption="Error divided by allowed error; above 1 is wrong.")
    for column in ("", "verdict", "log\nprobs", "loss", "d\nhidden", "d\nweight", "wrong\nclips"):
        table.add_column(column, no_wrap=True)
    for check in diagnosis.checks:
        numbers = [*(check.ratios or dict.fromkeys(range(4))).values(), check.wrong_decisions]
        table.add_row(check.place, check.verdict, *("-" if x is None else f"{x:.2g}" for x in numbers))
    console.print(table)
    for check in diagnosis.checks:
        if check.message:
            print_line(f"{check.place}: {check.message}")
    return diagnosis.verdict, not diagnosis.faults, asdict(diagnosis)


def compile_kernels(
    architectures: list[str] | None, shape: str | None, console: Console
) -> tuple[str, bool, dict[str, Any]]:
    """Compile every Triton kernel, of heads of the shape "H,V" if given, and print its resources.

    Return values: as `diagnose`.
    """
    try:
        from triton import knobs

        from ..backends.triton.tuning import ARCHITECTURES
        from .compile_gate import survey
    except Exception as error:  # a broken Triton may raise any exception
        return f"Nothing can be compiled: {type(error).__name__}: {error}", False, {"rows": []}
    if knobs.runtime.interpret:
        raise typer.BadParameter("TRITON_INTERPRET is set, so kernels are interpreted, not compiled: unset it")
    if unknown := sorted(set(architectures or ()) - set(ARCHITECTURES)):
        raise typer.BadParameter(
            f"{', '.join(map(repr, unknown))}: choose from {', '.join(ARCHITECTURES)}", param_hint="--architecture"
        )
    sizes_of_head = None if shape is None else _width_and_vocabulary(shape)
    with console.status("compiling") as status:
        rows = survey(
            architectures or ARCHITECTURES,
            lambda done, total: status.update(f"compiling: {done} of {total} kernels"),
            sizes_of_head,
        )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    columns = ("", "case", "blocks", "regis-\nters", "spilled\nbytes", "shared\nbytes", "blocks\nper SM")
    for column in (*columns, "2-byte\naccesses", "epi-\nlogue"):
        table.add_column(column, no_wrap=True)
    table.add_column("instructions")
    for row in rows:
        cells: tuple[Any, ...] = ("-",) * 7
        if row.report:
            report = row.report
            counts = ", ".join(f"{name} {count}" for name, count in report.instructions.items() if count)
            sizes = (report.registers, report.spilled_bytes, report.shared_bytes)
            epilogue = "-" if report.epilogue is None else report.epilogue
            cells = (*sizes, report.blocks_per_multiprocessor, report.narrow_accesses, epilogue, counts)
        table.add_row(f"{row.architecture} {row.kernel}", row.case, row.config, *map(str, cells))
    console.print(table)
    failed = [row for row in rows if row.faults]
    for row in failed:
        line = f"{row.architecture} {row.kernel}, {row.case}: {'; '.join(row.faults)}"
        console.print(line, markup=False, soft_wrap=True)
    verdict = (
        f"{len(failed)} of {len(rows)} kernels fail."
        if failed
        else f"Good: all {len(rows)} kernels compile. No matrix kernel spills registers or has 2-byte accesses."
    )
    details = [{**row._asdict(), "report": asdict(row.report) if row.report else None} for row in rows]
    return verdict, not failed, {"rows": details}


def _width_and_vocabulary(shape: str) -> tuple[int, int]:
    """Parse "H,V"."""
    try:
        width, vocab = (int(part) for part in shape.split(","))
    except ValueError:
        width = vocab = 0
    if not (1 <= width <= 2**16 and 2 <= vocab <= 2**22):
        raise typer.BadParameter(
            f"expected H,V such as 4096,151936, with H of 1 to 65,536 and V of 2 to 4,194,304, got {shape!r}",
            param_hint="--shape",
        )
    return width, vocab
