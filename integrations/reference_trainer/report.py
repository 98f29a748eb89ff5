"""What a run leaves behind: metrics.jsonl while it trains, curves.png and a table at the end."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from .config import InputError, TrainConfig

STEP_KEYS = (
    "reward",
    "loss",
    "clip_fraction",
    "ratio_mean",
    "entropy",
    "dropped_gradient_mass",
    "passes",
    "tokens_per_second",
)
NO_MATPLOTLIB = "curves.png was not drawn, as matplotlib is missing: pip install gspo-kernels[bench]"
Row = dict[str, Any]


@dataclass(frozen=True)
class SeedResult:
    """One seed's training in a few numbers."""

    seed: int
    start_reward: float  # held out, before the first update
    end_reward: float  # held out, after the last
    clip_fraction: float  # mean over the first half of the steps
    seconds: float

    @classmethod
    def from_rows(cls, seed: int, rows: list[Row], seconds: float) -> SeedResult:
        """From one seed's rows of metrics.jsonl, row 0 first."""
        steps = rows[1:]
        first_half = steps[: (len(steps) + 1) // 2]
        clip_fraction = sum(row["clip_fraction"] for row in first_half) / len(first_half)
        return cls(seed, rows[0]["eval_reward"], rows[-1]["eval_reward"], clip_fraction, seconds)

    @property
    def rise(self) -> float:
        """Gain in held-out reward."""
        return self.end_reward - self.start_reward


@dataclass(frozen=True)
class RunReport:
    """A finished run."""

    results: list[SeedResult]
    folder: Path
    curves: Path | None  # None where there is no plot
    note: str  # why there is no plot, or ""

    def table(self) -> Table:
        """One line per seed."""
        table = Table(title="Held-out reward (greedy answers)")
        for heading in ("seed", "start", "end", "rise", "clip fraction, first half", "seconds"):
            table.add_column(heading, justify="right")
        for result in self.results:
            table.add_row(
                str(result.seed),
                f"{result.start_reward:.3f}",
                f"{result.end_reward:.3f}",
                f"{result.rise:+.3f}",
                f"{result.clip_fraction:.3f}",
                f"{result.seconds:.0f}",
            )
        return table


class RunFolder:
    """The folder of a run. Every row reaches the disk at once, so a run that is stopped keeps what it measured."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = config.folder
        self.metrics = self.path / "metrics.jsonl"
        self._file: IO[str] | None = None
        if self.metrics.exists() and not config.overwrite:
            raise InputError(f"{self.path} holds an earlier run: give another --name, or --overwrite to replace it")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, seed: int, row: Row) -> None:
        """Append one step of one seed. What was not measured, as in row 0, is null."""
        file = self._file = self._file or self._open()
        file.write(json.dumps({"seed": seed, "step": row["step"], **dict.fromkeys(STEP_KEYS), **row}) + "\n")
        file.flush()

    def _open(self) -> IO[str]:
        # At the first row and not before: a run that cannot start must not cost the earlier one.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A plot or model of other numbers would be worse than none.
            (self.path / "curves.png").unlink(missing_ok=True)
            for model in self.path.glob("model-seed*"):
                shutil.rmtree(model)
            return self.metrics.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"output (--output): expected a folder to write to, got {self.path} ({error})") from error

    def plot(self) -> tuple[Path | None, str]:
        """Draw curves.png: its path and "", or None and the reason."""
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            return None, NO_MATPLOTLIB
        curves = self.path / "curves.png"
        plot_curves(read_rows(self.metrics), curves)
        return curves, ""


def read_rows(metrics: Path) -> list[Row]:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


SMOOTHING = 10  # steps


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and up to width - 1 before it."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))]


def plot_curves(rows: list[Row], path: Path) -> None:
    """Reward, clip fraction and entropy over the steps, one colour per seed."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    reward, clip, entropy = figure.subplots(1, 3)
    for index, seed in enumerate(dict.fromkeys(row["seed"] for row in rows)):
        steps = [row for row in rows if row["seed"] == seed and row["step"] > 0]
        evaluated = [row for row in rows if row["seed"] == seed and "eval_reward" in row]
        x = [row["step"] for row in steps]
        colour = f"C{index}"
        reward.plot(x, [row["reward"] for row in steps], color=colour, alpha=0.25, linewidth=0.8)
        reward.plot(
            [row["step"] for row in evaluated],
            [row["eval_reward"] for row in evaluated],
            color=colour,
            marker="o",
            markersize=3,
            label=f"seed {seed}",
        )
        clipped = [row["clip_fraction"] for row in steps]
        clip.plot(x, clipped, color=colour, alpha=0.25, linewidth=0.8)
        clip.plot(x, running_mean(clipped, SMOOTHING), color=colour, linewidth=1.2)
        entropy.plot(x, [row["entropy"] for row in steps], color=colour, linewidth=0.8)
    reward.set(title="reward", ylim=(0, 1.02), xlabel="step (dots: held out, greedy; faint: training, sampled)")
    reward.legend(loc="lower right")
    clip.set(title="share of answers clipped", ylim=(0, None), xlabel=f"step (mean of {SMOOTHING}; faint: each)")
    entropy.set(title="entropy per token (nats)", ylim=(0, None), xlabel="step")
    for axes in (reward, clip, entropy):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


class TrainingProgress:
    """One bar per seed, with the latest reward, clip fraction and held-out reward."""

    def __init__(self, config: TrainConfig) -> None:
        self._steps = config.steps
        self._bar: TaskID | None = None
        self._held_out = 0.0
        self._progress = Progress(
            TextColumn("seed {task.fields[seed]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, seed: int, row: Row) -> None:
        """A seed begins; `row` is its row 0."""
        self._held_out = row["eval_reward"]
        self._bar = self._progress.add_task("", total=self._steps, seed=seed, numbers=self._numbers(0, 0))

    def advance(self, row: Row) -> None:
        """A step is done."""
        assert self._bar is not None
        self._held_out = row.get("eval_reward", self._held_out)
        numbers = self._numbers(row["reward"], row["clip_fraction"])
        self._progress.update(self._bar, advance=1, numbers=numbers)

    def _numbers(self, reward: float, clip_fraction: float) -> str:
        return f"reward {reward:.2f}  clipped {clip_fraction:.2f}  held out {self._held_out:.2f}"
