"""Draw the figures of docs/benchmarks.md and README.md from the JSON files of results.

In docs/benchmarks.md, a candidate has the same color and marker in every figure. Some candidates share a color and
differ in the marker. The colors are greys and Okabe and Ito's palette for color-blind readers.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ..studies.compare_report import draw
from .summary import HALF, LENGTH, wrong_in_models
from .tables import BUDGET, CACHED, NAIVE, OURS, Results, by_name, drift, shown

CAST = "TRL cast_lm_head_to_fp32"
BLACK, DARK, GREY = "#000000", "#595959", "#999999"
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
LOOKS = {
    NAIVE: (BLACK, "o"), "naive GRPO": (DARK, "s"), "naive GSPO, compiled": (GREY, "o"),
    "TRL fused head": (ORANGE, "^"), CAST: (ORANGE, "v"),
    "Liger GRPO loss": (PURPLE, ">"), "Liger fused CE": (PURPLE, "<"),
    "cut-cross-entropy": (ORANGE, "p"), "cut-cross-entropy, no filter": (ORANGE, "8"),
    "verl torch head": (GREEN, "D"), "verl Triton head": (GREEN, "d"),
    "torch linear_cross_entropy": (SKY, "P"), OURS: (BLUE, "X"), BUDGET: (VERMILION, "*"),
}  # fmt: skip  # by family
TRAINERS = {
    NAIVE: "TRL's trainer\nwith full logits", "TRL fused head": "TRL 1.16", OURS: "TRL 1.16\nwith gspo_kernels",
    CACHED: "TRL 1.16\nwith gspo_kernels\nand a cache of {gib:.1f} GiB",
}  # fmt: skip  # the bars of `draw_trainer`
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


def candidate_lines(axes: Axes, by_size: dict[int, list[Results]], key: str, unit: float) -> None:
    for name, (color, marker) in LOOKS.items():
        values = {size: r.get(key) for size, records in by_size.items() for r in records if r["name"] == name}
        points = sorted((size, value / unit) for size, value in values.items() if value is not None)
        if points:
            width = 2.2 if name.startswith(OURS) else 1.1
            label = shown(name).replace("**", "")
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, ms=5, lw=width, label=label)


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
    most = max(memory)
    peaks = {r["name"]: r["peak_bytes"] for r in memory[most] if "peak_bytes" in r}
    other = min((name for name in peaks if not name.startswith(OURS)), key=peaks.__getitem__)
    share = peaks[OURS] / peaks[other]
    finding = f"With {most:,} tokens, gspo_kernels takes {share:.0%} of the memory of\n{other}, the best of the others"
    figure.suptitle(finding, fontsize=11, weight="bold")
    save(figure, path, left)


def draw_fidelity(results: Results, path: Path) -> None:
    """Draw wrong clip decisions against length, with a label at each line."""
    figure, (axes,) = panels(1)
    study = results["sets"]["synthetic"]
    records = by_name(study["implementations"])
    lengths = study["lengths"]
    most = 100 * max(x for name in (OURS, "fp32 logits") for x in records[name]["wrong"])
    ours = f"gspo_kernels: at most {most:.3f}%,\nwithout storing the logits"
    full = "full fp32 logits: equally exact, but they\nneed tokens x vocabulary memory"
    for name, color, width, style, place, text in (
        (NAIVE, VERMILION, 2, "-", (100, 41), "bf16 logits: the default of TRL, verl and Liger"),
        ("fp16 logits", ORANGE, 2, "-", (140, 12.5), "fp16 logits"),
        (OURS, BLUE, 3, "-", (1500, 31), ours),
        ("fp32 logits", BLACK, 1.5, "--", (1500, 24.5), full),
    ):
        shares = [100 * x for x in records[name]["wrong"]]
        axes.plot(lengths, shares, color=color, lw=width, ls=style, clip_on=False)
        axes.annotate(text, place, color=color, fontsize=10, weight="bold" if name == OURS else "normal")
    axes.annotate("", (11_500, 0.4), (11_500, 24), arrowprops={"arrowstyle": "->", "color": DARK})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"tokens per answer (synthetic policy, bf16 weights, vocabulary of {study['vocab']:,})")
    axes.set(ylabel="clip decisions that differ\nfrom float64 (%)", ylim=(0, 45))
    at = lengths.index(LENGTH)
    naive, exact = (100 * records[name]["wrong"][at] for name in (NAIVE, OURS))
    finding = f"The head alone, answers of {LENGTH:,} tokens:\nbf16 logits get {naive:.0f}% of the clip decisions wrong"
    axes.set_title(f"{finding}, gspo_kernels {exact:.1g}%", fontsize=11, weight="bold")
    save(figure, path)


def draw_bars(panel: Axes, names: list[str], values: list[float], colors: list[str], form: str) -> None:
    """Draw one horizontal bar per name, top to bottom, labeled with its value in the format `form`."""
    bars = panel.barh(names, values, color=colors, height=0.62)
    panel.bar_label(bars, [form.format(value) for value in values], padding=4, fontsize=10, weight="bold")
    panel.set(xlim=(0, 1.28 * max(values)), ylim=(len(values) - 0.5, -0.5), xticks=[])
    panel.grid(False)
    panel.spines["bottom"].set_visible(False)
    panel.tick_params(axis="y", length=0, labelsize=10)


def draw_trainer(results: Results, path: Path) -> None:
    """Draw peak memory and time of a step of TRL's trainer: a bar per implementation, with its number at the end."""
    results = next(iter(results.values()))
    records = [r for r in results["steps"] if r["name"] in TRAINERS]
    figure, axes = panels(2)
    names = [TRAINERS[r["name"]].format(gib=r["cache_mib"] / 1024) for r in records]
    colors = [BLUE if r["name"].startswith(OURS) else ORANGE for r in records]
    shown_in = (("peak_bytes", 2**30, "{:.2f} GiB"), ("seconds", 1, "{:.1f} s"))
    for panel, (key, unit, form) in zip(axes, shown_in, strict=True):
        draw_bars(panel, names, [r[key] / unit for r in records], colors, form)
        panel.set_title("peak memory beyond the model" if panel is axes[0] else "time of the fastest step", fontsize=11)
    hatched: Any = dict(color="white", alpha=0.45, hatch="///", edgecolor=DARK, height=0.62, lw=0)
    axes[0].barh(names, [r["gradient_bytes"] / 2**30 for r in records], **hatched)
    axes[0].annotate("hatched: gradients of the model, which every step needs", (0, -0.05), xycoords="axes fraction")
    axes[-1].set_yticks([])
    batch = f"{results['sequences']} answers of {results['tokens'] // results['sequences']} tokens"
    vocab = f"vocabulary of {results['model']['vocab_size']:,}, {results['dtype']}, CPU"
    steps = by_name(records)
    other = "TRL fused head" if "TRL fused head" in steps else NAIVE  # a trial measures only naive GSPO and ours
    memory, time = (steps[OURS][key] / steps[other][key] for key in ("peak_bytes", "seconds"))
    finding = f"In TRL's trainer, gspo_kernels takes {memory:.0%} of the memory of {other}, and {time:.0%} of the time"
    figure.suptitle(f"{finding}\n({batch}, {vocab})", fontsize=11, weight="bold")
    save(figure, path)


