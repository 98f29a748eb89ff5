"""The definitions, tables, sentences and figures of `gspo compare`. The definitions were written before the runs.

- A *setting* is a learning rate with a number of updates per rollout. All objectives have the same grid of settings.
- The *score* of a training is its mean held-out reward over all evaluations: the faster it learns, the higher. In the
  study "long", it is the mean reward of all sampled answers.
- An objective *at its own best setting*: each seed is judged at the setting with the highest mean score over the other
  seeds. So no training helps to choose the setting at which it is judged.
- *Over the grid*: for each seed, the mean score over all settings.
- A training *collapsed* if its last held-out reward is less than half of its highest.
- The *time to reward* is the number of rollouts before the first evaluation with a held-out reward of `TARGET` or more.
- The sentence: an arm *learns faster* than another if the 95 % interval of the differences of their scores, seed by
  seed (Student's t), excludes 0. Otherwise it is *not decided*. This is said of the best settings and of the grid.
- *At equal clip fractions* (study "long"): of all pairs of a GSPO and a GRPO window, the pair whose shares of clipped
  tokens, over all updates, have the ratio closest to 1.
- An arm's answers *grow* or *shrink* if the 95 % interval of the change of their mean length, from the first quarter of
  the training to the last, excludes 0.
- *Full logits change* a score, a clip fraction or an entropy if the 95 % interval of the differences from our head,
  with the same objective, body and seeds, excludes 0.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

Results = dict[str, Any]
Row = tuple[str, ...]
Cells = dict[str, Callable[[str], str]]  # header -> function that formats the cell of an arm
TARGET = 0.3
BLUE, VERMILION, SKY = "#0072B2", "#D55E00", "#56B4E9"  # of Okabe and Ito, whom color-blind readers can tell apart
COLORS = {"gspo": BLUE, "grpo": VERMILION, "gspo-token": SKY}
OTHER_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#595959", "#000000")
REPLAY = " + replay"
ROUNDED_SAMPLER = " + bf16 sampler"
SAMPLER = ROUNDED_SAMPLER + ", its log-probs"
TIS = ROUNDED_SAMPLER + ", TIS"
MIS = ROUNDED_SAMPLER + ", MIS"
FULL_LOGITS = ", full logits"
WINDOW = " + window x "
MODELS = {"dense": "Dense model", "moe": "Mixture of experts"}  # by study
HEAD_MEASURES = ("score", "clip_fraction", "entropy")  # in which full logits are compared with our head
WINNER = {-1: "GSPO learns faster", 0: "it is not decided", 1: "GRPO learns faster"}  # by the sign of GRPO minus GSPO
# 97.5 % quantiles of Student's t, by number of seeds
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def about(values: Sequence[float]) -> Results:
    """The mean and its 95 % interval by Student's t. A single value has no interval: None."""
    mean = fmean(values)
    if len(values) not in STUDENT:
        return {"mean": mean, "95 %": None}
    half = STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "95 %": [mean - half, mean + half]}


def gap(values: Sequence[float], base: Sequence[float]) -> Results:
    """Mean of the differences seed by seed, and its 95 % interval."""
    return about([a - b for a, b in zip(values, base, strict=True)])


def sign(record: Results) -> int:
    """1 or -1 if the 95 % interval lies above or below 0, else 0."""
    low, high = record["95 %"] or (0.0, 0.0)
    return int(low > 0) - int(high < 0)


def means(curve: Sequence[float], parts: int) -> list[float]:
    """Means over consecutive parts of a curve, or the curve itself if it is short."""
    ends = [round(i * len(curve) / parts) for i in range(parts + 1)]
    return [fmean(curve[a:b]) for a, b in itertools.pairwise(ends) if b > a]


def score(run: Results) -> float:
    return fmean(run["over training"]["reward"] if "over training" in run else run["held-out reward"])


def scores(runs: Sequence[Results]) -> list[float]:
    return [score(run) for run in runs]


def collapsed(run: Results) -> bool:
    return run["held-out reward"][-1] < 0.5 * max(run["held-out reward"])


