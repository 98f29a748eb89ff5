"""What `gspo bench` prints: a progress bar, then a table and what it was measured on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .measure import Record
from .workloads import SCENARIOS

SPREAD, WIDE = "p20 - p80", 110  # columns that only a wide terminal has room for
COLUMNS = ("", "time\nms", "p20 - p80", "over\nnaive", "p20 - p80", "peak\nMiB", "passes", "error", "over\nnaive's")


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar that is told what comes next; without a terminal a line on stderr for whatever comes first."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    seen: set[str] = set()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=steps)

        def tick(what: str) -> None:
            if not console.is_terminal and what not in seen:  # a log has no bar
                print(what, file=sys.stderr, flush=True)
            bar.update(task, description=what, advance=int(bool(seen)))
            seen.add(what)

        yield tick


def show(results: Record, console: Console) -> None:
    """The table; whoever was not timed stands below it with the reason."""
    on, records = results["on"], results["candidates"]
    head = on["head"]
    cap = f", logits capped at {head['softcap']:g}" if head["softcap"] else ""
    quantiles = ", ".join(f"{float(at):.0%} {value:.2g}" for at, value in on["entropy"]["quantiles"].items())
    console.print(
        f"{on['tokens']} tokens in {on['sequences']} sequences ({on['zero']} of zero advantage, {on['clipped']} "
        f"clipped), H = {head['width']}, V = {head['vocab']}{cap}, {on['dtype']}, {on['device']}; {on['scenario']}: "
        f"{SCENARIOS[on['scenario']].what}",
        f"synthetic policy, quantiles of its entropy in nats: {quantiles}",
        sep="\n",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    shown = [at for at, column in enumerate(COLUMNS) if console.width >= WIDE or column != SPREAD]
    for at in shown:
        table.add_column(COLUMNS[at], justify="right" if at else "left", no_wrap=at > 0)
    for record in records:
        if "seconds" in record:
            cells = (_short(record["seconds"] * 1e3), " - ".join(_short(record[p] * 1e3) for p in ("p20", "p80")))
            over = record.get("over_naive")
            cells += (f"{over['ratio']:.2f}", f"{over['p20']:.2f} - {over['p80']:.2f}") if over else ("-", "-")
            cells += (_mib(record), _number(record, "passes"), f"{record['error']['worst']:.1e}")
            cells = (record["name"], *cells, _number(record, "error_over_naive"))
            table.add_row(*(cells[at] for at in shown))
    console.print(table)
    for record in records:
        for kind, said in NOT_TIMED.items():
            if kind in record:
                console.print(f"{record['name']}: {said}{record[kind]}", markup=False, soft_wrap=True)
    console.print(EXPLAINED, markup=False, soft_wrap=True)
    if on["device"] == "cpu" and (results.get("load per core before") or 0) > BUSY:
        console.print(BUSY_MACHINE, markup=False, soft_wrap=True)


NOT_TIMED = {
    "absent": "not measured, ",
    "does_not_fit": "",
    "failed": "failed, ",
    "wrong": "wrong gradients, not timed: ",
}
BUSY = 0.5  # processes per core
BUSY_MACHINE = (
    "These cores were in use in the minute before, by others or by an earlier run of this: others slow many small "
    "products (fused heads) more than few large ones (full logits), in all rounds alike. Measure on cores of its own, "
    "or with OMP_NUM_THREADS=1."
)
EXPLAINED = (
    "time: loss and both gradients, median of runs in turns; over naive: of the ratios round by round. peak: beyond "
    "the inputs, in a process of its own. passes: matrix products over 2 N H V; ours works in blocks of 128 rows: it "
    "leaves out whole ones without a gradient, and fewer tokens cost as much as 128. error: of the worse gradient, "
    "norm over norm, against float64. naive GRPO is another loss, against its own float64."
)


def _number(record: Record, name: str) -> str:
    return f"{record[name]:.2f}" if name in record else "-"


def _mib(record: Record) -> str:
    return _short(record["peak_bytes"] / 2**20) if "peak_bytes" in record else "-"


def _short(x: float) -> str:
    """Two digits at least."""
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"