def draw_readme(trainer: Results, precision: Results, path: Path) -> None:
    """Draw the README's figure: wrong clip decisions and peak memory in bfloat16, a bar per implementation."""
    names = {
        NAIVE: "full logits\n(TRL before 1.15)",
        "TRL fused head": "TRL 1.16",
        CAST: "TRL 1.16,\nfp32 head",
        OURS: "gspo_kernels",
    }
    part = trainer["bfloat16"]
    steps = by_name(part["steps"])
    wrong = wrong_in_models(precision)
    peaks = {name: steps[name]["peak_bytes"] / 2**20 for name in names}
    figure, axes = panels(2)
    colors = [BLUE if name == OURS else ORANGE for name in names]
    shown_in = (
        (
            wrong,
            "{:.2g}%",
            f"clip decisions that differ from float64\n(whole model, {HALF}, {LENGTH:,} tokens)",
        ),
        (
            peaks,
            "{:,.0f} MiB",
            f"peak memory of a training step in TRL on a CPU\n({part['tokens']:,} tokens, beyond the model, no cache)",
        ),
    )
    for panel, (values, form, title) in zip(axes, shown_in, strict=True):
        draw_bars(panel, list(names.values()), [values[name] for name in names], colors, form)
        panel.set_title(title, fontsize=10)
    axes[-1].set_yticks([])
    share = peaks[OURS] / peaks["TRL fused head"]
    full, ours = wrong[NAIVE], wrong[OURS]
    figure.suptitle(
        f"In bf16, full logits get {full:.2g}% of GSPO's clip decisions wrong, gspo_kernels {ours:.2g}%\n"
        f"(mostly from the model's body), with {share:.0%} of TRL 1.16's memory (CPU, no cache).",
        fontsize=13,
        weight="bold",
    )
    save(figure, path)


