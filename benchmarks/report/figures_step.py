"""The figures of `step`, `vocab` and `trainer`, from their JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .looks import LOOKS, panels, save

SHADES = {"body forward": "#BBBBBB", "body backward": "#888888", "optimizer": "#DDDDDD", "loss": LOOKS["ours"][0]}
Records = list[dict[str, Any]]


def draw_step(results: dict[str, Any], path: Path) -> None:
    """Time and peak memory against tokens; a cross above where memory ran out."""
    figure, (left, right) = panels(1, 2, (10, 4.2))
    first = results["time"]["runs"][0]["on"]
    alike = ("scenario", "dtype")
    runs = [run for run in results["time"]["runs"] if all(run["on"][key] == first[key] for key in alike)]
    timed = {run["on"]["tokens"]: run["candidates"] for run in runs}
    _lines(left, timed, lambda r: r.get("seconds"))
    memory = timed | {run["tokens"]: run["candidates"] for run in results["memory"]["points"]}
    _lines(right, memory, lambda r: r.get("peak_bytes", 0) / 2**30 or None)
    left.set_ylabel("loss and gradients, seconds")
    right.set_ylabel("peak memory beyond inputs, GiB")
    for axes in (left, right):
        _logarithmic(axes, "tokens of the batch")
    _crosses(right, memory)  # not sizes of the axis
    _title(figure, first)
    _save(figure, left, path)


def draw_vocab(results: dict[str, Any], path: Path) -> None:
    """Time over naive GSPO's, and peak memory, against the vocabulary."""
    figure, (left, right) = panels(1, 2, (10, 4.2))
    by_vocab = {run["on"]["head"]["vocab"]: run["candidates"] for run in results["runs"]}
    _lines(left, by_vocab, lambda r: r["over_naive"]["ratio"] if "over_naive" in r else None)
    _lines(right, by_vocab, lambda r: r.get("peak_bytes", 0) / 2**20 or None)
    left.axhline(1, color="black", lw=0.8, ls=":")
    left.set_ylabel("time over naive GSPO's")
    right.set_ylabel("peak memory beyond inputs, MiB")
    for axes in (left, right):
        _logarithmic(axes, "entries of the vocabulary")
    _title(figure, results["runs"][0]["on"], vocab=False)
    _save(figure, left, path)


def draw_trainer(results: dict[str, Any], path: Path) -> None:
    """A bar per candidate: where the seconds of an optimizer step go."""
    steps = [record for record in results["steps"] if "seconds" in record]
    figure, (axes,) = panels(1, 1, (8, 0.5 * len(steps) + 1.6))
    for at, record in enumerate(reversed(steps)):
        start = 0.0
        for part, shade in SHADES.items():
            seconds = record["parts"][part]["seconds"]
            axes.barh(at, seconds, left=start, color=shade, label=part if at == 0 else None)
            start += seconds
        axes.text(start, at, f"  loss {record['loss share']:.0%}", va="center", fontsize=8)
    axes.set_yticks(range(len(steps)), [record["name"] for record in reversed(steps)])
    axes.set_xlim(0, 1.15 * max(record["seconds"] for record in steps))
    axes.set_xlabel(f"seconds of one optimizer step, {results['model']}, {results['tokens']:,} tokens")
    axes.grid(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def _lines(axes: Axes, by_size: dict[int, Records], value: Callable[[dict[str, Any]], float | None]) -> None:
    for name, (colour, marker) in LOOKS.items():
        values = {size: value(r) for size, records in by_size.items() for r in records if r["name"] == name}
        points = sorted((size, y) for size, y in values.items() if y is not None)
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker=marker, ms=5, lw=2.2 if name.startswith("ours") else 1.1, label=name)


def _crosses(axes: Axes, by_size: dict[int, Records]) -> None:
    """Who ran out of memory: beside each other above the scale, for nobody knows how high."""
    above = axes.get_xaxis_transform()  # sizes across, shares of the panel up
    for size, records in sorted(by_size.items()):
        names = [r["name"] for r in records if "does_not_fit" in r]
        for at, name in enumerate(names):
            look = {"color": LOOKS[name][0], "marker": "x", "ms": 7, "mew": 2, "lw": 0, "clip_on": False}
            axes.plot([size * 0.88 ** (len(names) - 1 - at)], [1.04], transform=above, **look)
        if names:
            place = (size * 0.88 ** len(names), 1.04)
            axes.annotate("out of memory:", place, xycoords=above, fontsize=8, ha="right", va="center")


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


def _thousands() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def _numbers(values: Any) -> Iterable[float]:
    return [float(x) for x in values]


def _title(figure: Figure, on: dict[str, Any], vocab: bool = True) -> None:
    sizes = f"H = {on['head']['width']}" + (f", V = {on['head']['vocab']:,}" if vocab else f", {on['tokens']} tokens")
    figure.suptitle(f"{on['scenario']}, {sizes}, {on['dtype']}, {on['device']}", fontsize=10)


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)
