"""The figure of `gspo_kernels.benchmarks.studies.fidelity`, from its JSON alone."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..measure import Record
from ..studies.decisions import ANEW
from ..studies.fidelity import NAIVE
from .looks import LOOKS, panels, save

ALIKE = 0.02  # implementations whose errors differ by less, relatively, are one line: they round alike
Group = tuple[list[str], str, str]  # names, colour, marker


def draw_fidelity(results: Record, path: Path) -> None:
    """Wrong clip decisions by length, and the error of a token's log-ratio; a row of panels for each set of tokens."""
    sets = results["sets"]
    figure, axes = panels(len(sets), 2, (9, 3.9 * len(sets)), width_ratios=(1.35, 1))
    for (name, measured), left, right in zip(sets.items(), axes[::2], axes[1::2], strict=True):
        groups = _groups(measured)
        _decisions(left, measured, groups)
        _errors(right, measured, groups)
        left.set_title(
            f"{name} policy, {measured['tokens']:,} tokens, {measured['vocab']:,} ids", fontsize=9, loc="left"
        )
        right.set_title("bf16 hidden states and head", fontsize=9, loc="left")
    rows = [row for measured in sets.values() for row in measured["decisions"]]
    if any(row["wrong"] == 0 for row in rows):
        text = f"bars: 95 %, tokens drawn anew; open triangles: its upper end, none wrong of {rows[0]['sequences']:,}"
        figure.supxlabel(text, fontsize=9)
    save(figure, path)


def _groups(measured: Record) -> list[Group]:
    """From the largest error to the least. Those who round alike are one line."""
    errors = measured["log-ratios"]
    together: list[list[str]] = []
    for name in sorted(errors, key=lambda name: -errors[name]["std"]):
        last = together[-1] if together else None
        if last and abs(errors[last[0]]["std"] / errors[name]["std"] - 1) < ALIKE and not {name, last[0]} & {"ours"}:
            last.append(name)
        else:
            together.append([name])
    return [(names, *LOOKS["bf16 logits" if NAIVE in names else names[0]]) for names in together]


def _decisions(axes: Axes, measured: Record, groups: list[Group]) -> None:
    for names, colour, marker in groups:
        rows = [row for row in measured["decisions"] if row["implementation"] == names[0]]
        none = [r for r in rows if r["wrong"] == 0]
        lengths = [r["length"] for r in rows]
        shares, low, high = (  # a gap where none is wrong
            [100 * x if r["wrong"] else math.nan for r, x in zip(rows, values, strict=True)]
            for values in ([r["wrong"] for r in rows], *zip(*(r[f"wrong, {ANEW}"] for r in rows), strict=True))
        )
        axes.plot(lengths, shares, color=colour, marker=marker, ms=4)
        axes.vlines(lengths, low, high, color=colour, alpha=0.4, lw=2)
        axes.plot(
            [r["length"] for r in none],
            [100 * r[f"wrong, {ANEW}"][1] for r in none],
            color=colour,
            marker="v",
            mfc="none",
            ms=6 if names[0] == "ours" else 4,
            lw=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}"))
    lengths = sorted({r["length"] for r in measured["decisions"]})
    axes.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    axes.set_xlabel("length of the sequence, tokens")
    axes.set_ylabel("wrong clip decisions, % of sequences")


def _errors(axes: Axes, measured: Record, groups: list[Group]) -> None:
    """One row per line of the other panel, which is its legend."""
    for at, (names, colour, marker) in enumerate(groups):
        std = measured["log-ratios"][names[0]]["std"]
        axes.plot([std], [-at], color=colour, marker=marker, ms=6, lw=0)
        axes.annotate(f"{std:.1e}", (std, -at), xytext=(7, 0), textcoords="offset points", fontsize=8, va="center")
    dtypes = {name: errors["dtype"] for name, errors in measured["log-probs"].items()}
    labels = [_label(names, dtypes) for names, _, _ in groups]
    axes.set_yticks([-at for at in range(len(groups))], labels, fontsize=8)
    axes.set_ylim(-len(groups) + 0.4, 0.6)
    stds = [measured["log-ratios"][names[0]]["std"] for names, _, _ in groups]
    axes.set_xscale("log")
    axes.set_xlim(min(stds) / 3, max(stds) * 30)
    axes.set_xlabel("error of a token's log-ratio (std, nats)")
    axes.grid(False, axis="y")


def _label(names: list[str], dtypes: dict[str, str]) -> str:
    """Whose logits are rounded to bf16 is told by their first words: naive, TRL, ..."""
    if NAIVE in names:
        first = sorted((name.split()[0] for name in names), key=str.lower)
        return textwrap.fill(f"bf16 logits: {', '.join(first)}", 25)
    rounded = [name for name in names if dtypes.get(name) == "bfloat16"]
    return textwrap.fill(", ".join(names) + (" (returns bf16)" if rounded else ""), 25)
