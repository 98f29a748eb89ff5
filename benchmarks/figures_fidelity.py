"""The figure of `benchmarks.fidelity`, from its JSON alone."""

from __future__ import annotations

import itertools
import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's colours, which the colour-blind can tell apart; the same thing looks the same in every figure.
LOOKS = {
    "ours": ("#0072B2", "X"),
    "bf16 logits": ("#D55E00", "o"),
    "old by bf16 logits, new by ours": ("#CC79A7", "s"),
    "fp16 logits": ("#E69F00", "^"),
    "torch linear_cross_entropy": ("#56B4E9", "D"),
    "fp32 logits": ("#000000", "P"),
}
OTHERS = (("#009E73", "h"), ("#999999", "p"), ("#5B4B8A", "*"), ("#8C6D1F", "<"))  # v, open, is an upper bound
ALIKE = 0.02  # implementations whose errors differ by less, relatively, are one line: they round alike
ROUNDED = "naive GSPO"
Group = tuple[list[str], str, str]  # names, colour, marker


def draw_fidelity(results: dict[str, Any], path: Path) -> None:
    """Wrong clip decisions by length, and the error of a token's log-ratio; a row of panels for each set of tokens."""
    sets = results["sets"]
    figure, axes = plt.subplots(
        len(sets), 2, figsize=(9, 3.9 * len(sets)), width_ratios=(1.35, 1), squeeze=False, layout="constrained"
    )
    for (name, found), (left, right) in zip(sets.items(), axes, strict=True):
        groups = _groups(found)
        _decisions(left, found, groups)
        _errors(right, found, groups)
        left.set_title(f"{name} policy, {found['tokens']:,} tokens, {found['vocab']:,} ids", fontsize=9, loc="left")
        right.set_title("bf16 hidden states and head", fontsize=9, loc="left")
    rows = [row for found in sets.values() for row in found["decisions"]]
    if any(row["wrong"] == 0 for row in rows):
        text = f"open triangles: none wrong of {rows[0]['sequences']:,} sequences; the upper bound of the 95 % interval"
        figure.supxlabel(text, fontsize=9)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _groups(found: dict[str, Any]) -> list[Group]:
    """From the largest error to the least. Those who round alike are one line."""
    errors = found["log-ratios"]
    together: list[list[str]] = []
    for name in sorted(errors, key=lambda name: -errors[name]["std"]):
        last = together[-1] if together else None
        if last and abs(errors[last[0]]["std"] / errors[name]["std"] - 1) < ALIKE and not {name, last[0]} & {"ours"}:
            last.append(name)
        else:
            together.append([name])
    groups, others = [], itertools.cycle(OTHERS)
    for names in together:
        kind = "bf16 logits" if ROUNDED in names else names[0]
        groups.append((names, *(LOOKS.get(kind) or next(others))))
    return groups


def _decisions(axes: Axes, found: dict[str, Any], groups: list[Group]) -> None:
    for names, colour, marker in groups:
        rows = [row for row in found["decisions"] if row["implementation"] == names[0]]
        none = [r for r in rows if r["wrong"] == 0]
        lengths = [r["length"] for r in rows]
        shares, low, high = (  # a gap where none is wrong
            [100 * x if r["wrong"] else math.nan for r, x in zip(rows, values, strict=True)]
            for values in ([r["wrong"] for r in rows], *zip(*(r["wrong, 95 %"] for r in rows), strict=True))
        )
        axes.plot(lengths, shares, color=colour, marker=marker, ms=4)
        axes.vlines(lengths, low, high, color=colour, alpha=0.4, lw=2)
        axes.plot(
            [r["length"] for r in none], [100 * r["wrong, 95 %"][1] for r in none],
            color=colour, marker="v", mfc="none", ms=6 if names[0] == "ours" else 4, lw=0,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}"))
    lengths = sorted({r["length"] for r in found["decisions"]})
    axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    axes.set_xlabel("length of the sequence, tokens")
    axes.set_ylabel("wrong clip decisions, % of sequences")
    axes.grid(alpha=0.25, lw=0.5)


def _errors(axes: Axes, found: dict[str, Any], groups: list[Group]) -> None:
    """One row per line of the other panel, which is its legend."""
    for at, (names, colour, marker) in enumerate(groups):
        std = found["log-ratios"][names[0]]["std"]
        axes.plot([std], [-at], color=colour, marker=marker, ms=6, lw=0)
        axes.annotate(f"{std:.1e}", (std, -at), xytext=(7, 0), textcoords="offset points", fontsize=8, va="center")
    dtypes = {name: one["dtype"] for name, one in found["log-probs"].items()}
    labels = [_label(names, dtypes) for names, _, _ in groups]
    axes.set_yticks([-at for at in range(len(groups))], labels, fontsize=8)
    axes.set_ylim(-len(groups) + 0.4, 0.6)
    stds = [found["log-ratios"][names[0]]["std"] for names, _, _ in groups]
    axes.set_xscale("log")
    axes.set_xlim(min(stds) / 3, max(stds) * 30)
    axes.set_xlabel("std of the error of a token's log-ratio, nats")
    axes.grid(alpha=0.25, lw=0.5, axis="x")


def _label(names: list[str], dtypes: dict[str, str]) -> str:
    """Whose logits are rounded to bf16 is told by their first words: naive, TRL, ..."""
    if ROUNDED in names:
        first = sorted((name.split()[0] for name in names), key=str.lower)
        return textwrap.fill(f"bf16 logits: {', '.join(first)}", 25)
    rounded = [name for name in names if dtypes.get(name) == "bfloat16"]
    return textwrap.fill(", ".join(names) + (" (returns bf16)" if rounded else ""), 25)
