"""Write the results of a run: metrics.jsonl during training, the models, and curves.png and a table at the end."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from .config import InputError, TrainConfig
from .policy import Policy

# Every line of metrics.jsonl has these keys. Their values are null at step 0, before the first rollout.
STEP_KEYS = (
    "reward",
    "groups_without_signal",
    "loss",
    "clip_fraction",
    "ratio_mean",
    "entropy",
    "dropped_gradient_mass",
    "passes",
    "tokens_per_second",
)
NO_MATPLOTLIB = (
    "curves.png was not drawn because matplotlib is missing: "
    "pip install 'gspo-kernels[train]', or '.[train]' in a clone"
)
Row = dict[str, Any]  # one line of metrics.jsonl


def lacks_signal(row: Row) -> bool:
    """Return whether all answers to each prompt had the same reward in a step, so that every advantage was 0."""
    return row["groups_without_signal"] == 1


def likely_cause(rows: list[Row]) -> str:
    """Return why, in these steps, all answers to each prompt probably had the same reward."""
    rewards = {row["reward"] for row in rows}
    if rewards == {0.0}:
        return (
            "Every reward was 0. Likely causes: the reward expects another format than the model writes, the expected "
            "answers are wrong, answers are cut off at --max-new-tokens, or the task is too hard."
        )
    if rewards == {1.0}:
        return "Every reward was 1: the model already solves these prompts. Use harder ones."
    return (
        "Likely causes: the answers to a prompt do not differ (a low --temperature, or a policy that has collapsed), "
        "or the reward does not distinguish them."
    )


@dataclass(frozen=True)
class SeedResult:
    """Summary of one seed's training."""

    seed: int
    start_reward: float  # on held-out prompts, before the first update
    end_reward: float  # on held-out prompts, after the last update
    clip_fraction: float  # mean over the first half of the steps
    seconds: float
    no_signal: str = ""  # the likely cause, if no step had a group with different rewards

    @classmethod
    def from_rows(cls, seed: int, rows: list[Row], seconds: float) -> SeedResult:
        """Summarise the metrics of one seed. `rows` has one entry per step, from step 0 on."""
        steps = rows[1:]
        first_half = steps[: (len(steps) + 1) // 2]
        clip_fraction = sum(row["clip_fraction"] for row in first_half) / len(first_half)
        no_signal = likely_cause(steps) if all(map(lacks_signal, steps)) else ""
        return cls(seed, rows[0]["eval_reward"], rows[-1]["eval_reward"], clip_fraction, seconds, no_signal)

    @property
    def rise(self) -> float:
        """Gain in held-out reward."""
        return self.end_reward - self.start_reward


@dataclass(frozen=True)
class RunReport:
    """Summary of a finished run."""

    results: list[SeedResult]
    folder: Path
    curves: Path | None  # None if there is no plot
    note: str  # the reason why there is no plot, or ""

    def table(self) -> Table:
        """Return a table with one line per seed."""
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

    def warnings(self) -> list[str]:
        """Return one line per seed that learned nothing from its rewards."""
        return [
            f"WARNING: seed {result.seed} learned nothing from its rewards. In every step, all answers to each prompt "
            f"had the same reward. {result.no_signal}"
            for result in self.results
            if result.no_signal
        ]


class RunFolder:
    """The folder of a run. Each step's metrics are flushed, so a run that is stopped keeps its metrics."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = config.folder
        self.metrics = self.path / "metrics.jsonl"
        self.latest_seed: int | None = None  # the seed whose metrics were written last
        self._file: IO[str] | None = None
        if not config.overwrite and self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(
                f"{self.path} exists already and is not empty: use --overwrite to replace that run, or --name to write "
                "to another folder"
            )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, seed: int, row: Row) -> None:
        """Append the metrics of one step of one seed. Metrics of STEP_KEYS that are missing are null."""
        file = self._file = self._file or self._open()
        file.write(json.dumps({"seed": seed, "step": row["step"], **dict.fromkeys(STEP_KEYS), **row}) + "\n")
        file.flush()
        self.latest_seed = seed

    def save_model(self, policy: Policy, seed: int) -> Path:
        """Write the model of a seed and return the model's folder. The folder appears only when it is complete."""
        folder = self.path / f"model-seed{seed}"
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            policy.save(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    def _open(self) -> IO[str]:
        """Make the folder, remove an earlier run, and open metrics.jsonl.

        Called by the first `write`, so a run that cannot start does not remove the earlier run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Remove the plot and the models of the earlier run, because they do not belong to the new metrics.
            (self.path / "curves.png").unlink(missing_ok=True)
            for model in self.path.glob("model-seed*"):
                shutil.rmtree(model)
            return self.metrics.open("w", encoding="utf-8")
        except OSError as error:
            raise InputError(f"output (--output): expected a folder to write to, got {self.path} ({error})") from error

    def plot(self) -> tuple[Path | None, str]:
        """Draw curves.png. Return its path and "", or None and the reason why there is no plot."""
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            return None, NO_MATPLOTLIB
        curves = self.path / "curves.png"
        plot_curves(read_rows(self.metrics), curves)
        return curves, ""


def read_rows(metrics: Path) -> list[Row]:
    """Read a metrics.jsonl, one entry per line."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


SMOOTHING = 10  # steps


def running_mean(values: list[float], width: int) -> list[float]:
    """Return the mean of each value and up to width - 1 values before it."""
    return [sum(window) / len(window) for window in (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))]


def plot_curves(rows: list[Row], path: Path) -> None:
    """Plot reward, clip fraction and entropy over the steps, one colour per seed."""
    from matplotlib.figure import Figure  # pyplot would open windows and has global state

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
