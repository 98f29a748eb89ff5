"""The files of a run (metrics, samples, checkpoint, models, curves), and the table at its end."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gspo_kernels.extras import MissingExtraError, needs

from ..tasks import Example
from .checkpoints import remove, replacing, write_checkpoint
from .config import InputError, TrainConfig
from .config_file import RECORD
from .curves import plot_curves
from .distributed import gather, rank, whole_weights
from .held_out import HeldOut, held_out_results, sentence
from .policy import Policy
from .trackers import Trackers

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

Row = dict[str, Any]  # one line of metrics.jsonl
HELD_OUT = "held_out.jsonl"  # the prompts of the evaluations


@dataclass(frozen=True)
class SeedResult:
    """Summary of one seed's training."""

    seed: int
    seconds: float
    held_out: tuple[HeldOut, ...] = ()  # the total, then each component if there are several

    @classmethod
    def from_rows(cls, seed: int, rows: list[Row]) -> SeedResult:
        """Summarize the metrics of one seed. `rows`: one per step, from step 0 on."""
        return cls(seed, sum(row["seconds"] for row in rows[1:]), held_out_results(rows))


@dataclass(frozen=True)
class RunReport:
    """Summary of a finished run."""

    results: list[SeedResult]
    folder: Path
    curves: Path | None  # None if there is no plot
    note: str  # the reason why there is no plot, or ""

    def table(self) -> Table:
        """A table with one line per seed and held-out reward."""
        headings = ("seed", "reward", "start", "end", "paired change", "prompts", "verdict")
        title = "Held-out rewards: greedy answers, with 95% bootstrap intervals over the prompts"
        table = Table(*headings, title=title)
        for result in self.results:
            for x in result.held_out:
                table.add_row(str(result.seed), *x.cells())
        return table

    def summary(self) -> list[str]:
        """One line per seed: whether the held-out reward rose, and the time."""
        return [f"seed {x.seed}: {sentence(x.held_out)}. {x.seconds:.0f} s" for x in self.results]


@contextmanager
def agreed() -> Iterator[None]:
    """Raise an InputError or OSError of any process in all processes, so that none waits for the others."""
    error = None
    try:
        yield
    except (InputError, OSError) as raised:
        error = raised
    for raised in gather(error):
        if raised is not None:
            raise raised