def by_setting(runs: Sequence[Results]) -> dict[tuple[float, int], list[Results]]:
    """Group the trainings of an arm by (learning rate, updates). Each group is in the order of the seeds."""
    grid: dict[tuple[float, int], list[Results]] = {}
    for run in runs:
        grid.setdefault((run["learning rate"], run["updates"]), []).append(run)
    return grid


def at_best(runs: Sequence[Results]) -> list[Results]:
    """For each seed, the training at the arm's own best setting. A single seed is judged where it is best itself."""
    grid = list(by_setting(runs).values())
    seeds = range(len(grid[0]))

    def of_others(group: Sequence[Results], seed: int) -> float:
        return fmean(score(run) for i, run in enumerate(group) if i != seed or len(group) == 1)

    return [max(grid, key=lambda group: of_others(group, seed))[seed] for seed in seeds]


def over_grid(runs: Sequence[Results]) -> list[float]:
    """For each seed, the mean score over all settings."""
    return [fmean(values) for values in zip(*map(scores, by_setting(runs).values()), strict=True)]


def rollouts_to_target(run: Results, settings: Results) -> float:
    """The time to reward; infinite if the training never reaches `TARGET`."""
    reached = [i for i, reward in enumerate(run["held-out reward"]) if reward >= TARGET]
    return min(reached[0] * settings["eval_every"], settings["steps"]) if reached else math.inf


def mean_of(runs: Sequence[Results], metric: str, update: int | None = None) -> float:
    """Mean of a metric over the trainings, in one update of a rollout or (None) over all updates.

    Trainings that diverged in the first rollout are left out. NaN if all did.
    """
    values = [run["by update"][metric] for run in runs if run["by update"]]
    return fmean(fmean(x) if update is None else x[update] for x in values) if values else math.nan


def label(arm: str) -> str:
    """An arm's name as papers write it."""
    name, plus, addition = arm.partition(" + ")
    for preset in ("gspo", "grpo", "luspo"):
        name = name.replace(preset, preset.upper())
    return name + plus + addition


