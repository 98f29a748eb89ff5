"""Draw the curves of a run."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from .held_out import read_estimate, suffixes

SMOOTHING = 10  # steps
SHARES = {"clip_fraction": "Share of answers clipped", "entropy": "Entropy per token, nats"}
COLUMNS = 3


def plot_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot rewards, clip fraction and entropy over the steps, one color per seed.

    There is a panel for the total reward and, if there are several, one for each component.
    """
    from matplotlib.figure import Figure  # pyplot would open windows and has global state

    last = [row for row in rows if "eval_reward" in row][-1]
    titles = {f"reward{suffix}": f"Reward{suffix.replace('/', ': ', 1)}" for suffix in suffixes(last)} | SHARES
    lines = -(-len(titles) // COLUMNS)
    figure = Figure(figsize=(12, 3.6 * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    for axes, (name, title) in zip(panels, titles.items(), strict=False):
        axes.set_title(title, loc="left")
        axes.grid(alpha=0.25)
        for i, seed in enumerate(seeds):
            draw(axes, [row for row in rows if row["seed"] == seed], name, color=f"C{i}", label=f"seed {seed}")
    for axes in panels[len(titles) :]:
        axes.set_visible(False)
    prompts = len(last["eval_rewards"]["total"])
    figure.supxlabel(
        f"step. Dots: {prompts} held-out prompts, greedy answers, 95% intervals. Dashed: training, sampled answers. "
        f"Lines of training are means of {SMOOTHING} steps; faint: each step",
        fontsize=9,
    )
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(seeds))
    figure.savefig(path, dpi=130, format="png")


def draw(axes: Any, rows: list[dict[str, Any]], name: str, color: str, label: str) -> None:
    """Plot a metric of one seed: a faint line per step, its moving average, and held-out rewards with error bars."""
    points = [(row["step"], row[name]) for row in rows if row["step"] and name in row]
    steps, values = [step for step, _ in points], [y for _, y in points]
    means = [fmean(values[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(len(values))]
    axes.plot(steps, values, color=color, alpha=0.25, lw=0.8)
    axes.plot(steps, means, color=color, ls="-" if name in SHARES else "--")
    if name not in SHARES:
        suffix = name.removeprefix("reward")
        estimates = [(row["step"], x) for row in rows if (x := read_estimate(row, "eval_reward", suffix))]
        bars = [[x.mean - x.low for _, x in estimates], [x.high - x.mean for _, x in estimates]]
        evaluated = [step for step, _ in estimates], [x.mean for _, x in estimates], bars
        axes.errorbar(*evaluated, color=color, marker="o", ms=4, elinewidth=1, capsize=2, label=label)
