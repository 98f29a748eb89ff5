"""The options of `gspo compare`, its files and its printed table."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gspo_kernels.extras import needs

from .. import bench_table, measure
from . import compare_report

with needs("gspo compare", "train", "transformers", "tokenizers"):
    from gspo_kernels.integrations.reference_trainer.config import InputError

    from .compare import arms_of, compare, config_of

CLAIMS = {
    "training": "GSPO trains more efficiently than GRPO",
    "mixture": "GSPO trains more efficiently than GRPO",
    "clipping": "GSPO clips far more tokens than GRPO",
    "replay": "GSPO needs no Routing Replay",
}
FOLDER = Path("runs") / "compare"


def run(
    objectives: str | None,
    study: str,
    task: str,
    seeds: str,
    steps: int,
    learning_rate: float,
    updates: int,
    output: Path | None,
    console: Console,
) -> None:
    """Compare objectives. Print the table, and write results and figure.

    Raises:
        InputError: an option cannot be used.
    """
    config = config_of(task, steps, learning_rate, updates)
    objectives = objectives or ("gspo,gspo-token,grpo" if study == "dense" else "gspo,grpo")
    arms = arms_of(objectives.split(","), study, config)
    numbers = parse_seeds(seeds)
    path = output or FOLDER / f"{'compare' if study == 'dense' else study}-cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the models are too small to gain from several threads
    with bench_table.progress(console, len(arms) * len(numbers) * steps) as tick:
        results = compare(arms, numbers, config, study, tick)
    measure.save(path.stem.removesuffix("-cpu"), torch.device("cpu"), results, path)
    show(results, console)
    for claim, verdict in compare_report.verdicts([results]).items():
        console.print(f"{CLAIMS[claim]}: {verdict}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"results: {path}", soft_wrap=True)
    with needs("the figure", "train", "matplotlib"):
        compare_report.draw(results, path.with_suffix(".png"))
    console.print(f"figure:  {path.with_suffix('.png')}", soft_wrap=True)


def parse_seeds(text: str) -> list[int]:
    """Parse "0,1,2" as [0, 1, 2]."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len({*map(int, parts)}) != len(parts):
        raise InputError(f"--seeds: expected different numbers separated by commas, such as 0,1,2, got {text!r}")
    return [int(part) for part in parts]


def show(results: compare_report.Results, console: Console) -> None:
    """Print the table."""
    settings = results["settings"]
    header, rows = compare_report.rows(results)
    seeds = len(next(iter(results["runs"].values())))
    table = Table(title=f"{settings['task']}, {settings['steps']} rollouts, {seeds} seeds: means and 95 % intervals")
    for name in header:
        table.add_column(name, justify="left" if name == "" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