def percent(share: float) -> str:
    """Format a share with two significant digits; "-" for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.2g}%"


def estimate(record: Results, form: str = ".3f") -> str:
    """Format a mean and its 95 % interval: 0.812 (0.790 to 0.834)."""
    ends = record["95 %"]
    return f"{record['mean']:{form}}" + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")


def chosen(runs: Sequence[Results]) -> str:
    """Name the settings at which an arm is judged, and for how many seeds if they differ."""
    counts = Counter((run["learning rate"], run["updates"]) for run in at_best(runs)).most_common()
    times = [f" ({count} seed{'s' * (count > 1)})" if len(counts) > 1 else "" for _, count in counts]
    return ", ".join(f"{rate:g} x {updates}{seeds}" for ((rate, updates), _), seeds in zip(counts, times, strict=True))


def rows(results: Results) -> tuple[Row, list[Row]]:
    """The header and the rows of the table, one row per arm."""
    runs = results["runs"]
    cells = {"rounding": rounding_cells, "long": long_cells}.get(results["study"], grid_cells)(results)
    return ("", *cells), [(label(arm), *(cell(arm) for cell in cells.values())) for arm in runs]


def grid_cells(results: Results) -> Cells:
    runs = results["runs"]
    best = {arm: at_best(records) for arm, records in runs.items()}
    first = next(iter(runs))

    def time(arm: str) -> str:
        times = [rollouts_to_target(run, results["settings"]) for run in best[arm]]
        reached = sum(map(math.isfinite, times))
        middle = median(times)
        return (f"{middle:g}" if math.isfinite(middle) else "-") + f" ({reached} of {len(times)})"

    def difference(of: Callable[[str], list[float]]) -> Callable[[str], str]:
        return lambda arm: "-" if arm == first else estimate(gap(of(arm), of(first)), "+.3f")

    cells: Cells = {
        "own best setting": lambda arm: chosen(runs[arm]),
        "score at its own best": lambda arm: estimate(about(scores(best[arm]))),
        f"minus {label(first)}'s": difference(lambda arm: scores(best[arm])),
        "score over the grid": lambda arm: estimate(about(over_grid(runs[arm]))),
        f"minus {label(first)}'s over the grid": difference(lambda arm: over_grid(runs[arm])),
        f"rollouts to {TARGET:g}": time,
        "collapsed": lambda arm: f"{sum(map(collapsed, runs[arm]))} of {len(runs[arm])}",
        "tokens clipped": lambda arm: percent(mean_of(best[arm], "token_clip_fraction")),
    }
    if results["study"] == "moe":
        cells |= {
            "experts changed after 1 update, and in the last": lambda arm: ", ".join(
                percent(mean_of(best[arm], "router_changed", update)) for update in (1, -1)
            ),
            "std of token, sequence log-ratios": lambda arm: ", ".join(
                f"{mean_of(best[arm], f'{unit}_log_ratio_std', -1):.2g}" for unit in ("token", "sequence")
            ),
        }
    return cells


def long_cells(results: Results) -> Cells:
    runs = results["runs"]

    def ends(metric: str, form: str) -> Callable[[str], str]:
        return lambda arm: " -> ".join(f"{course(runs[arm], metric)[end]:{form}}" for end in (0, -1))

    return {
        "score": lambda arm: estimate(about(scores(runs[arm]))),
        "reward": ends("reward", ".2f"),
        "answer length": ends("answer_tokens", ".1f"),
        "change of the length": lambda arm: estimate(growth(runs[arm]), "+.1f"),
        "truncated": lambda arm: percent(fmean(course(runs[arm], "truncated"))),
        "tokens clipped": lambda arm: percent(mean_of(runs[arm], "token_clip_fraction")),
        "std of token, sequence log-ratios": lambda arm: ", ".join(
            f"{mean_of(runs[arm], f'{unit}_log_ratio_std', -1):.2g}" for unit in ("token", "sequence")
        ),
        "entropy": lambda arm: f"{mean_of(runs[arm], 'entropy'):.2f}",
    }


def course(runs: Sequence[Results], metric: str) -> list[float]:
    """A metric over training: its mean over the trainings that did not diverge, for each part of a training."""
    curves = [[math.nan if x is None else x for x in run["over training"][metric]] for run in runs]
    return [fmean([x for x in values if not math.isnan(x)] or [math.nan]) for values in zip(*curves, strict=True)]


def growth(runs: Sequence[Results]) -> Results:
    """Change of the mean answer length in tokens, from the first part of a training to the last."""
    ends = [(run["over training"]["answer_tokens"][0], run["over training"]["answer_tokens"][-1]) for run in runs]
    return about([last - first for first, last in ends if last is not None and not math.isnan(last)])


def plain(arm: str) -> str:
    """The name of an arm's objective, which is the name of the arm without any addition."""
    return arm.partition(" + ")[0]


def changes(results: Results) -> dict[str, Results]:
    """For each arm with an addition, its score at its own best setting minus the plain arm's."""
    runs = results["runs"]
    of = {arm: scores(at_best(records)) for arm, records in runs.items()}
    return {arm: gap(values, of[plain(arm)]) for arm, values in of.items() if plain(arm) != arm}


def measure_of(run: Results, measure: str) -> float:
    """One of `HEAD_MEASURES` of a training."""
    return score(run) if measure == "score" else fmean(run["by update"][measure])


def head_changes(results: Results) -> dict[str, dict[str, Results]]:
    """Score, clip fraction and entropy of each arm with full logits, minus the same arm with our head."""
    runs = results["runs"]
    pairs = {arm: (records, runs[arm.removesuffix(FULL_LOGITS)]) for arm, records in runs.items()}
    return {
        arm: {name: gap(*([measure_of(run, name) for run in x] for x in pair)) for name in HEAD_MEASURES}
        for arm, pair in pairs.items()
        if arm.endswith(FULL_LOGITS)
    }


def rounding_cells(results: Results) -> Cells:
    best = {arm: at_best(records) for arm, records in results["runs"].items()}
    changed = changes(results)

    def of_correction(metric: str, form: Callable[[float], str]) -> Callable[[str], str]:
        return lambda arm: form(mean_of(best[arm], metric)) if metric in best[arm][0]["by update"] else "-"

    return {
        "score": lambda arm: estimate(about(scores(best[arm]))),
        "change of the score": lambda arm: estimate(changed[arm], "+.3f") if arm in changed else "-",
        "sequences clipped in the first update": lambda arm: percent(mean_of(best[arm], "clip_fraction", 0)),
        "in all updates": lambda arm: percent(mean_of(best[arm], "clip_fraction")),
        "entropy": lambda arm: f"{mean_of(best[arm], 'entropy'):.2f}",
        "mean weight": of_correction("rollout_weight_mean", "{:.4f}".format),
        "tokens outside the bounds": of_correction("rollout_bound_share", percent),
    }


