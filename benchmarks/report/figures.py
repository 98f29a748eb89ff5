"""Draw the figures of docs/benchmarks.md and README.md from the JSON files of results.

In docs/benchmarks.md, a candidate has the same colour and marker in every figure. Some candidates share a colour and
differ in the marker. The colours are greys and those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .tables import BUDGET, NAIVE, OURS, Results, by_name, shown

BLACK, DARK, GREY = "#000000", "#595959", "#999999"
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
LOOKS = {
    NAIVE: (BLACK, "o"), "naive GRPO": (DARK, "s"), "naive GSPO, compiled": (GREY, "o"),
    "TRL fused head": (ORANGE, "^"), "TRL cast_lm_head_to_fp32": (ORANGE, "v"),
    "Liger GRPO loss": (PURPLE, ">"), "Liger fused CE": (PURPLE, "<"),
    "cut-cross-entropy": (ORANGE, "p"), "cut-cross-entropy, no filter": (ORANGE, "8"),
    "verl torch head": (GREEN, "D"), "verl Triton head": (GREEN, "d"),
    "torch linear_cross_entropy": (SKY, "P"), OURS: (BLUE, "X"), BUDGET: (VERMILION, "*"),
    "fp16 logits": (VERMILION, "^"), "fp32 logits": (DARK, "h"), "old by bf16 logits, new by ours": (PURPLE, "s"),
}  # fmt: skip  # by family
STYLE: Any = {"font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left"}
STYLE |= {"legend.frameon": False, "grid.alpha": 0.25}


def panels(columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")  # inches
    axes = list(figure.subplots(1, columns, squeeze=False).flat)
    for panel in axes:
        panel.grid(lw=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path, legend: Axes | None = None, columns: int = 4) -> None:
    """Save a figure. If `legend` is a panel, add a legend of its lines below all panels, in `columns` columns."""
    if legend:
        figure.legend(*legend.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plain(name: str) -> str:
    return shown(name).replace("**", "")


def candidate_lines(axes: Axes, by_size: dict[int, list[Results]], key: str, unit: float) -> None:
    for name, (colour, marker) in LOOKS.items():
        values = {size: r.get(key) for size, records in by_size.items() for r in records if r["name"] == name}
        points = sorted((size, value / unit) for size, value in values.items() if value is not None)
        if points:
            width = 2.2 if name.startswith(OURS) else 1.1
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=5, lw=width, label=plain(name))


def log_axes(axes: Axes, sizes: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def draw_step(results: Results, path: Path) -> None:
    """Draw time and peak memory against tokens, for the first run's scenario and dtype. Name who ran out of memory."""
    first = results["time"]["runs"][0]["on"]
    runs = [r for r in results["time"]["runs"] if all(r["on"][key] == first[key] for key in ("scenario", "dtype"))]
    timed = {run["on"]["tokens"]: run["candidates"] for run in runs}
    memory = timed | {point["tokens"]: point["candidates"] for point in results["memory"]["points"]}
    figure, (left, right) = panels(2)
    candidate_lines(left, timed, "seconds", 1)
    candidate_lines(right, memory, "peak_bytes", 2**30)
    for axes, sizes in ((left, timed), (right, memory)):
        log_axes(axes, sorted(sizes), "tokens in the batch")
    where = f"V = {first['head']['vocab']:,}, {first['scenario']}, {first['dtype']}, {first['device']}"
    left.set(title=f"loss and gradients, seconds ({where})")
    right.set(title="peak memory, GiB")
    for size, records in sorted(memory.items()):
        if failed := [r["name"] for r in records if "does_not_fit" in r]:
            text = f"out of memory at {size:,} tokens:\n{', '.join(failed)}"
            right.annotate(text, (0.03, 0.97), xycoords="axes fraction", va="top", fontsize=8)
    save(figure, path, left)


