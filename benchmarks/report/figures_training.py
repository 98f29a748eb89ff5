"""The figure of `budgets.py`: what a gradient budget does to a training, from its JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .looks import GREY, LOOKS, panels, save

PANELS = {
    "reward": "reward of sampled answers",
    "entropy": "entropy (nats per token)",
    "passes": "matrix passes per update",
}
SMOOTHING = 5  # rollouts


def draw_budgets(results: dict[str, Any], path: Path) -> None:
    """Reward, entropy and passes against updates: the mean over the seeds, in a band from the least to the most."""
    figure, places = panels(1, len(PANELS), (10, 3.6))
    updates, seeds = results["settings"]["updates"], len(results["runs"][results["control"]])
    for axes, (key, title) in zip(places, PANELS.items(), strict=True):
        for arm, runs in results["runs"].items():
            colour = LOOKS[arm][0] if arm in LOOKS else LOOKS["exact"][0]
            curves = [smoothed(run[key]) for run in runs]
            x = [updates * step for step in range(1, len(curves[0]) + 1)]
            steps = list(zip(*curves, strict=True))
            dashed = arm == results["control"]
            colour = GREY if dashed else colour
            mean = [sum(step) / len(step) for step in steps]
            axes.plot(
                x, mean, "--" if dashed else "-", color=colour, linewidth=1.4, label=arm, zorder=3 if dashed else 2
            )
            axes.fill_between(
                x, [min(s) for s in steps], [max(s) for s in steps], color=colour, alpha=0.12, linewidth=0
            )
        axes.set(title=title, xlabel="optimizer updates", xlim=(0, None), ylim=(0, None))
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Mean and range of {seeds} seeds (running mean of {SMOOTHING} rollouts)", fontsize=10)
    save(figure, path)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, up to SMOOTHING."""
    parts = (values[max(0, at + 1 - SMOOTHING) : at + 1] for at in range(len(values)))
    return [sum(part) / len(part) for part in parts]