def verdicts(results: Results) -> dict[str, str]:
    """Say what a study shows about the claims of GSPO's paper (arXiv 2507.18071).

    Keys: "training" (section 5.1) and "clipping" (5.2); for a mixture of experts "mixture" (5.1) and "replay" (5.3).
    These need GSPO as the baseline of GRPO. For the study of rounding, "rounding" (5.4) and "head". For long answers,
    "windows", "clip_gap" (5.2) and "lengths".
    """
    runs = results["runs"]
    if results["study"] == "rounding":
        ends = [record["95 %"] or (0.0, 0.0) for record in changes(results).values()]
        widest = max((high - low) / 2 for low, high in ends)
        missed = f". Changes below {widest:.3f} may be missed" if widest else ""
        return {"rounding": rounding(results) + missed, "head": head(results)}
    if next(iter(runs)) != "gspo" or "grpo" not in runs:
        return {}
    if results["study"] == "long":
        return {"windows": windows(runs), "clip_gap": clip_gap(runs), "lengths": lengths(runs)}
    if results["study"] == "moe":
        return {"mixture": training(runs), "replay": replay(results)}
    return {"training": training(runs), "clipping": clipping(runs)}


def winner(runs: Results) -> str:
    """Which learns faster, each objective at its own best setting, and over the grid. The two may disagree."""
    best, grid = (sign(record) for record in lead(runs))
    if best == grid == 0:
        return "it is not decided which learns faster, at the best settings or over the grid"
    if best == grid:
        return f"{WINNER[best]}, at the best settings and over the grid"
    return f"at the best settings, {WINNER[best]}; over the grid, {WINNER[grid]}"


def lead(runs: Results) -> tuple[Results, Results]:
    """GRPO's score minus GSPO's at each objective's own best setting, and over the grid."""
    gspo, grpo = runs["gspo"], runs["grpo"]
    return gap(scores(at_best(grpo)), scores(at_best(gspo))), gap(over_grid(grpo), over_grid(gspo))


def training(runs: Results) -> str:
    """GSPO trains more efficiently than GRPO."""
    best, grid = (estimate(record, "+.3f") for record in lead(runs))
    fell = [f"{sum(map(collapsed, runs[arm]))} of {len(runs[arm])}" for arm in ("gspo", "grpo")]
    return (
        f"{winner(runs)}. GRPO's mean held-out reward minus GSPO's is {best} at the best settings and {grid} over the "
        f"grid. {fell[0]} trainings collapsed with GSPO, {fell[1]} with GRPO{edges(runs)}"
    )


def edges(runs: Results) -> str:
    """Name the objectives whose best learning rate is the lowest or the highest of the grid."""
    named = ""
    for arm in ("gspo", "grpo"):
        grid = by_setting(runs[arm])
        rates = sorted({rate for rate, _ in grid})
        best, _ = max(grid, key=lambda at: fmean(scores(grid[at])))
        if len(rates) > 1 and best in (rates[0], rates[-1]):
            named += f". {label(arm)}'s best learning rate, {best:g}, is at the edge of the grid"
    return named


def clipping(runs: Results) -> str:
    """GSPO clips far more tokens than GRPO."""
    metric = "token_clip_fraction"
    best = {arm: mean_of(at_best(runs[arm]), metric) for arm in ("gspo", "grpo")}
    grid = {arm: [mean_of(group, metric) for group in by_setting(runs[arm]).values()] for arm in best}
    everywhere = min(grid["gspo"]) > max(grid["grpo"])
    holds = "holds in direction at this size, in all settings" if everywhere else "does not hold in all settings"
    shares = [f"{percent(best[arm])} ({percent(min(x))} to {percent(max(x))} over the grid)" for arm, x in grid.items()]
    return f"{holds}. GSPO clips {shares[0]} of its tokens, GRPO {shares[1]} of its own"


