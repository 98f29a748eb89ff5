"""Print what `gspo bench` and the suites measure: a progress bar, then a table and its conditions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Record = dict[str, Any]
SPREAD, WIDE = "p20 - p80", 110  # columns that need a wide terminal
COLUMNS = ("", "time\nms", SPREAD, "over\nnaive", SPREAD, "peak\nMiB", "passes", "error", "over\nnaive's")
REASONS = {
    "absent": "not measured, ",
    "does_not_fit": "",
    "failed": "failed, ",
    "wrong": "wrong gradients, not timed: ",
}
BUSY = 0.5  # processes per core
BUSY_MACHINE = (
    "These cores were in use in the minute before. Other processes slow many small products (fused heads) more than "
    "few large ones (full logits), in all rounds alike. Measure on free cores, or with OMP_NUM_THREADS=1."
)
EXPLAINED = (
    "time: loss and both gradients, median of interleaved runs. over naive: median of the ratios to naive GSPO in the "
    "same round. peak: memory beyond the inputs, in a process of its own. passes: matrix products over 2 N H V; ours "
    "skips blocks of 128 rows without a gradient, and a part of a block costs as much as the block. error: of the "
    "worse gradient against float64, norm over norm; then over that of naive PyTorch. naive GRPO is another loss."
)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a bar; yield a function to call with what is measured next. Without a terminal it prints a line instead."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    seen: set[str] = set()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=steps)

        def tick(what: str) -> None:
            if not console.is_terminal and what not in seen:
                print(what, file=sys.stderr, flush=True)
            bar.update(task, description=what, advance=int(bool(seen)))
            seen.add(what)

        yield tick


def show(results: Record, scenario: str, console: Console) -> None:
    """Print the table with a description of the scenario, and below it why a candidate was not timed."""
    on, records = results["on"], results["candidates"]
    head = on["head"]
    softcap = f", logits capped at {head['softcap']:g}" if head["softcap"] else ""
    quantiles = ", ".join(f"{float(at):.0%} {value:.2g}" for at, value in on["entropy"]["quantiles"].items())
    lines = [
        f"{on['tokens']} tokens in {on['sequences']} sequences ({on['zero']} with advantage 0, {on['clipped']} clipped"
        f"), H = {head['width']}, V = {head['vocab']}{softcap}, {on['dtype']}, {on['device']}; {on['scenario']}: "
        f"{scenario}",
        f"synthetic policy, quantiles of its entropy in nats: {quantiles}",
    ]
    console.print(*lines, sep="\n", markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    shown = [at for at, column in enumerate(COLUMNS) if console.width >= WIDE or column != SPREAD]
    for at in shown:
        table.add_column(COLUMNS[at], justify="right" if at else "left", no_wrap=at > 0)
    for record in records:
        if "seconds" in record:
            cells = _cells(record)
            table.add_row(*(cells[at] for at in shown))
    console.print(table)
    lines = [f"{r['name']}: {said}{r[kind]}" for r in records for kind, said in REASONS.items() if kind in r]
    busy = on["device"] == "cpu" and (results.get("load per core before") or 0) > BUSY
    console.print(*lines, EXPLAINED, *([BUSY_MACHINE] if busy else []), sep="\n", markup=False, soft_wrap=True)


def _cells(record: Record) -> tuple[str, ...]:
    times = (_short(record["seconds"] * 1e3), " - ".join(_short(record[p] * 1e3) for p in ("p20", "p80")))
    over = record.get("over_naive")
    ratios = (f"{over['ratio']:.2f}", f"{over['p20']:.2f} - {over['p80']:.2f}") if over else ("-", "-")
    peak = _short(record["peak_bytes"] / 2**20) if "peak_bytes" in record else "-"
    passes, relative = (f"{record[x]:.2f}" if x in record else "-" for x in ("passes", "error_over_naive"))
    return (record["name"], *times, *ratios, peak, passes, f"{record['error']['worst']:.1e}", relative)


def _short(x: float) -> str:
    """Format with at least two digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"
