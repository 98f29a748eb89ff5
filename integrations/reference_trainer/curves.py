"""Draw the curves of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from .held_out import read_estimate, suffixes

SMOOTHING = 10  # steps
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
SHARES = {"clip_fraction": "Share of answers clipped", "entropy": "Entropy per token, nats"}
COLUMNS = 3


def plot_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot rewards, clip fraction and entropy over the steps, one color per seed.

    There is a panel for the total reward and, if there are several, one for each component.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure  # pyplot would open windows and has global state

    evaluations = [row for row in rows if "eval_reward" in row]
    rewards = list(dict.fromkeys(suffix for row in evaluations for suffix in suffixes(row)))
    style: Any = {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with mpl.rc_context(style | {"grid.linewidth": 0.5, "grid.alpha": 0.25}):
        lines = -(-(len(rewards) + len(SHARES)) // COLUMNS)
        figure = Figure(figsize=(12, 3.6 * lines + 0.4), layout="constrained")
        panels = iter(figure.subplots(lines, COLUMNS, squeeze=False).flat)
        for suffix in rewards:
            axes = next(panels)
            draw_held_out(axes, evaluations, suffix)
            draw_steps(axes, rows, lambda row, suffix=suffix: row.get(f"reward{suffix}"), ls="--")
            axes.set_title(f"Reward: {suffix[1:]}" if suffix else "Reward")
        for name, title in SHARES.items():
            axes = next(panels)
            draw_steps(axes, rows, lambda row, name=name: row[name])
            axes.set_title(title)
            top = max(axes.dataLim.y1, 0.0) or 1.0  # dataLim is -inf without points
            axes.set_ylim(-0.04 * top, 1.04 * top)  # the border would cut a line that lies on it
        for axes in panels:
            axes.set_visible(False)
        prompts = len(evaluations[-1]["eval_rewards"]["total"])
        figure.supxlabel(
            f"step. Dots: {prompts} held-out prompts, greedy answers, 95% intervals. Dashed: training, sampled "
            f"answers. Lines of training are means of {SMOOTHING} steps; faint: each step",
            fontsize=9,
        )
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        figure.savefig(path, dpi=130, format="png")


def by_seed(rows: list[dict[str, Any]]) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """Seeds with their colors and rows."""
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    colors = [COLORS[i % len(COLORS)] for i in range(len(seeds))]
    return [(seed, color, [x for x in rows if x["seed"] == seed]) for seed, color in zip(seeds, colors, strict=True)]


def draw_held_out(axes: Any, evaluations: list[dict[str, Any]], suffix: str) -> None:
    """Draw a held-out reward with its intervals."""
    for seed, color, of_seed in by_seed(evaluations):
        estimates = [(row["step"], x) for row in of_seed if (x := read_estimate(row, "eval_reward", suffix))]
        steps, means = [step for step, _ in estimates], [x.mean for _, x in estimates]
        bars = [[x.mean - x.low for _, x in estimates], [x.high - x.mean for _, x in estimates]]
        look: Any = {"color": color, "marker": "o", "ms": 4, "lw": 1.8, "elinewidth": 1, "capsize": 2}
        axes.errorbar(steps, means, bars, **look, label=f"seed {seed}")


def draw_steps(
    axes: Any, rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float | None], ls: str = "-"
) -> None:
    """Draw a number of each training step, faint, and its mean over the last steps. Steps with None are left out."""
    for _, color, of_seed in by_seed(rows):
        points = [(row["step"], y) for row in of_seed if row["step"] and (y := value(row)) is not None]
        steps, values = [step for step, _ in points], [y for _, y in points]
        means = [fmean(values[max(0, i + 1 - SMOOTHING) : i + 1]) for i in range(len(values))]
        axes.plot(steps, values, color=color, alpha=0.25, lw=0.8)
        axes.plot(steps, means, color=color, lw=1.5, ls=ls)