def of_objective(runs: Results, name: str) -> list[str]:
    """The arms of an objective: with the paper's window, and with others."""
    return [arm for arm in runs if plain(arm) == name]


def matched(runs: Results) -> tuple[str, str]:
    """The arms of GSPO and GRPO with equal clip fractions."""
    share = {arm: mean_of(records, "token_clip_fraction") for arm, records in runs.items()}
    pairs = itertools.product(of_objective(runs, "gspo"), of_objective(runs, "grpo"))
    return min(pairs, key=lambda pair: abs(math.log(max(share[pair[0]], 1e-9) / max(share[pair[1]], 1e-9))))


def faster(runs: Results, gspo: str, grpo: str) -> tuple[str, str]:
    """Say which of two arms learns faster, and estimate GRPO's score minus GSPO's."""
    record = gap(scores(runs[grpo]), scores(runs[gspo]))
    decided = sign(record)
    return WINNER[decided] + ("" if decided else " which learns faster"), estimate(record, "+.3f")


def windows(runs: Results) -> str:
    """GSPO clips far more tokens than GRPO, and what equal clip fractions change."""
    shares = {arm: percent(mean_of(records, "token_clip_fraction")) for arm, records in runs.items()}
    gspo, grpo = matched(runs)
    (decided, difference), (at_equal, difference_at_equal) = faster(runs, "gspo", "grpo"), faster(runs, gspo, grpo)
    return (
        f"With the paper's windows, GSPO clips {shares['gspo']} of its tokens and GRPO {shares['grpo']}, and "
        f"{decided}: GRPO's mean reward minus GSPO's is {difference}. At equal clip fractions, with {label(gspo)} "
        f"({shares[gspo]}) and {label(grpo)} ({shares[grpo]}), {at_equal}: the difference is {difference_at_equal}"
    )


def clip_gap(runs: Results) -> str:
    """The gap between the clip fractions depends on the windows."""
    shares = [[mean_of(runs[arm], "token_clip_fraction") for arm in pair] for pair in (("gspo", "grpo"), matched(runs))]
    ratios = [f"{gspo / grpo:.2g}" if grpo else "infinite" for gspo, grpo in shares]
    return (
        f"GSPO's share divided by GRPO's is {ratios[0]} with the paper's windows, and {ratios[1]} at the closest others"
    )


def lengths(runs: Results) -> str:
    """Whether answers grow or shrink with the paper's windows."""
    verb = {-1: "shrink", 0: "show no decided change of length", 1: "grow"}
    changed = {arm: growth(records) for arm, records in runs.items() if arm == plain(arm)}
    parts = [f"with {label(arm)}, answers {verb[sign(x)]} ({estimate(x, '+.1f')} tokens)" for arm, x in changed.items()]
    return "; ".join(parts)


def replay(results: Results) -> str:
    """GSPO needs no Routing Replay."""
    gspo, grpo = (changes(results)[name + REPLAY] for name in ("gspo", "grpo"))
    effect = {-1: "slows down", 0: "has no decided effect on", 1: "speeds up"}
    figures = [estimate(record, "+.3f") for record in (gspo, grpo)]
    both = (
        f"GSPO, and {effect[sign(grpo)]} GRPO"
        if sign(gspo) != sign(grpo)
        else "GSPO or GRPO"
        if not sign(gspo)
        else "GSPO and GRPO"
    )
    return (
        f"Replay {effect[sign(gspo)]} {both}. It changes the mean held-out reward of "
        f"GSPO by {figures[0]} and of GRPO by {figures[1]}"
    )


def rounding(results: Results) -> str:
    """Rounding changes rewards."""
    every = changes(results)
    different = [label(arm) for arm, record in every.items() if sign(record)]
    if not different:
        return "No rounding has a decided effect on the mean held-out reward"
    return (
        f"The mean held-out reward differs from fp32's with {', '.join(different)}: "
        f"{excluding(len(different), len(every))}"
    )


def excluding(decided: int, count: int) -> str:
    return f"{decided} of {count} intervals exclude 0, and by chance {0.05 * count:.1f} would"


