"""What everything looks like in a figure: one colour and marker each, the same wherever it is drawn.

Colours are Okabe and Ito's, which the colour-blind can tell apart, and two greys. There are fewer of them than names:
those that are never apart by colour are apart by marker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK, DARK, GREY = "#000000", "#595959", "#999999"
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"

_OURS, _BUDGET, _NAIVE = (BLUE, "X"), (VERMILION, "*"), (BLACK, "o")
LOOKS = {
    "naive GSPO": _NAIVE,
    "naive GRPO": (DARK, "s"),
    "naive GSPO, compiled": (GREY, "o"),
    "TRL fused head": (ORANGE, "^"),
    "Liger GRPO loss": (PURPLE, ">"),
    "Liger fused CE": (PURPLE, "<"),
    "cut-cross-entropy": (ORANGE, "p"),
    "cut-cross-entropy, no filter": (ORANGE, "8"),
    "verl torch head": (GREEN, "D"),
    "verl Triton head": (GREEN, "d"),
    "torch linear_cross_entropy": (SKY, "P"),
    "ours": _OURS,
    "exact": _OURS,
    "budget 1e-4": (SKY, "d"),
    "ours, budget 1e-3": _BUDGET,
    "budget 1e-3": _BUDGET,
    "budget 4e-3": (GREEN, "^"),
    "budget 1e-2": (ORANGE, "h"),
    "bf16 logits": _NAIVE,  # as a bf16 head makes them: what naive GSPO has
    "fp16 logits": (VERMILION, "^"),
    "fp32 logits": (DARK, "h"),
    "old by bf16 logits, new by ours": (PURPLE, "s"),
}
SPARE = (BLUE, GREEN, ORANGE, PURPLE, GREY, SKY)  # for what has no name here


def panels(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row. `more`: of `Figure.subplots`."""
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    for panel in axes:
        panel.grid(alpha=0.25, lw=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
