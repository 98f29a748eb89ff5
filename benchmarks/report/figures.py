"""Draw the figure of README.md from the committed results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .tables import CAST, FP32_HEAD, NAIVE, OURS, Results, bodies, wrong

# Okabe and Ito's colors, which color-blind readers can tell apart
BLUE, ORANGE, SKY, GREEN = "#0072B2", "#E69F00", "#56B4E9", "#009E73"
HEADS = {NAIVE: ("bf16 logits", ORANGE), CAST: ("TRL, fp32 head", GREEN), OURS: ("ours", BLUE)}
HEADS |= {FP32_HEAD: ("ours, fp32 head", SKY)}


def draw_step(results: Results, precision: Results, path: Path) -> None:
    """Draw time and memory of TRL's step by the share of answers with advantage 0, and wrong clip decisions."""
    shares = results["shares"]
    peaks = {name: [r[f"{name} peak_bytes"] / 2**30 for r in shares] for name in ("TRL", "GSPOTrainer")}
    times = {"TRL": [1.0] * len(shares), "GSPOTrainer": [r["update"] for r in shares]}
    figure = Figure(figsize=(3.9, 6.8), layout="constrained")  # inches: 390 pixels wide
    *panels, last = figure.subplots(3)
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
    for side, (head, (label, color)) in enumerate(HEADS.items()):
        shares_wrong = [100 * wrong(bodies(precision)[body][head]) for body in ("bf16 weights", "bf16 autocast")]
        bars = last.bar([i + 0.21 * (side - 1.5) for i in range(2)], shares_wrong, width=0.2, color=color, label=label)
        last.bar_label(bars, [f"{share:.2g}%" for share in shares_wrong], padding=2, fontsize=9)
    last.set_xticks(range(2), ["bf16 weights", "fp32 weights, autocast"], fontsize=11)
    last.set(yticks=[], ylim=(0, 15))
    last.set_title("wrong clip decisions, CPU", fontsize=12, weight="bold")
    last.tick_params(length=0)
    last.spines[["top", "right", "left"]].set_visible(False)
    last.legend(fontsize=9, frameon=False, ncols=2)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