def draw_step_on_a_gpu(results: Results, path: Path) -> None:
    """Draw time and memory of TRL's step by the share of answers with advantage 0, for a width of 390 pixels."""
    shares = results["shares"]
    peaks = {name: [r[f"{name} peak_bytes"] / 2**30 for r in shares] for name in ("TRL", "GSPOTrainer")}
    times = {"TRL": [1.0] * len(shares), "GSPOTrainer": [r["update"] for r in shares]}
    figure = Figure(figsize=(3.9, 5.2), layout="constrained")  # inches
    panels = figure.subplots(2)
    titles = ("time of the updates on an H200, TRL = 1", "peak memory, GiB")
    for panel, values, title, form in zip(panels, (times, peaks), titles, ("{:.2f}", "{:.1f}"), strict=True):
        for side, (name, color, label) in enumerate(
            (("TRL", ORANGE, "TRL 1.16"), ("GSPOTrainer", BLUE, "GSPOTrainer"))
        ):
            at = [i + 0.42 * (side - 0.5) for i in range(len(shares))]
            bars = panel.bar(at, values[name], width=0.4, color=color, label=label)
            panel.bar_label(bars, [form.format(value) for value in values[name]], padding=2, fontsize=10)
        panel.set_xticks(range(len(shares)), [f"{1 - r['rows_run']:.0%}" for r in shares], fontsize=11)
        panel.set(yticks=[], ylim=(0, 1.15 * max(values["TRL"] + values["GSPOTrainer"])))
        panel.set_title(title, fontsize=12, weight="bold")
        panel.tick_params(length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("answers with advantage 0", fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def draw_budgets(results: Results, path: Path) -> None:
    """Draw reward and entropy over training: a line per budget, the mean over the seeds."""
    figure, axes = panels(2)
    first = next(iter(results["runs"].values()))
    count = len(first[0]["over training"]["reward"])
    middles = [(i + 0.5) * results["settings"]["steps"] / count for i in range(count)]
    names = {"reward": "reward of sampled answers", "entropy": "entropy, nats"}
    for panel, (key, text) in zip(axes, names.items(), strict=True):
        for (arm, records), color in zip(results["runs"].items(), (BLACK, BLUE, VERMILION), strict=True):
            mean = [fmean(values) for values in zip(*(x["over training"][key] for x in records), strict=True)]
            panel.plot(middles, mean, color=color, lw=1.8, label=arm)
        panel.set(title=text, xlabel="rollouts")
    passes = [f"{fmean(x['mean']['passes'] for x in records):.2f}" for records in results["runs"].values()]
    finding = f"With budgets of 1e-3 and 1e-2, a step takes {passes[1]} and {passes[2]} passes instead of {passes[0]}."
    figure.suptitle(f"{finding}\n{drift(results)}, in {len(first)} trainings each", fontsize=11, weight="bold")
    save(figure, path, axes[0])


DRAW = {
    "step": draw_step,
    "fidelity": draw_fidelity,
    "trainer": draw_trainer,
    **dict.fromkeys(("compare", "moe", "rounding", "long"), draw),
    "budgets": draw_budgets,
}  # by suite