def head(results: Results, with_sizes: bool = True) -> str:
    """Full logits in the dtype of the body change training."""
    every = head_changes(results)
    changed = {}
    for arm, records in every.items():
        sizes = [f"{name.replace('_', ' ')} {estimate(x, '+.3f')}" for name, x in records.items() if sign(x)]
        if sizes:
            changed[label(arm.removesuffix(FULL_LOGITS))] = sizes
    if not changed:
        return "Full logits instead of our head have no decided effect on score, clip fraction or entropy"
    start = "Full logits instead of our head change training with "
    if not with_sizes:
        return start + ", ".join(changed)
    count, decided = len(every) * len(HEAD_MEASURES), sum(map(len, changed.values()))
    listed = "; ".join(f"{arm}: {', '.join(sizes)}" for arm, sizes in changed.items())
    return f"{start}{listed}. {excluding(decided, count).capitalize()}"


def title(results: Results) -> str:
    """What a figure shows, in a sentence: who learns faster, or what rounding changes."""
    if results["study"] == "rounding":
        return f"{rounding(results)}.\n{head(results, with_sizes=False)}".replace(": ", ":\n")
    if results["study"] == "long":
        runs = results["runs"]
        if not verdicts(results):
            return "Long answers"
        shares = [percent(mean_of(runs[arm], "token_clip_fraction")) for arm in ("gspo", "grpo")]
        at_equal, _ = faster(runs, *matched(runs))
        return f"GSPO clips {shares[0]} of the tokens of long answers, GRPO {shares[1]}.\nAt equal shares, {at_equal}"
    model = MODELS[results["study"]]
    return f"{model}: {winner(results['runs'])}" if verdicts(results) else model


