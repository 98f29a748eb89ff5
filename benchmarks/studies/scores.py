"""The definitions and the table of `gspo compare`. The definitions were written before the runs.

- A *setting* is a learning rate with a number of updates per rollout. All objectives have the same grid of settings.
- The *score* of a training is its mean held-out reward over all evaluations: the faster it learns, the higher. In the
  study "long", it is the mean reward of all sampled answers.
- The *last reward* of a training is the held-out reward of its last evaluation.
- An objective *at its own best setting*: each seed is judged at the setting with the highest mean score over the other
  seeds. So no training helps to choose the setting at which it is judged.
- *Over the grid*: for each seed, the mean score over all settings.
- A *difference* is taken seed by seed, with a 95 % interval (Student's t). An arm with an addition, such as
  "gspo + bf16", is compared with its objective's plain arm, and a plain arm with the first arm. A teacher alone counts
  as a plain arm.
- A training *collapsed* if its last held-out reward is less than half of its highest.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

Results = dict[str, Any]
Row = tuple[str, ...]
ROUNDED_SAMPLER = " + bf16 sampler"
SAMPLER = ROUNDED_SAMPLER + ", its log-probs"
TIS = ROUNDED_SAMPLER + ", TIS"
MIS = ROUNDED_SAMPLER + ", MIS"
FULL_LOGITS = ", full logits"
WINDOW = " + window x "
TEACHER = " + teacher x "
ALONE = "teacher alone"
# 97.5 % quantiles of Student's t, by number of seeds
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def about(values: Sequence[float]) -> Results:
    """The mean and its 95 % interval (Student's t). The interval is None for a single value."""
    mean = fmean(values)
    if len(values) not in STUDENT:
        return {"mean": mean, "95 %": None}
    half = STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "95 %": [mean - half, mean + half]}


def gap(values: Sequence[float], base: Sequence[float]) -> Results:
    """Mean of the differences seed by seed, and its 95 % interval."""
    return about([a - b for a, b in zip(values, base, strict=True)])


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


def chosen(runs: Sequence[Results]) -> str:
    """Name the settings at which an arm is judged, and for how many seeds if they differ."""
    counts = Counter((run["learning rate"], run["updates"]) for run in at_best(runs)).most_common()
    times = [f" ({count} seed{'s' * (count > 1)})" if len(counts) > 1 else "" for _, count in counts]
    return ", ".join(f"{rate:g} x {updates}{seeds}" for ((rate, updates), _), seeds in zip(counts, times, strict=True))


def mean_of(runs: Sequence[Results], metric: str, update: int | None = None) -> float:
    """Mean of a metric over the trainings, in one update of a rollout or (None) over all updates.

    Trainings that diverged in the first rollout are left out. NaN if all did.
    """
    values = [run["by update"][metric] for run in runs if run["by update"]]
    return fmean(fmean(x) if update is None else x[update] for x in values) if values else math.nan


def tokens_clipped(runs: Sequence[Results]) -> float:
    """Share of clipped tokens over all updates, at the own best setting."""
    return mean_of(at_best(runs), "token_clip_fraction")


def length(runs: Sequence[Results], part: int) -> float:
    """Mean answer length in tokens in one part of training, without the trainings that had diverged by then."""
    values = [run["over training"]["answer_tokens"][part] for run in runs]
    return fmean([x for x in values if x is not None and not math.isnan(x)] or [math.nan])


def plain(arm: str) -> str:
    """The name of an arm's objective, which is the name of the arm without any addition."""
    return arm.partition(" + ")[0]


def base(runs: Results, arm: str) -> str | None:
    """The arm that `arm` is compared with, or None."""
    first = next(iter(runs))
    of_arm = plain(arm) if plain(arm) != arm else first
    return of_arm if of_arm in runs and of_arm != arm else None


def difference(
    runs: Results, arm: str, of: Callable[[Sequence[Results]], list[float]], other: str | None = None
) -> str:
    """Format the difference of two arms' scores; "-" for an arm that is compared with none.

    `other`: the arm to compare with, instead of `base`.
    """
    other = other or base(runs, arm)
    return estimate(gap(of(runs[arm]), of(runs[other])), "+.3f") if other else "-"


def changes(runs: Results) -> list[Results]:
    """Difference of the score at the own best setting, for each arm with an addition."""
    pairs = [(arm, plain(arm)) for arm in runs if plain(arm) != arm]
    return [gap(best_scores(runs[arm]), best_scores(runs[other])) for arm, other in pairs]


def best_scores(runs: Sequence[Results]) -> list[float]:
    return scores(at_best(runs))


def last_rewards(runs: Sequence[Results]) -> list[float]:
    """For each seed, the last held-out reward at the arm's own best setting."""
    return [run["held-out reward"][-1] for run in at_best(runs)]


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


def rows(results: Results) -> tuple[Row, list[Row]]:
    """The header and the rows of the table, one row per arm."""
    runs = results["runs"]
    lines = []
    for arm, records in runs.items():
        best = at_best(records)
        cells = {
            "": label(arm),
            "best setting": chosen(records),
            "score": estimate(about(scores(best))),
            "difference": difference(runs, arm, best_scores),
            "over the grid": difference(runs, arm, over_grid) if len(by_setting(records)) > 1 else "-",
            "last reward": estimate(about(last_rewards(records))),
            "tokens clipped": percent(tokens_clipped(records)),
            "collapsed": f"{sum(map(collapsed, records))} of {len(records)}",
        }
        if "over training" in records[0]:
            cells["answer length"] = " to ".join(f"{length(records, part):.1f}" for part in (0, -1))
        lines.append(cells)
    return tuple(lines[0]), [tuple(cells.values()) for cells in lines]
