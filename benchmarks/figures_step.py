"""The figures of `step`, `vocab` and `trainer`, from their JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Okabe and Ito's colours; the same candidate looks the same in every figure.
LOOKS = {
    "naive GSPO": ("#000000", "o"),
    "naive GRPO": ("#7F7F7F", "o"),
    "naive GSPO, compiled": ("#999999", "s"),
    "TRL fused head": ("#E69F00", "^"),
    "Liger GRPO loss": ("#CC79A7", "v"),
    "Liger fused CE": ("#B07AA1", "<"),
    "cut-cross-entropy": ("#8C6D1F", "p"),
    "verl torch head": ("#009E73", "D"),
    "verl Triton head": ("#006B4E", "d"),
    "torch linear_cross_entropy": ("#56B4E9", "P"),
    "ours": ("#0072B2", "X"),
    "ours, budget 1e-3": ("#D55E00", "*"),
}
PARTS = {"body forward": "#BBBBBB", "body backward": "#888888", "optimizer": "#DDDDDD", "loss": "#0072B2"}
Records = list[dict[str, Any]]


def draw_step(results: dict[str, Any], path: Path) -> None:
    """Time over naive GSPO's, and peak memory, against tokens; a cross where memory ran out."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = [run for run in results["runs"] if run["on"]["scenario"] == "rl-like"]
    timed = {run["on"]["tokens"]: run["candidates"] for run in runs}
    _lines(left, timed, "seconds", 1.0)
    memory = timed | {run["tokens"]: run["candidates"] for run in results["memory"]}
    _lines(right, memory, "peak_bytes", 2.0**-30)
    _crosses(right, memory)
    left.set_ylabel("loss and gradients, seconds")
    right.set_ylabel("peak memory beyond inputs, GiB")
    for axes in (left, right):
        _logarithmic(axes, "tokens of the batch")
    _title(figure, runs[0]["on"])
    _save(figure, left, path)


def draw_vocab(results: dict[str, Any], path: Path) -> None:
    """Time over naive GSPO's, and peak memory, against the vocabulary."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_vocab = {run["on"]["head"]["vocab"]: run["candidates"] for run in results["runs"]}
    _lines(left, by_vocab, "over_naive", 1.0)
    _lines(right, by_vocab, "peak_bytes", 2.0**-20)
    left.axhline(1, color="black", lw=0.8, ls=":")
    left.set_ylabel("time over naive GSPO's")
    right.set_ylabel("peak memory beyond inputs, MiB")
    for axes in (left, right):
        _logarithmic(axes, "entries of the vocabulary")
    _title(figure, results["runs"][0]["on"], vocab=False)
    _save(figure, left, path)


def draw_trainer(results: dict[str, Any], path: Path) -> None:
    """A bar per candidate: where the seconds of an optimizer step go."""
    figure = Figure(figsize=(8, 0.5 * len(results["steps"]) + 1.6), layout="constrained")
    axes = figure.subplots()
    for at, record in enumerate(reversed(results["steps"])):
        start = 0.0
        for part, colour in PARTS.items():
            seconds = record["parts"][part]["seconds"]
            axes.barh(at, seconds, left=start, color=colour, label=part if at == 0 else None)
            start += seconds
        axes.text(start, at, f"  loss {record['loss share']:.0%}", va="center", fontsize=8)
    axes.set_yticks(range(len(results["steps"])), [record["name"] for record in reversed(results["steps"])])
    axes.set_xlim(0, 1.15 * max(record["seconds"] for record in results["steps"]))
    axes.set_xlabel(f"seconds of one optimizer step, {results['model']}, {results['tokens']:,} tokens")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _lines(axes: Axes, by_size: dict[int, Records], key: str, unit: float) -> None:
    for name, (colour, marker) in LOOKS.items():
        points = [(size, r[key] * unit) for size, records in by_size.items() for r in records if _has(r, name, key)]
        if points:
            x, y = zip(*sorted(points), strict=True)
            ours = name.startswith("ours")
            axes.plot(x, y, color=colour, marker=marker, ms=5, lw=2.2 if ours else 1.1, label=name)


def _has(record: dict[str, Any], name: str, key: str) -> bool:
    return record["name"] == name and key in record


def _crosses(axes: Axes, by_size: dict[int, Records]) -> None:
    """Out of memory: at the top, where it would have been."""
    top = axes.get_ylim()[1]
    for size, records in sorted(by_size.items()):
        names = [r["name"] for r in records if "does_not_fit" in r]
        for at, name in enumerate(names):
            axes.plot([size], [top * 0.8**at], color=LOOKS[name][0], marker="x", ms=8, mew=2, lw=0)
        if names:
            axes.annotate(
                "out of\nmemory", (size, top * 0.8 ** (len(names) // 2)), xytext=(-8, 0), textcoords="offset points",
                fontsize=8, ha="right", va="center",
            )  # fmt: skip


def _logarithmic(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(_thousands())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    sizes = sorted({float(x) for line in axes.lines for x in _numbers(line.get_xdata()) if x > 1})
    axes.set_xticks(sizes)
    axes.set_xlabel(label)
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _thousands() -> Callable[[float, int], str]:
    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def _numbers(values: Any) -> Iterable[float]:
    return [float(x) for x in values]


def _title(figure: Figure, on: dict[str, Any], vocab: bool = True) -> None:
    sizes = f"H = {on['head']['width']}" + (f", V = {on['head']['vocab']:,}" if vocab else f", {on['tokens']} tokens")
    figure.suptitle(f"{on['scenario']}, {sizes}, {on['dtype']}, {on['device']}", fontsize=10)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
