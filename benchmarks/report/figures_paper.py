"""The figures of `studies/paper_checks.py`, from its JSON alone: `results` has a record per claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from ..measure import Record
from ..studies.paper_samples import NORMALISED, PRODUCT
from .looks import BLUE, GREEN, GREY, LOOKS, ORANGE, PURPLE, VERMILION, panels, save

GSPO, GRPO = BLUE, VERMILION
LAWS = (BLUE, GREEN, ORANGE, PURPLE, GREY)  # in the order of the JSON
SIZE = (8.0, 3.8)
MARKERS = "osD^P"


def _lengths(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = lengths if len(lengths) < 6 else lengths[::2] if len(lengths) % 2 else lengths[1::2]
    axes.set_xticks(shown, [f"{length:,}" for length in shown])
    axes.set_xlabel("length of the sequence, tokens")


def draw_equality(results: Record, path: Path) -> None:
    """6.1: coefficients of GSPO and GSPO-token, token by token."""
    numbers = results["6.1"]["numbers"]
    figure, axes = panels(1, 2, SIZE)
    titles = ("one advantage per sequence, no token weights", "the same with a weight per token")
    for panel, title, (sequence, token) in zip(axes, titles, numbers["coefficients"].values(), strict=True):
        ends = [min(sequence + token), max(sequence + token)]
        panel.plot(ends, ends, color=GREY, lw=1, zorder=0)
        panel.plot(sequence, token, color=GSPO, marker="o", ms=3, lw=0, alpha=0.5)
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_xlabel("coefficient of a token, GSPO")
        panel.set_ylabel("coefficient of a token, GSPO-token")
    save(figure, path)


def draw_clip_fractions(results: Record, path: Path) -> None:
    """6.2: clip fractions of the same samples against length, and the paper's pair."""
    numbers = results["6.2"]["numbers"]
    figure, (axes,) = panels(1, 1, (7.5, 4.4))
    lengths = [p["length"] for p in next(iter(numbers["laws"].values()))["points"]]
    for (name, law), colour, marker in zip(numbers["laws"].items(), LAWS, MARKERS, strict=True):
        points = law["points"]
        low, high = ([p["gspo, 95 %"][end] for p in points] for end in (0, 1))
        label = f"{name}, std {law['std']:g}" + (f", {law['drift']:g} a token" if law["drift"] else "")
        label += "" if any(p["grpo"] for p in points) else "; GRPO clips none"
        axes.plot(lengths, [p["gspo"] for p in points], color=colour, marker=marker, ms=5, label=label)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, lw=0)
        clipped = [p for p in points if p["grpo"] > 0]
        axes.plot(
            [p["length"] for p in clipped],
            [p["grpo"] for p in clipped],
            color=colour,
            marker=marker,
            ms=5,
            mfc="w",
            ls="--",
        )
    for share, kind in ((numbers["pair"]["gspo"], "GSPO"), (numbers["pair"]["grpo"], "GRPO")):
        axes.axhline(share, color="black", lw=1, ls=":")
        axes.annotate(
            f"the paper's {kind}, {share:g}",
            (lengths[0], share),
            xytext=(0, -7),
            textcoords="offset points",
            fontsize=8,
            va="top",
        )
    axes.set_yscale("log")
    axes.set_ylim(3e-4, 1.2)
    _lengths(axes, lengths)
    axes.set_ylabel("share of tokens clipped")
    title = "law of a token's log-ratio (filled: GSPO, open: GRPO)"
    axes.legend(fontsize=8, title=title, title_fontsize=8, loc="center", frameon=False, bbox_to_anchor=(0.5, 0.46))
    save(figure, path)


def draw_ranges(results: Record, path: Path) -> None:
    """6.3: where 98 % of the ratios lie, with and without length normalisation, with and without drift."""
    laws = results["6.3"]["numbers"]["laws"]
    figure, (product, normalised) = panels(1, 2, SIZE)
    for name, style, fill in (("no drift", "-", 0.25), ("drift", "--", 0.0)):
        points, drift = laws[name]["points"], laws[name]["drift"]
        lengths = [p["length"] for p in points]
        label = f"drift {drift:g} a token" if drift else name
        both = ((product, PRODUCT, GRPO, float), (normalised, NORMALISED, GSPO, lambda ratio: 1e3 * (ratio - 1)))
        for panel, kind, colour, shown in both:
            low, high = ([shown(p[kind][end]) for p in points] for end in (0, 1))
            panel.fill_between(lengths, low, high, color=colour, alpha=fill, lw=0)
            panel.plot(lengths, low, color=colour, ls=style, marker="o", ms=4, label=label)
            panel.plot(lengths, high, color=colour, ls=style, marker="o", ms=4)
    product.set_yscale("log")
    product.set_ylabel("ratio, 1 % to 99 %")
    product.set_title("product of the tokens' ratios", fontsize=9, loc="left")
    window = (-0.3, 0.4)  # of the paper: results are of the preset
    for bound in window:
        normalised.axhline(bound, color="black", lw=1, ls=":")
    normalised.annotate("clip window", (lengths[0], window[1]), xytext=(2, 3), textcoords="offset points", fontsize=8)
    normalised.set_ylabel("(ratio - 1) x 1000, 1 % to 99 %")
    normalised.set_title("length-normalised, as GSPO has it", fontsize=9, loc="left")
    for axes in (product, normalised):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.set_xlabel("length of the sequence, independent tokens")
    product.legend(fontsize=8, frameon=False, loc="upper left")
    normalised.legend(fontsize=8, frameon=False, loc="upper right")
    save(figure, path)


