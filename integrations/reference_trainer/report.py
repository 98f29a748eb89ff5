"""The files of a run (metrics, samples, checkpoint, models, curves), and the table at its end."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import torch
from rich.table import Table

from gspo_kernels.extras import MissingExtraError, needs

from .checkpoints import write_checkpoint
from .config import InputError, TrainConfig
from .curves import plot_curves
from .distributed import rank, whole_weights
from .policy import Policy
from .resuming import RECORD
from .trackers import Trackers

Row = dict[str, Any]  # one line of metrics.jsonl


def lacks_signal(row: Row) -> bool:
    """True if all answers to each prompt had the same reward in a step, so that every advantage was 0."""
    return row["groups_without_signal"] == 1


def likely_cause(rows: list[Row]) -> str:
    """Return why, in these steps, all answers to each prompt probably had the same reward."""
    rewards = {row["reward"] for row in rows}
    cut = fmean(row["truncated"] for row in rows)
    failures = sum(row.get("reward_failures", 0) for row in rows)
    failed = f"{failures:,} calls of reward functions failed, of which the output above has one per step. "
    if all(row.get("unscored") == 1 for row in rows):
        return "Every reward function returned None for every answer."
    if rewards == {0.0}:
        return (failed if failures else "") + (
            "Every reward was 0. Likely causes: the reward expects another format than the model writes, the expected "
            f"answers are wrong, answers are cut off at max_new_tokens ({cut:.0%} of them were), or the task is too "
            "hard. samples.jsonl has some answers."
        )
    if rewards == {1.0}:
        return "Every reward was 1: the model already solves these prompts. Use harder ones."
    return (
        "Likely causes: the answers to a prompt do not differ (a low temperature, or a policy that has collapsed), "
        "or the reward does not distinguish them."
    )


@dataclass(frozen=True)
class SeedResult:
    """Summary of one seed's training."""

    seed: int
    start_reward: float  # on held-out prompts, before the first update
    end_reward: float  # on held-out prompts, in the last evaluation
    clip_fraction: float  # mean over the first half of the steps
    seconds: float
    no_signal: str = ""  # the likely cause, if no step had a group with different rewards

    @classmethod
    def from_rows(cls, seed: int, rows: list[Row]) -> SeedResult:
        """Summarize the metrics of one seed. `rows` has one entry per step, from step 0 on."""
        steps = rows[1:]
        clip_fraction = fmean(row["clip_fraction"] for row in steps[: (len(steps) + 1) // 2])
        no_signal = likely_cause(steps) if all(map(lacks_signal, steps)) else ""
        seconds = sum(row["seconds"] for row in steps)
        held_out = [row["eval_reward"] for row in rows if "eval_reward" in row]
        return cls(seed, held_out[0], held_out[-1], clip_fraction, seconds, no_signal)

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
        headings = ("seed", "start", "end", "rise", "clip fraction, first half", "seconds")
        table = Table(*headings, title="Held-out reward (greedy answers)")
        for column in table.columns:
            column.justify = "right"
        for x in self.results:
            rewards = f"{x.start_reward:.3f}", f"{x.end_reward:.3f}", f"{x.rise:+.3f}"
            table.add_row(str(x.seed), *rewards, f"{x.clip_fraction:.3f}", f"{x.seconds:.0f}")
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
    """The folder of a run. Each step's metrics are flushed, so a run that is stopped keeps its metrics.

    Of several processes, only the first writes.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = config.folder
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self._config = config
        self._writes = rank() == 0
        self._files: dict[str, IO[str]] = {}
        self._drawn = time.monotonic()
        self._trackers = Trackers(config)
        self.record: Row = {}  # what the run was started with, for config.json
        kept = config.resume or config.overwrite or not self._writes
        if not kept and self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(
                f"{self.path} exists already and is not empty: use resume=true to continue that run, overwrite=true to "
                "replace it, or name=NAME to write to another folder"
            )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._trackers.close()

    def open(self, sizes: dict[str, int] | None = None) -> None:
        """Make the folder and open its files. `write` does so when a run can start: a failed start destroys nothing.

        Args:
            sizes: the files' sizes at the checkpoint from which the run continues; what was written later is removed.
                None: an earlier run is removed.
        """
        if not self._writes:
            return
        options = json.dumps({**self._config.to_dict(), RECORD: self.record}, indent=1)
        partial = self.path / "config.json.partial"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if sizes is None:
                for path in map(self.path.joinpath, ("curves.png", "checkpoint.pt")):
                    path.unlink(missing_ok=True)
                for path in (*self.path.glob("model-seed*"), *self.path.glob("tensorboard")):
                    shutil.rmtree(path)
            for name in ("metrics.jsonl", "samples.jsonl"):
                file = self._files[name] = (self.path / name).open("a", encoding="utf-8")
                size = (sizes or {}).get(name, 0)
                if file.tell() < size:
                    raise InputError(f"resume: {file.name} is shorter than when the checkpoint was written")
                file.truncate(size)
            partial.write_text(options, encoding="utf-8")
            partial.replace(self.path / "config.json")
        except OSError as error:
            raise InputError(f"output: expected a folder to write to, got {self.path} ({error})") from error

    def write(self, seed: int, row: Row) -> None:
        """Append the metrics of one step of one seed."""
        if self._writes:
            if not self._files:
                self.open()
            self._append("metrics.jsonl", {"seed": seed, **row})
            self._trackers.write(seed, row)

    def write_samples(self, seed: int, step: int, samples: list[Row]) -> None:
        """Append completions with their rewards to samples.jsonl."""
        for sample in samples if self._writes else []:
            self._append("samples.jsonl", {"seed": seed, "step": step, **sample})

    def _append(self, name: str, record: Row) -> None:
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

    def rows_of(self, seed: int) -> list[Row]:
        """Return the metrics of a seed so far."""
        return [row for row in read_rows(self.metrics) if row["seed"] == seed]

    def save_model(self, policy: Policy, seed: int) -> Path:
        """Write the model of a seed and return the model's folder. The folder appears only when it is complete."""
        folder = self.path / f"model-seed{seed}"
        partial = folder.with_name(f"{folder.name}.partial")
        weights = whole_weights(policy)
        try:
            if self._writes:
                policy.save(partial, weights)
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
        finally:
            if self._writes:
                shutil.rmtree(partial, ignore_errors=True)
        return folder

    def save_checkpoint(self, state: Row) -> None:
        """Replace checkpoint.pt by a new state of the run."""
        if self._writes:
            sizes = {name: file.tell() for name, file in self._files.items()}
            write_checkpoint(self.checkpoint, {**state, "sizes": sizes})

    def save_failed(self, batch: Any) -> Path:
        """Write the batch of an update that is not finite, with torch.save."""
        path = self.path / f"failed_update-rank{rank()}.pt"
        torch.save(asdict(batch), path)
        return path

    def plot(self, every: float = 0.0) -> tuple[Path | None, str]:
        """Draw curves.png, unless it was drawn in the last `every` seconds. Return its path and "".

        Return None and the reason if there is no plot.
        """
        curves = self.path / "curves.png"
        if self._writes and time.monotonic() - self._drawn >= every:
            try:
                with needs("curves.png", "train", "matplotlib"):
                    plot_curves(read_rows(self.metrics), curves)
            except MissingExtraError as error:
                return None, str(error)
            self._drawn = time.monotonic()
        return curves, ""


def read_rows(metrics: Path) -> list[Row]:
    """Read a metrics.jsonl, one entry per line."""
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