def draw(results: Results, path: Path) -> None:
    """Draw the figure of a study: the scores of all settings, with the reward curves at each arm's best setting.

    The figure of the study of rounding shows how much each rounding changes the score.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {"font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "legend.frameon": False}
    with rc_context(style):
        height = 5.4 if results["study"] in ("rounding", "long") else 3.9
        figure = Figure(figsize=(9.0, height), layout="constrained")  # inches
        if results["study"] == "rounding":
            draw_changes(figure.subplots(), results)
        elif results["study"] == "long":
            draw_long(figure.subplots(2, 3), results)
        else:
            names = list(results["runs"])
            columns = 2 if len(names) > 1 else 1
            lines = [names[i : i + columns] for i in range(0, len(names), columns)]
            lines[-1] += ["."] * (columns - len(lines[-1]))
            axes = figure.subplot_mosaic([[*line, "curves", "curves"] for line in lines])
            draw_grids(axes, results)
            draw_curves(axes["curves"], results)
            figure.supylabel("mean held-out reward, by learning rate and updates", fontsize=9)
        lines = [part for line in title(results).splitlines() for part in textwrap.wrap(line, 100)]
        figure.suptitle("\n".join(lines), fontsize=11, weight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def draw_grids(axes: Any, results: Results) -> None:
    """Draw a heat map for each arm: mean scores by learning rate and updates, and how many trainings collapsed."""
    grids = {arm: by_setting(records) for arm, records in results["runs"].items()}
    means = {arm: {at: fmean(scores(group)) for at, group in grid.items()} for arm, grid in grids.items()}
    every = [value for grid in means.values() for value in grid.values()]
    for arm, grid in grids.items():
        panel = axes[arm]
        rates, updates = [*dict.fromkeys(rate for rate, _ in grid)], [*dict.fromkeys(number for _, number in grid)]
        values = [[means[arm][rate, number] for number in updates] for rate in rates]
        panel.imshow(values, cmap="cividis", vmin=min(every), vmax=max(every), aspect="auto", origin="lower")
        best = max(means[arm], key=means[arm].__getitem__)
        for y, rate in enumerate(rates):
            for x, number in enumerate(updates):
                mean, fell = means[arm][rate, number], sum(map(collapsed, grid[rate, number]))
                text = f"{mean:.3f}" + (f"\n{fell} collapsed" if fell else "")
                color = "black" if mean > fmean([min(every), max(every)]) else "white"
                weight = "bold" if (rate, number) == best else "normal"
                panel.text(x, y, text, color=color, weight=weight, ha="center", va="center")
        panel.set_xticks(range(len(updates)), [f"{number} updates" for number in updates])
        panel.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        panel.tick_params(length=0)
        panel.set_title(label(arm))


def looks(results: Results) -> dict[str, dict[str, Any]]:
    """Color and line style by arm. All arms of an objective share a color."""
    objectives = dict.fromkeys(map(plain, results["runs"]))
    others = iter(OTHER_COLORS * len(objectives))
    colors = {name: COLORS.get(name) or next(others) for name in objectives}
    return {arm: {"color": colors[plain(arm)], "ls": "-" if arm in objectives else "--"} for arm in results["runs"]}


def draw_curves(axes: Any, results: Results) -> None:
    """Draw the mean held-out reward over the seeds against rollouts, for each arm at its own best setting."""
    settings = results["settings"]
    at = [*range(0, settings["steps"], settings["eval_every"]), settings["steps"]]
    for arm, look in looks(results).items():
        best = [run["held-out reward"] for run in at_best(results["runs"][arm])]
        axes.plot(at, [fmean(values) for values in zip(*best, strict=True)], lw=1.6, label=label(arm), **look)
    axes.axhline(TARGET, color="#999999", lw=0.8, ls=":")
    axes.grid(lw=0.5, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(title="held-out reward, each at its own best setting", xlabel="rollouts")
    axes.set_ylim(0, None)
    axes.legend(loc="lower right")


def draw_long(axes: Any, results: Results) -> None:
    """Draw what happens over training with the paper's windows, and the scores of all windows by clip fraction."""
    runs, settings = results["runs"], results["settings"]
    look = looks(results)
    parts = len(next(iter(runs.values()))[0]["over training"]["reward"])
    middles = [(i + 0.5) * settings["steps"] / parts for i in range(parts)]
    panels = {
        "reward": "reward of sampled answers",
        "answer_tokens": "answer length, tokens",
        "token_clip_fraction": "share of tokens clipped",
        "token_log_ratio_std": "std of log-ratios: tokens,\nsequences (dotted)",
    }
    for panel, (metric, text) in zip(axes.flat, panels.items(), strict=False):
        for arm in filter(lambda arm: arm == plain(arm), runs):
            style = look[arm] | {"lw": 1.6}
            panel.plot(middles, course(runs[arm], metric), label=label(arm), **style)
            if metric == "token_log_ratio_std":
                panel.plot(middles, course(runs[arm], "sequence_log_ratio_std"), **(style | {"ls": ":"}))
        panel.set(title=text, xlabel="rollouts")
        if "reward" not in metric and metric != "answer_tokens":
            panel.set_yscale("log")
    last, legend = axes.flat[4:]
    for name in ("gspo", "grpo"):
        arms = sorted(of_objective(runs, name), key=lambda arm: mean_of(runs[arm], "token_clip_fraction"))
        shares = [max(mean_of(runs[arm], "token_clip_fraction"), 1e-5) for arm in arms]
        records = [about(scores(runs[arm])) for arm in arms]
        last.plot(shares, [record["mean"] for record in records], color=look[name]["color"], marker="o", ms=4, lw=1.2)
        for share, record in zip(shares, records, strict=True):
            last.plot([share, share], record["95 %"] or [record["mean"]] * 2, color=look[name]["color"], lw=1)
    last.set(title="score, by tokens clipped (all windows)", xlabel="share of tokens clipped", xscale="log")
    legend.axis("off")
    legend.legend(*axes.flat[0].get_legend_handles_labels(), loc="center left", title="windows of the paper")
    for panel in axes.flat[:5]:
        panel.grid(lw=0.5, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)


def draw_changes(axes: Any, results: Results) -> None:
    """Draw the change of the score by each rounding, with its 95 % interval."""
    changed = changes(results)
    color = {arm: look["color"] for arm, look in looks(results).items()}
    for y, (arm, record) in enumerate(changed.items()):
        low, high = record["95 %"] or (record["mean"], record["mean"])
        axes.plot([low, high], [y, y], color=color[arm], lw=2)
        axes.plot(record["mean"], y, "o", color=color[arm], ms=5)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(changed)), map(label, changed))
    axes.invert_yaxis()
    axes.grid(lw=0.5, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("change of the mean held-out reward against fp32, with 95% intervals over the seeds")