def draw_precision(results: Record, path: Path) -> None:
    """6.4: what the head's rounding does to decisions and coefficients."""
    numbers = results["6.4"]["numbers"]
    figure, (wrong, error) = panels(1, 2, (9.0, 4.2))
    lengths = sorted({p["length"] for p in numbers["points"]})
    for name, std in numbers["std of a token's log-ratio error"].items():
        colour, marker = LOOKS[name]
        for kind, style, fill in (("gspo", "-", None), ("grpo", "--", "w")):
            rows = [p for p in numbers["points"] if p["noise"] == name and p["objective"] == kind]
            look = {"color": colour, "ls": style, "marker": marker, "ms": 5, "mfc": fill or colour}
            nonzero = [p for p in rows if p["wrong decisions"] > 0]
            wrong.plot([p["length"] for p in nonzero], [100 * p["wrong decisions"] for p in nonzero], **look)
            if kind == "gspo":
                none = [p for p in rows if p["wrong decisions"] == 0]
                ends = [100 * p["wrong decisions, 95 %"][1] for p in none]
                wrong.plot([p["length"] for p in none], ends, color=colour, marker="v", ms=6, mfc="w", lw=0)
                low, high = ([100 * p["wrong decisions, 95 %"][end] for p in nonzero] for end in (0, 1))
                wrong.vlines([p["length"] for p in nonzero], low, high, color=colour, alpha=0.4, lw=2)
            label = f"{name} ({std:.0e})" if kind == "gspo" else None
            error.plot(lengths, [p["relative error"] for p in rows], label=label, **look)
    wrong.set_ylabel("wrong clip decisions, %")
    error.set_ylabel("relative error of all coefficients")
    said = "GSPO: of sequences (none: triangle, end of the\ninterval); GRPO: of tokens (none: not drawn)"
    wrong.set_title(said, fontsize=9, loc="left")
    once = any(0 < p["wrong of these"] * p["sequences"] < 1.5 for p in numbers["points"] if p["objective"] == "gspo")
    title = "against float64; sequences of GSPO: few, so that\n"
    title += "a peak is one wrong decision, a trough none" if once else "a trough is none that is wrong"
    error.set_title(title, fontsize=9, loc="left")
    for panel in (wrong, error):
        panel.set_yscale("log")
        _lengths(panel, lengths)
    title = "noise (std of a token); filled: GSPO, open: GRPO"
    figure.legend(
        *error.get_legend_handles_labels(),
        fontsize=8,
        title=title,
        title_fontsize=8,
        ncols=3,
        loc="outside lower center",
        frameon=False,
    )
    save(figure, path)


def draw_coefficients(results: Record, path: Path) -> None:
    """6.7: the weights that a token's gradient gets besides its advantage, clipped ones left out."""
    numbers = results["6.7"]["numbers"]
    figure, axes = panels(1, 2, (9.0, 3.8))
    for panel, kind in zip(axes, ("grpo", "gspo"), strict=True):
        histogram = numbers[kind]
        for sign, colour in (("A > 0", GSPO), ("A < 0", GRPO)):
            panel.stairs(histogram[sign]["counts"], histogram["edges"], color=colour, fill=True, alpha=0.45)
            kept = f"{sign}: {histogram[sign]['kept']:.1%} kept"
            panel.plot([], [], color=colour, lw=5, alpha=0.45, label=kept)
        for bound in histogram["bounds"]:
            panel.axvline(bound, color="black", lw=1, ls=":")
        panel.set_yscale("log")
        low, high = panel.get_ylim()
        panel.set_ylim(low, high * (high / low) ** 0.2)  # room for the legend
        panel.set_title(
            {"grpo": "GRPO: every token its own", "gspo": "GSPO: one per sequence"}[kind], fontsize=9, loc="left"
        )
        panel.set_xlabel("weight of a token (dotted: 1 - clip_low, 1 + clip_high)")
        panel.set_ylabel("tokens")
        panel.legend(fontsize=8, frameon=False, loc="upper right")
    axes[0].set_xscale("log")
    plain = FuncFormatter(lambda x, _: f"{x:g}")
    axes[0].xaxis.set_major_formatter(plain)
    axes[0].set_xticks([t for t in (0.02, 0.1, 0.5, 1, 2, 10, 50) if _inside(t, numbers["grpo"]["edges"])])
    axes[0].minorticks_off()
    axes[1].xaxis.set_major_formatter(plain)
    save(figure, path)


def _inside(value: float, edges: list[float]) -> bool:
    return edges[0] <= value <= edges[-1]


DRAW: dict[str, Callable[[Record, Path], None]] = {
    "6.1": draw_equality,
    "6.2": draw_clip_fractions,
    "6.3": draw_ranges,
    "6.4": draw_precision,
    "6.7": draw_coefficients,
}
