"""Draw the curves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMOOTHING = 10  # steps
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito


def running_mean(values: list[float], width: int) -> list[float]:
    """Return the mean of each value and up to width - 1 values before it."""
    return [sum(window) / len(window) for window in (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))]


def plot_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot reward, clip fraction and entropy over the steps, one colour per seed. Replace `path` at the end."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # pyplot would open windows and has global state

    style: Any = {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        panels = reward, clip, entropy = figure.subplots(1, 3)
        for index, seed in enumerate(dict.fromkeys(row["seed"] for row in rows)):
            steps = [row for row in rows if row["seed"] == seed and row["step"] > 0]
            evaluated = [row for row in rows if row["seed"] == seed and "eval_reward" in row]
            x = [row["step"] for row in steps]
            colour = COLOURS[index % len(COLOURS)]
            dots = [row["step"] for row in evaluated], [row["eval_reward"] for row in evaluated]
            reward.plot(*dots, color=colour, marker="o", ms=4, lw=1.8, label=f"seed {seed}")
            for axes, name in ((reward, "reward"), (clip, "clip_fraction"), (entropy, "entropy")):
                values = [row[name] for row in steps]
                axes.plot(x, values, color=colour, alpha=0.25, lw=0.8)
                if axes is not reward:
                    axes.plot(x, running_mean(values, SMOOTHING), color=colour, lw=1.5)
        reward.set(title="Reward", xlabel="step (dots: held out, greedy; faint: training, sampled)")
        reward.legend(loc="lower right")
        clip.set(title="Share of answers clipped", ylim=(0, None))
        entropy.set(title="Entropy per token, nats", ylim=(0, None))
        for axes in panels:
            axes.grid(lw=0.5, alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if axes is not reward:
                axes.set_xlabel(f"step (mean of {SMOOTHING}; faint: each)")
        partial = path.with_suffix(".partial.png")
        figure.savefig(partial, dpi=130)
    partial.replace(path)
