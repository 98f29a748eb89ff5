"""The figure of `sparsity`, from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#56B4E9")  # Okabe and Ito's
EXACT, BUDGET = "#0072B2", "#D55E00"


def draw_sparsity(results: dict[str, Any], path: Path) -> None:
    """Passes and gradient error against the budget; passes and time against zero rows and against entropy."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    (passes, errors), (zero, entropy) = figure.subplots(2, 2)
    cases = results["passes"]["cases"]
    for colour, case in zip(COLOURS, dict.fromkeys(r["case"] for r in cases), strict=True):
        rows = [r for r in cases if r["case"] == case]
        at = range(len(rows))
        passes.plot(at, [r["passes"] for r in rows], color=colour, marker="o", ms=4, label=case)
        worst = [max(r["d_hidden error"], r["d_weight error"]) for r in rows]
        errors.plot(
            [i for i in at if worst[i]], [e for e in worst if e], color=colour, marker="o", ms=4, label=case
        )  # fmt: skip
        ticks = [f"{r['budget']:g}" for r in rows]
    for axes in (passes, errors):
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel("gradient budget")
    passes.set_ylim(0, 4.2)
    passes.set_ylabel("matrix passes (dense: 4)")
    errors.set_yscale("log")
    errors.plot(range(1, len(ticks)), [float(t) for t in ticks[1:]], color="#999999", lw=0.8, ls=":")
    errors.annotate("error = budget", (1, float(ticks[1])), color="#777777", fontsize=8, va="bottom")
    errors.set_ylabel("relative error of the worse gradient")
    passes.legend(frameon=False, fontsize=8)
    _by_share(zero, results["time"]["by zero share"])
    _by_entropy(entropy, results["passes"]["entropy"])
    for axes in (passes, errors, zero, entropy):
        axes.grid(alpha=0.25, lw=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _by_share(axes: Axes, shares: list[dict[str, Any]]) -> None:
    for name, label, colour in (("exact", "exact", EXACT), ("budget 0.001", "budget 1e-3", BUDGET)):
        x = [record["zero share"] for record in shares]
        axes.plot(x, [r[name]["over naive"] for r in shares], color=colour, marker="o", ms=4, label=label)
        low, high = ([r[name][p] / r["naive"]["seconds"] for r in shares] for p in ("p20", "p80"))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    axes.axhline(1, color="black", lw=0.8, ls=":")
    axes.set_ylim(0, None)
    axes.set_xlabel("share of sequences of zero advantage")
    axes.set_ylabel("time over naive GSPO's, this CPU")
    axes.legend(frameon=False, fontsize=8)


def _by_entropy(axes: Axes, records: list[dict[str, Any]]) -> None:
    for budget, label, colour in ((0.0, "exact", EXACT), (1e-3, "budget 1e-3", BUDGET)):
        rows = sorted((r for r in records if r["budget"] == budget), key=lambda r: r["mean entropy"])
        x = [r["mean entropy"] for r in rows]
        axes.plot(x, [r["passes"] for r in rows], color=colour, marker="o", ms=4, label=label)
    axes.set_ylim(0, 4.2)
    axes.set_xlabel("mean entropy of a token, nats")
    axes.set_ylabel("matrix passes, rl-like")
    axes.legend(frameon=False, fontsize=8)
