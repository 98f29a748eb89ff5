"""Draw the curves of a run."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

SMOOTHING = 10  # steps
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
PANELS = {"reward": "Reward", "clip_fraction": "Share of answers clipped", "entropy": "Entropy per token, nats"}


def plot_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot reward, clip fraction and entropy over the steps, one color per seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # pyplot would open windows and has global state

    style: Any = {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with mpl.rc_context(style | {"grid.linewidth": 0.5, "grid.alpha": 0.25}):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        panels = dict(zip(PANELS, figure.subplots(1, 3), strict=True))
        for index, seed in enumerate(dict.fromkeys(row["seed"] for row in rows)):
            color: Any = {"color": COLORS[index % len(COLORS)]}
            steps = [row for row in rows if row["seed"] == seed and row["step"] > 0]
            dots = [(row["step"], row["eval_reward"]) for row in rows if row["seed"] == seed and "eval_reward" in row]
            panels["reward"].plot(*zip(*dots, strict=True), **color, marker="o", ms=4, lw=1.8, label=f"seed {seed}")
            for name, axes in panels.items():
                x, y = [row["step"] for row in steps], [row[name] for row in steps]
                axes.plot(x, y, **color, alpha=0.25, lw=0.8)
                if name != "reward":
                    means = [fmean(y[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(len(y))]
                    axes.plot(x, means, **color, lw=1.5)
        for name, axes in panels.items():
            axes.set(title=PANELS[name], xlabel=f"step (mean of {SMOOTHING}; faint: each)")
            axes.set_ylim(bottom=None if name == "reward" else 0)
        panels["reward"].set_xlabel("step (dots: held out, greedy; faint: training, sampled)")
        panels["reward"].legend(loc="lower right")
        figure.savefig(path, dpi=130, format="png")
