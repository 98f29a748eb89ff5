"""The figure of `budgets.py`: what a gradient budget does to a training, from its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# By Okabe and Ito: told apart by every eye. The exact runs are black, as what the others are held against.
COLOURS = ("black", "#0072B2", "#D55E00", "#009E73")
PANELS = {
    "reward": "reward of sampled answers",
    "entropy": "entropy (nats per token)",
    "passes": "matrix passes per update",
}
SMOOTHING = 5  # rollouts


def draw_budgets(results: dict[str, Any], path: Path) -> None:
    """Reward, entropy and passes against updates: the mean over the seeds, in a band from the least to the most."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    updates = results["settings"]["updates"]
    for axes, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for colour, (arm, runs) in zip(COLOURS, results["runs"].items(), strict=True):
            curves = [smoothed(run[key]) for run in runs]
            x = [updates * step for step in range(1, len(curves[0]) + 1)]
            steps = list(zip(*curves, strict=True))
            dashed = "--" if "," in arm else "-"
            axes.plot(x, [sum(step) / len(step) for step in steps], dashed, color=colour, linewidth=1.4, label=arm)
            axes.fill_between(
                x, [min(s) for s in steps], [max(s) for s in steps], color=colour, alpha=0.12, linewidth=0
            )
        axes.set(title=title, xlabel="optimizer updates", xlim=(0, None), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), frameon=False)
    figure.suptitle(f"Mean and range of {len(runs)} seeds (running mean of {SMOOTHING} rollouts)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, up to SMOOTHING."""
    parts = (values[max(0, at + 1 - SMOOTHING) : at + 1] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]
