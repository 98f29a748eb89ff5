"""Output of `gspo bench` and the suites: a progress bar, then a table with its conditions and a legend."""

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
SPREAD = "p20 - p80"  # title of columns that are shown only in a wide terminal
WIDE = 110  # columns of a wide terminal
COLUMNS = ("", "time\nms", SPREAD, "time /\nnaive's", SPREAD, "peak\nMiB", "passes", "error", "error /\nnaive's")
REASONS = {
    "absent": "not measured, ",
    "does_not_fit": "",
    "failed": "failed, ",
    "wrong": "wrong gradients, not timed: ",
}
BUSY = 0.5  # processes per core
BUSY_MACHINE = (
    "Other processes used these cores in the minute before the measurement. They slow candidates with many small "
    "matrix products (fused heads) more than candidates with few large products (full logits), in every round. "
    "Measure on free cores, or with OMP_NUM_THREADS=1."
)
EXPLAINED = (
    "time: loss and both gradients, median of interleaved runs. "
    "time / naive's: time divided by naive GSPO's in the same round; median. "
    "p20 - p80: 20th and 80th percentile of the column to the left. "
    "peak: memory beyond the inputs, measured in a separate process. "
    "passes: operations of matrix products, divided by 2 N H V. 'ours' skips rows without a gradient, but "
    "computes blocks of 128 rows: a partly filled block costs as much as a full one. "
    "error: relative error (norms) of the less accurate gradient against float64. "
    "error / naive's: error divided by plain PyTorch's error."
)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar. Yield a function that takes the description of the next measurement and advances the bar.

    Without a terminal, each description is printed once, as a line on stderr.
    """
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


def show(results: Record, console: Console, scenario: str) -> None:
    """Print a description of the batch, the table, the reasons for candidates that were not timed, and a legend."""
    on = results["on"]
    records = results["candidates"]
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
    lines = [f"{r['name']}: {label}{r[kind]}" for r in records for kind, label in REASONS.items() if kind in r]
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
    """Format with about two significant digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"
