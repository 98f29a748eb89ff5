"""Print the progress of a run: a bar per seed on a terminal, otherwise a line per evaluation."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .config import TrainConfig
from .distributed import rank
from .report import Row, lacks_signal, likely_cause


class TrainingProgress:
    """The printed progress of a run. Each bar shows one seed's latest reward, clip fraction and held-out reward."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._console = Console(quiet=rank() > 0)
        self._lines = not (self._console.is_interactive and self._console.file.isatty())
        self._seed = 0
        self._bar: TaskID | None = None
        self._held_out = 0.0
        self._since_evaluation: list[Row] = []
        self._without_signal: list[Row] = []  # the latest consecutive steps for which `lacks_signal` is true
        self._warned = False
        self._progress = Progress(
            TextColumn("seed {task.fields[seed]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=self._lines,
        )

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line immediately. If there is a bar, print above it."""
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def start(self, seed: int, row: Row, step: int = 0) -> None:
        """Show that a seed begins, or continues after `step`. `row` has the metrics of the latest evaluation."""
        self._seed, self._held_out = seed, row["eval_reward"]
        self._since_evaluation, self._without_signal, self._warned = [], [], False
        numbers = self._numbers(0, 0, 0)
        self._bar = self._progress.add_task("", total=self._config.steps, completed=step, seed=seed, numbers=numbers)
        if self._lines:
            self.say(self._evaluation(row))

    def advance(self, row: Row) -> None:
        """Show that a step is done. `row` has the metrics of the step."""
        assert self._bar is not None
        self._held_out = row.get("eval_reward", self._held_out)
        numbers = self._numbers(row["reward"], row["clip_fraction"], row["tokens_per_second"])
        self._progress.update(self._bar, advance=1, numbers=numbers)
        self._since_evaluation.append(row)
        if "eval_reward" in row:
            if self._lines:
                self.say(self._evaluation(row))
            self._since_evaluation = []
        self._warn_without_signal(row)

    def _warn_without_signal(self, row: Row) -> None:
        """Warn once per seed after `warn_after` consecutive steps for which `lacks_signal` is true."""
        self._without_signal = [*self._without_signal, row] if lacks_signal(row) else []
        steps = len(self._without_signal)
        if steps < self._config.warn_after or self._warned:
            return
        self._warned = True
        self.say(
            f"WARNING: seed {self._seed} is learning nothing from its rewards. In {steps} consecutive steps, all "
            f"answers to each prompt had the same reward. {likely_cause(self._without_signal)}",
            style="bold red",
        )

    def _evaluation(self, row: Row) -> str:
        """Return the line of an evaluation. Training numbers are means over the steps since the last evaluation."""
        parts = [
            f"seed {self._seed}",
            f"step {row['step']} of {self._config.steps}",
            f"held-out reward {row['eval_reward']:.3f}",
        ]
        if steps := self._since_evaluation:
            reward, clipped, speed = (
                sum(step[name] for step in steps) / len(steps)
                for name in ("reward", "clip_fraction", "tokens_per_second")
            )
            parts += [f"training reward {reward:.3f}", f"clip fraction {clipped:.3f}", f"{speed:,.0f} tokens/s"]
        return "  ".join(parts)

    def _numbers(self, reward: float, clip_fraction: float, speed: float) -> str:
        shares = f"reward {reward:.2f}  clipped {clip_fraction:.2f}  held out {self._held_out:.2f}"
        return f"{shares}  {speed:,.0f} tokens/s"
