"""The table and the figure of `gspo compare`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Row = tuple[str, ...]
BLUE, VERMILION, SKY = "#0072B2", "#D55E00", "#56B4E9"  # of Okabe and Ito, whom color-blind readers can tell apart
COLORS = {"gspo": BLUE, "grpo": VERMILION, "gspo-token": SKY}
OTHER_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#595959", "#000000")
REPLAY = " + replay"
SAMPLER, TIS, MIS = " + sampler's log-probs", " + TIS", " + MIS"  # of the study "mismatch"
SHARES = ("router_changed", "token_clip_fraction", "clip_fraction")  # drawn in percent
DENSE_PANELS = {
    "token_clip_fraction": "tokens clipped, %",
    "clip_fraction": "sequences clipped, %",
    "ratio": "extreme ratios",
    "entropy": "entropy, nats per token",
}
MOE_PANELS = {
    "router_changed": "experts changed, %",
    "token_log_ratio_std": "std of token log-ratios",
    "token_clip_fraction": "tokens clipped, %",
    "sequence_log_ratio_std": "std of sequence log-ratios",
}


def label(arm: str) -> str:
    """An arm's name as papers write it."""
    name, plus, addition = arm.partition(" + ")
    return name.replace("gspo", "GSPO").replace("grpo", "GRPO") + plus + addition


def percent(share: float) -> str:
    """Format a share with two significant digits."""
    return f"{100 * share:.2g}%"


def estimate(record: Results, form: str = ".3f") -> str:
    """Format a mean and its 95 % interval: 0.812 (0.790 to 0.834)."""
    ends = record["95 %"]
    return f"{record['mean']:{form}}" + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")


def rows(results: Results) -> tuple[Row, list[Row]]:
    """The header and the rows of the table, one row per arm."""
    columns: dict[str, Callable[[Results], str]] = {
        "held-out reward at the end": lambda s: estimate(s["held-out reward at the end"]),
        "mean held-out reward": lambda s: estimate(s["mean held-out reward"]),
        "mean, against the first": lambda s: estimate(s["against first"], "+.3f"),
        "tokens clipped": lambda s: percent(s["token_clip_fraction"]),
    }
    last = results["settings"]["updates_per_rollout"] - 1  # updates before the last one of a rollout
    if results["study"] == "moe":
        columns |= {
            f"experts changed after 1 and {last} updates": lambda s: ", ".join(
                percent(s["by update"]["router_changed"][update]) for update in (1, last)
            ),
            "std of token log-ratios": lambda s: f"{s['by update']['token_log_ratio_std'][-1]:.2g}",
            "of sequence log-ratios": lambda s: f"{s['by update']['sequence_log_ratio_std'][-1]:.2g}",
        }
    elif results["study"] == "mismatch":
        columns |= {
            "sequences clipped in the first update": lambda s: percent(s["by update"]["clip_fraction"][0]),
            "in all updates": lambda s: percent(s["clip_fraction"]),
            "mean weight": lambda s: f"{s['rollout_weight_mean']:.4f}" if "rollout_weight_mean" in s else "-",
            "tokens outside the bounds": lambda s: (
                percent(s["rollout_bound_share"]) if "rollout_bound_share" in s else "-"
            ),
        }
    else:
        columns |= {
            "sequences clipped": lambda s: percent(s["clip_fraction"]),
            "entropy": lambda s: f"{s['entropy']:.2f}",
            "ratios": lambda s: f"{s['ratio_min']:.2g} to {s['ratio_max']:.2g}",
        }
    records = results["summary"].items()
    return ("", *columns), [(label(arm), *(cell(record) for cell in columns.values())) for arm, record in records]


def verdicts(studies: Sequence[Results]) -> dict[str, str]:
    """Say which claims about GSPO and GRPO (arXiv 2507.18071) hold; {} unless GSPO is the baseline of GRPO.

    `studies` are the results of the same arms with different learning rates and numbers of updates. Keys: "training"
    (section 5.1) and "clipping" (5.2), for a mixture of experts "mixture" (5.1) and "replay" (5.3).
    """
    arms = studies[0]["summary"]
    if next(iter(arms)) != "gspo" or "grpo" not in arms:
        return {}
    if studies[0]["study"] == "moe":
        return {"mixture": conclusion(studies, training), "replay": conclusion(studies, replay)}
    return {"training": conclusion(studies, training), "clipping": conclusion(studies, clipping)}


def conclusion(studies: Sequence[Results], claim: Callable[[Results], tuple[str, str]]) -> str:
    """Combine what `claim` returns for each study: what it shows, and the figures."""
    found = [claim(study["summary"]) for study in studies]
    if len(studies) == 1:
        return ". ".join(found[0])
    settings = [study["settings"] for study in studies]
    names = [f"learning rate {s['learning_rate']:g}, {s['updates_per_rollout']} updates" for s in settings]
    named = list(zip(names, found, strict=True))
    shown = {decision for decision, _ in found}
    if len(shown) == 1:
        return f"{shown.pop()}, in all settings. " + ". ".join(f"{figures} ({name})" for name, (_, figures) in named)
    return "depends on the setting. " + ". ".join(
        f"{name.capitalize()}: {decision}. {figures}" for name, (decision, figures) in named
    )