class RunFolder:
    """The folder of a run, for one run at a time. A run that is stopped keeps the metrics of all finished steps.

    Of several processes of a run, only the first writes.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.path = config.folder
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self._config = config
        self._writes = rank() == 0
        self._files: dict[str, io.FileIO] = {}
        self._is_open = False
        self._drawn = time.monotonic()
        self._trackers = Trackers(config)
        self.record: Row = {}  # the options and arguments that the run was started with, for config.json
        self.held_out: Sequence[Example] = ()  # the prompts of the evaluations, for held_out.jsonl
        with agreed():
            if self._writes and self.path.is_dir():
                self._check_unused()
                if self.metrics.is_file():
                    self._lock()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._trackers.close()

    def _check_unused(self) -> None:
        """Refuse a folder with files, unless the options say what to do with them."""
        if self._config.resume or self._config.overwrite:
            return
        if any(path != self.metrics or path.stat().st_size for path in self.path.iterdir()):
            raise InputError(
                f"{self.path} exists already and is not empty: use resume=true to continue that run, overwrite=true to "
                "replace it, or name=NAME to write to another folder"
            )

    def _lock(self) -> None:
        """Open metrics.jsonl, and hold a lock on it until it is closed or the process ends.

        The lock is on this file and not on the folder, because NFS shows other machines only locks of files.
        """
        file = self._files["metrics.jsonl"] = self._appending("metrics.jsonl")
        if fcntl is None:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self.path} is in use: another process trains in this folder") from error
        except OSError as error:
            warnings.warn(f"{self.metrics} cannot be locked, so another process may write to it: {error}", stacklevel=2)

    def _appending(self, name: str) -> io.FileIO:
        """Open a file without a buffer, which would keep what a full disk refuses, and write it on closing."""
        try:
            return (self.path / name).open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"output: expected a folder to write to, got {self.path} ({error})") from error

    def open(self, sizes: dict[str, int] | None = None) -> None:
        """Make the folder and open its files.

        `write` calls this only once the run can start, so that a failed start destroys nothing.

        Args:
            sizes: the files' sizes at the checkpoint from which the run continues. Lines written after it are removed.
                None: metrics and samples begin anew, and with `overwrite` an earlier run is removed.
        """
        with agreed():
            if self._writes:
                self._open(sizes)

    def _open(self, sizes: dict[str, int] | None) -> None:
        options = json.dumps({**self._config.to_dict(), RECORD: self.record}, indent=1)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output: expected a folder to write to, got {self.path} ({error})") from error
        if not self._files:
            self._lock()
            self._check_unused()  # another run may have used the folder since
        self._files["samples.jsonl"] = self._appending("samples.jsonl")
        kept = dict.fromkeys(self._files, 0) if sizes is None else sizes
        for name, size in self.sizes().items():
            if size < kept[name]:
                raise InputError(f"{self.path / name}: damaged: shorter than when the checkpoint was written")
        with replacing(self.path / "config.json") as partial:
            partial.write_text(options, encoding="utf-8")  # nothing is removed before the disk has taken it
            if self._config.overwrite:
                names = ("curves.png", "checkpoint.pt", "model-seed*", "tensorboard")
                for path in [path for name in names for path in self.path.glob(name)]:
                    remove(path)
            with replacing(self.path / HELD_OUT) as file:
                lines = (
                    json.dumps({"prompt": example.prompt, **example.row}, default=str) for example in self.held_out
                )
                file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            for name, file in self._files.items():
                file.truncate(kept[name])
        self._is_open = True

    def sizes(self) -> dict[str, int]:
        """Sizes of the open files. `tell` would be wrong after `truncate`, which does not move the position."""
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def write(self, seed: int, row: Row) -> None:
        """Append the metrics of one step of one seed."""
        with agreed():
            if self._writes:
                if not self._is_open:
                    self._open(None)
                self._append("metrics.jsonl", {"seed": seed, **row})
                self._trackers.write(seed, row)

    def write_samples(self, seed: int, step: int, samples: list[Row]) -> None:
        """Append completions with their rewards to samples.jsonl."""
        with agreed():
            for sample in samples if self._writes else []:
                self._append("samples.jsonl", {"seed": seed, "step": step, **sample})

    def _append(self, name: str, record: Row) -> None:
        """Append a line. If that fails, a part of it may be written, which `open` removes when the run is resumed."""
        line = memoryview((json.dumps(record) + "\n").encode())
        while line:
            line = line[self._files[name].write(line) :]

    def rows_of(self, seed: int, size: int | None = None) -> list[Row]:
        """Read the metrics of a seed from the first `size` bytes. Raise an InputError if a step is missing."""
        rows = [row for row in read_rows(self.metrics, size) if row["seed"] == seed]
        steps = [row["step"] for row in rows]
        if not steps or steps != list(range(len(steps))) or "eval_reward" not in rows[0]:
            raise InputError(f"{self.metrics}: damaged: expected a line for each step of seed {seed}, got {steps}")
        return rows

    def save_model(self, policy: Policy, seed: int) -> Path:
        """Save the model trained with `seed` and return its folder, which appears only once it is complete."""
        folder = self.path / f"model-seed{seed}"
        weights = whole_weights(policy)
        with agreed():
            if self._writes:
                with replacing(folder) as partial:
                    policy.save(partial, weights)
        return folder

    def save_checkpoint(self, state: Row) -> None:
        """Replace checkpoint.pt by a new state of the run."""
        with agreed():
            if self._writes:
                write_checkpoint(self.checkpoint, {**state, "sizes": self.sizes()})

    def plot(self, every: float = 0.0) -> tuple[Path | None, str]:
        """Draw curves.png, unless it was drawn in the last `every` seconds. Return its path and "".

        Without a plot, return None and the reason, because a run without plots is still worth finishing.
        """
        curves = self.path / "curves.png"
        if self._writes and time.monotonic() - self._drawn >= every:
            try:
                with needs("curves.png", "train", "matplotlib"), replacing(curves) as partial:
                    plot_curves(read_rows(self.metrics), partial)
            except MissingExtraError as error:
                return None, str(error)
            self._drawn = time.monotonic()
        return curves, ""


def model_of_run(folder: Path, seeds: Sequence[int], seed: int | None) -> Path:
    """The folder of the model that a run saved for a seed. None: the first seed.

    Raises:
        InputError: the run has no such seed, or no model of it.
    """
    seed = seeds[0] if seed is None else seed
    if seed not in seeds:
        raise InputError(f"seed: expected one of {folder}'s seeds {list(seeds)}, got {seed}")
    model = folder / f"model-seed{seed}"
    if not model.is_dir():
        raise InputError(
            f"{folder}: expected the model {model.name}, which the run has not written. "
            f"`gspo train --resume {folder} save=true` writes it at the end"
        )
    return model


def read_rows(metrics: Path, size: int | None = None) -> list[Row]:
    """Read a metrics.jsonl, or its first `size` bytes, one entry per line. Raise an InputError for a damaged file."""
    text = metrics.read_bytes() if metrics.is_file() else b""
    rows = []
    for number, line in enumerate(text[:size].splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{metrics}, line {number}: damaged: expected JSON, got {line[:60]!r}") from error
    return rows
