"""The figure of `sparsity`, from its JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from .looks import LOOKS, SPARE, panels, save

EXACT, BUDGET = LOOKS["exact"], LOOKS["budget 1e-3"]


def draw_sparsity(results: dict[str, Any], path: Path) -> None:
    """Passes and gradient error against the budget; passes and time against zero rows and against entropy."""
    figure, (passes, errors, zero, work, entropy, last) = panels(3, 2, (10, 10))
    cases = results["passes"]["cases"]
    ticks = [f"{r['budget']:g}" for r in cases if r["case"] == cases[0]["case"]]  # the same budgets in every case
    for colour, case in zip(SPARE, dict.fromkeys(r["case"] for r in cases), strict=True):
        rows = [r for r in cases if r["case"] == case]
        at = range(len(rows))
        passes.plot(at, [r["passes"] for r in rows], color=colour, marker="o", ms=4, label=case)
        worst = [max(r["d_hidden error"], r["d_weight error"]) for r in rows]
        errors.plot([i for i in at if worst[i]], [e for e in worst if e], color=colour, marker="o", ms=4, label=case)
    for axes in (passes, errors):
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel("gradient budget")
    passes.set_ylim(0, 5.5)  # room for the legend
    passes.set_ylabel("matrix passes (dense: 4)")
    errors.set_yscale("log")
    errors.plot(range(1, len(ticks)), [float(t) for t in ticks[1:]], color="#999999", lw=0.8, ls=":")
    end = (len(ticks) - 1, float(ticks[-1]))
    errors.annotate(
        "error = budget",
        end,
        color="#777777",
        fontsize=8,
        ha="right",
        va="bottom",
        xytext=(-28, 6),
        textcoords="offset points",
    )
    errors.set_ylabel("relative error of the worse gradient")
    errors.set_title("no point: nothing was dropped, the error is 0", fontsize=9, loc="left")
    passes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    time, label = results["time"], "share of sequences of zero advantage"
    counted, machine = results["passes"], time["measured"]["machine"]
    figure.suptitle(
        f"H = {counted['width']}, V = {counted['vocab']:,}, float32, synthetic policy; passes and errors: "
        f"{counted['rows']:,} tokens in 64 sequences\ntimes: {time['rows']:,} tokens in 8 sequences, {machine['cpu']}, "
        f"{machine['threads']} threads",
        fontsize=10,
    )
    _times(zero, time["by zero share"], "zero share", label)
    shares = [(float(r["case"].removeprefix("zero share ")), r) for r in results["passes"]["zero share"]]
    _work(work, shares, label)
    _times(entropy, time["by entropy"], "mean entropy", "mean entropy of a token, nats")
    _work(last, [(r["mean entropy"], r) for r in results["passes"]["entropy"]], "mean entropy of a token, nats")
    save(figure, path)


def _times(axes: Axes, records: list[dict[str, Any]], key: str, label: str) -> None:
    for name, said, (colour, marker) in (("exact", "exact", EXACT), ("budget 0.001", "budget 1e-3", BUDGET)):
        rows = sorted(records, key=lambda r: r[key])
        over = [r[name]["over_naive"] for r in rows]
        x = [r[key] for r in rows]
        axes.plot(x, [o["ratio"] for o in over], color=colour, marker=marker, ms=5, label=said)
        axes.fill_between(x, [o["p20"] for o in over], [o["p80"] for o in over], color=colour, alpha=0.15, lw=0)
    axes.axhline(1, color="black", lw=0.8, ls=":")
    axes.set_ylim(0, None)
    axes.set_xlabel(label)
    axes.set_ylabel("time over naive GSPO's")
    axes.legend(frameon=False, fontsize=8)


def _work(axes: Axes, points: list[tuple[float, dict[str, Any]]], label: str) -> None:
    for budget, said, (colour, marker) in ((0.0, "exact", EXACT), (1e-3, "budget 1e-3", BUDGET)):
        rows = sorted(((x, r["passes"]) for x, r in points if r["budget"] == budget), key=lambda pair: pair[0])
        axes.plot(*zip(*rows, strict=True), color=colour, marker=marker, ms=5, label=said)
    axes.set_ylim(0, 4.2)
    axes.set_xlabel(label)
    axes.set_ylabel("matrix passes (dense: 4)")
    axes.legend(frameon=False, fontsize=8)
