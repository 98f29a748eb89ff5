"""The options of `gspo compare`, its files and its printed table."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from gspo_kernels.extras import needs

from .. import bench_table, measure
from . import compare_report

with needs("gspo compare", "train", "transformers", "tokenizers"):
    from gspo_kernels.integrations.reference_trainer.config import InputError

    from .compare import STUDIES, arms_of, compare, config_of, grid_of

CLAIMS = {
    "training": "GSPO trains more efficiently than GRPO",
    "mixture": "GSPO trains more efficiently than GRPO",
    "clipping": "GSPO clips far more tokens than GRPO",
    "replay": "GSPO needs no Routing Replay",
    "rounding": "Rounding changes rewards",
    "head": "The head's precision changes training",
    "windows": "GSPO clips far more tokens than GRPO",
    "clip_gap": "The gap between the clip fractions depends on the windows",
    "lengths": "Objectives change the length of answers",
}


class Defaults(NamedTuple):
    """Options that a study has if they are not set."""

    objectives: str = "gspo,grpo"
    task: str = "sorting"
    steps: int = 40
    learning_rates: str = "5e-4,1.5e-3,5e-3"
    updates: str = "4,8"


DEFAULTS = {
    "dense": Defaults(),
    "moe": Defaults(),
    "rounding": Defaults(learning_rates="1.5e-3", updates="4"),
    "long": Defaults("gspo,grpo,luspo", "long-sorting", 14, "5e-4", "4"),
}
Option = TypeVar("Option", int, str)
Number = TypeVar("Number", int, float)
FOLDER = Path("runs") / "compare"


def run(
    objectives: str | None,
    study: str,
    task: str | None,
    seeds: str,
    steps: int | None,
    learning_rates: str | None,
    updates: str | None,
    output: Path | None,
    console: Console,
) -> None:
    """Compare objectives. Print the table, and write results and figure.

    Raises:
        InputError: an option cannot be used.
    """
    if study not in STUDIES:
        raise InputError(f"--study: expected {', '.join(STUDIES)}, got {study!r}")
    of_study = DEFAULTS[study]
    steps = chosen(steps, of_study.steps)
    config = config_of(chosen(task, of_study.task), steps)
    arms = arms_of(chosen(objectives, of_study.objectives).split(","), study, config)
    rates = parse("--learning-rates", chosen(learning_rates, of_study.learning_rates), float, "5e-4,1e-3")
    numbers = parse("--updates", chosen(updates, of_study.updates), int, "4,8")
    grid = grid_of(config, rates, numbers)
    of_seeds = parse("--seeds", seeds, int, "0,1,2")
    if not 1 <= len(of_seeds) <= max(compare_report.STUDENT) or not all(0 <= seed < 2**32 for seed in of_seeds):
        raise InputError(
            f"--seeds: expected at most {max(compare_report.STUDENT)} numbers from 0 to 2**32 - 1, got {seeds!r}"
        )
    if study == "moe" and 1 in numbers:
        raise InputError("--updates: expected at least 2 with --study moe, which compares updates of a rollout, got 1")
    path = output or FOLDER / f"{'compare' if study == 'dense' else study}-cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the models are too small to gain from several threads
    with bench_table.progress(console, len(arms) * len(of_seeds) * len(grid) * steps) as tick:
        results = compare(arms, of_seeds, grid, study, tick)
    measure.save(path.stem.removesuffix("-cpu"), torch.device("cpu"), results, path)
    show(results, console)
    for claim, verdict in compare_report.verdicts(results).items():
        console.print(f"\n{CLAIMS[claim]}?", style="bold", markup=False, highlight=False)
        for sentence in verdict.split(". "):  # no number or abbreviation contains this
            line = sentence[0].upper() + sentence[1:]
            text = textwrap.fill(line, console.width, initial_indent="  - ", subsequent_indent="    ")
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(f"results: {path}", soft_wrap=True)
    with needs("the figure", "train", "matplotlib"):
        compare_report.draw(results, path.with_suffix(".png"))
    console.print(f"figure:  {path.with_suffix('.png')}", soft_wrap=True)


def chosen(value: Option | None, default: Option) -> Option:
    """`value`, or the study's default if the option is not set."""
    return default if value is None else value


def parse(option: str, text: str, kind: type[Number], example: str) -> list[Number]:
    """Parse "0,1,2" as [0, 1, 2]. Numbers must differ.

    Raises:
        InputError: the text of the option cannot be used.
    """
    expected = f"{option}: expected different numbers separated by commas, such as {example}, got {text!r}"
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(expected) from error
    if len({*numbers}) != len(numbers):
        raise InputError(expected)
    return numbers


def show(results: compare_report.Results, console: Console) -> None:
    """Print the table."""
    settings = results["settings"]
    header, rows = compare_report.rows(results)
    seeds = len({run["seed"] for records in results["runs"].values() for run in records})
    table = Table(title=f"{settings['task']}, {settings['steps']} rollouts, {seeds} seeds: means and 95 % intervals")
    for name in header:
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