def draw_fidelity(results: Results, path: Path) -> None:
    """Draw wrong clip decisions against length, a panel per set of tokens. All that use bf16 logits share a line."""
    figure, axes = panels(len(results["sets"]))
    for panel, (kind, study) in zip(axes, results["sets"].items(), strict=True):
        records = by_name(study["implementations"])
        size = records[NAIVE]["log-ratio"]["std"]
        rounded = [name for name, r in records.items() if abs(r["log-ratio"]["std"] / size - 1) < 0.02]
        for name, record in records.items():
            if name not in rounded or name == NAIVE:
                colour, marker = LOOKS[name]
                label = f"bf16 logits ({', '.join(n.split()[0] for n in rounded)})" if name == NAIVE else plain(name)
                shares = [100 * x if x else math.nan for x in record["wrong"]]
                panel.plot(study["lengths"], shares, color=colour, marker=marker, ms=4, label=label)
                low, high = ([100 * x for x in ends] for ends in zip(*record["95 %"], strict=True))
                panel.fill_between(study["lengths"], low, high, color=colour, alpha=0.15, lw=0)
        log_axes(panel, study["lengths"][::2], "tokens per sequence")
        panel.yaxis.set_major_locator(LogLocator())
        panel.set_ylim(1e-4, 100)
        panel.set(title=f"wrong clip decisions, % ({kind} policy, {study['vocab']:,} ids)")
    save(figure, path, axes[0], columns=3)


def draw_readme(results: Results, path: Path) -> None:
    """Draw the README's figure: wrong clip decisions against length, with a label at each line."""
    figure, (axes,) = panels(1)
    study = results["sets"]["synthetic"]
    records, lengths = by_name(study["implementations"]), study["lengths"]
    most = 100 * max(x for name in (OURS, "fp32 logits") for x in records[name]["wrong"])
    ours = f"gspo_kernels: at most {most:.3f}%,\nwithout storing the logits"
    full = "full fp32 logits: equally exact, but they\nneed tokens x vocabulary memory"
    for name, colour, width, style, place, text in (
        (NAIVE, VERMILION, 2, "-", (100, 41), "bf16 logits: the default of TRL, verl and Liger"),
        ("fp16 logits", ORANGE, 2, "-", (140, 12.5), "fp16 logits"),
        (OURS, BLUE, 3, "-", (1500, 31), ours),
        ("fp32 logits", BLACK, 1.5, "--", (1500, 24.5), full),
    ):
        shares = [100 * x for x in records[name]["wrong"]]
        axes.plot(lengths, shares, color=colour, lw=width, ls=style, clip_on=False)
        axes.annotate(text, place, color=colour, fontsize=10, weight="bold" if name == OURS else "normal")
    axes.annotate("", (11_500, 0.4), (11_500, 24), arrowprops={"arrowstyle": "->", "color": DARK})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"tokens per answer (synthetic policy, bf16 weights, vocabulary of {study['vocab']:,})")
    axes.set(ylabel="clip decisions that differ\nfrom float64 (%)", ylim=(0, 45))
    axes.set_title("Rounding logits to bf16 flips clip decisions", fontsize=13, weight="bold")
    save(figure, path)


def draw_budgets(results: Results, path: Path) -> None:
    """Draw reward, entropy and passes against updates: the mean over the seeds, and a band from lowest to highest."""
    titles = {"reward": "reward", "entropy": "entropy, nats per token", "passes": "matrix passes per update"}
    figure, axes = panels(len(titles))
    updates = results["settings"]["steps"] * results["settings"]["updates_per_rollout"]
    looks = ((BLUE, "-"), (VERMILION, "-"), (GREEN, "-"), (BLACK, ":"))
    for (arm, runs), (colour, style) in zip(results["runs"].items(), looks, strict=True):
        for panel, (key, title) in zip(axes, titles.items(), strict=True):
            points = list(zip(*(run[key] for run in runs), strict=True))
            x = [updates * (at + 0.5) / len(points) for at in range(len(points))]
            panel.plot(x, [sum(p) / len(p) for p in points], color=colour, ls=style, lw=1.5, label=arm)
            panel.fill_between(x, [min(p) for p in points], [max(p) for p in points], color=colour, alpha=0.1, lw=0)
            panel.set(title=f"{title} ({len(runs)} seeds)", xlabel="optimizer updates", ylim=(0, None))
    save(figure, path, axes[0])


DRAW = {"step": draw_step, "fidelity": draw_fidelity, "budgets": draw_budgets}  # by suite
