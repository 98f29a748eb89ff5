"""Draw the figure of README.md from the committed results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .tables import Results

BLUE, ORANGE = "#0072B2", "#E69F00"  # of Okabe and Ito, whom color-blind readers can tell apart


def draw_step(results: Results, path: Path) -> None:
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