def training(arms: Results) -> tuple[str, str]:
    """GSPO trains more efficiently than GRPO."""
    difference = arms["grpo"]["against first"]
    decision = {-1: "seen, GSPO learns faster", 0: "not decided by these seeds", 1: "not seen, GRPO learns faster"}
    gspo, grpo = (estimate(arms[name]["mean held-out reward"]) for name in ("gspo", "grpo"))
    figures = f"Mean held-out reward over the training: {gspo} with GSPO, {grpo} with GRPO; "
    return decision[sign(difference)], figures + f"GRPO minus GSPO {estimate(difference, '+.3f')}"


def clipping(arms: Results) -> tuple[str, str]:
    """GSPO clips far more tokens than GRPO."""
    gspo, grpo = (arms[name]["token_clip_fraction"] for name in ("gspo", "grpo"))
    decision = "holds in direction at this size" if gspo > grpo else "not seen at this size"
    return decision, f"GSPO clips {percent(gspo)} of its tokens, GRPO {percent(grpo)} of its own"


def replay(arms: Results) -> tuple[str, str]:
    """GSPO needs no Routing Replay."""
    gspo, grpo = (arms[name + REPLAY]["replay"] for name in ("gspo", "grpo"))
    decision = "does not hold at this size" if sign(gspo) > 0 else "holds at this size"
    if sign(grpo) <= 0:
        decision += "; GRPO does not need it either"
    changes = [estimate(record, "+.3f") for record in (gspo, grpo)]
    return decision, f"Replay changes the mean held-out reward of GSPO by {changes[0]} and of GRPO by {changes[1]}"


def sign(record: Results) -> int:
    """1 or -1 if the 95 % interval lies above or below 0, else 0."""
    low, high = record["95 %"] or (0.0, 0.0)
    return int(low > 0) - int(high < 0)


def draw(results: Results, path: Path) -> None:
    """Draw held-out reward against rollouts, and four small panels. Bands reach from the lowest to the highest seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False}
    with rc_context(style):
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")  # inches
        small = MOE_PANELS if results["study"] == "moe" else DENSE_PANELS
        a, b, c, d = small
        axes = figure.subplot_mosaic([["reward", "reward", a, b], ["reward", "reward", c, d]])
        for panel in axes.values():
            panel.grid(lw=0.5, alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        draw_reward(axes["reward"], results)
        for name, title in small.items():
            (draw_by_update if results["study"] == "moe" else draw_curves)(axes[name], results, name)
            axes[name].set_title(title)
            scale(axes[name], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def scale(axes: Any, name: str) -> None:
    """Set the scale of the y axis: logarithmic for tokens clipped and for ratios, else linear from 0."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    unit = 100 if name in SHARES else 1
    if name in ("token_clip_fraction", "ratio"):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{unit * value:g}"))


def looks(results: Results) -> dict[str, dict[str, Any]]:
    """Color and line style by arm. All arms of an objective share a color."""
    objective = {arm: arm.partition(" + ")[0] for arm in results["runs"]}
    others = itertools.cycle(OTHER_COLORS)
    colors = {name: COLORS.get(name) or next(others) for name in dict.fromkeys(objective.values())}
    styles = {REPLAY: "--", SAMPLER: "--", TIS: "-.", MIS: ":"}
    plain = {name: "--" if name.endswith("-token") else "-" for name in colors}
    return {
        arm: {"color": colors[name], "ls": styles.get(arm.removeprefix(name), plain[name])}
        for arm, name in objective.items()
    }


def band(axes: Any, x: Sequence[float], curves: Sequence[Sequence[float]], look: dict[str, Any], **line: Any) -> None:
    """Draw the mean of the curves, and a band from the lowest to the highest."""
    points = list(zip(*curves, strict=True))
    axes.plot(x, [sum(p) / len(p) for p in points], lw=1.6, **look, **line)
    axes.fill_between(x, [min(p) for p in points], [max(p) for p in points], color=look["color"], alpha=0.13, lw=0)


def draw_reward(axes: Any, results: Results) -> None:
    settings = results["settings"]
    at = [*range(0, settings["steps"], settings["eval_every"]), settings["steps"]]
    for arm, look in looks(results).items():
        band(axes, at, [run["held-out reward"] for run in results["runs"][arm]], look, label=label(arm))
    seeds = len(next(iter(results["runs"].values())))
    model = f"{'mixture of experts' if results['study'] == 'moe' else 'dense model'}, {settings['task']}, {seeds} seeds"
    axes.set(title=f"held-out reward ({model})", xlabel="rollouts", ylim=(0, 1))
    axes.legend(loc="lower right")


def draw_curves(axes: Any, results: Results, name: str) -> None:
    """Draw a metric against rollouts; for "ratio" the smallest and the largest one."""
    for arm, look in looks(results).items():
        for key in ("ratio_min", "ratio_max") if name == "ratio" else (name,):
            curves = [run[key] for run in results["runs"][arm]]
            x = [results["settings"]["steps"] * (i + 0.5) / len(curves[0]) for i in range(len(curves[0]))]
            band(axes, x, curves, look)
    axes.set_xlabel("rollouts")


def draw_by_update(axes: Any, results: Results, name: str) -> None:
    """Draw a metric against the number of earlier updates on the same rollout, from 1."""
    for arm, look in looks(results).items():
        curves = [run["by update"][name][1:] for run in results["runs"][arm]]
        x = list(range(1, len(curves[0]) + 1))
        band(axes, x, curves, look, marker="o", ms=3)
        axes.set_xticks(x)
    axes.set_xlabel("earlier updates on the rollout")
