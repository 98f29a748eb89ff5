"""Print the progress of a run: a bar per seed on a terminal, otherwise a line per evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import TrainConfig
from .distributed import rank
from .held_out import read_estimate, suffixes
from .report import Row

WARN_AFTER = 10  # consecutive steps in which no group has different rewards
SHOWN = {"reward": "training reward {:.3f}", "clip_fraction": "clip fraction {:.3f}"}
SHOWN |= {"tokens_per_second": "{:,.0f} tokens/s"}


def lacks_signal(row: Row) -> bool:
    """True if all answers to each prompt had the same reward in a step, so that every advantage was 0."""
    return row["groups_without_signal"] == 1


class TrainingProgress(Progress):
    """The printed progress of a run. Each bar shows one seed's latest reward, clip fraction and held-out reward."""

    def __init__(self, config: TrainConfig) -> None:
        console = Console(quiet=rank() > 0)
        self._config = config
        self._lines = not (console.is_interactive and console.file.isatty())
        bar = TextColumn("seed {task.fields[seed]}"), BarColumn(bar_width=None), MofNCompleteColumn()
        numbers = TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(elapsed_when_finished=True)
        super().__init__(*bar, *numbers, console=console, disable=self._lines)

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line immediately. If there is a bar, print above it."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def begin(self, seed: int, rows: Sequence[Row]) -> None:
        """Start a seed's bar, or continue it. `rows` has the metrics of all finished steps, beginning with step 0."""
        evaluated = [i for i, row in enumerate(rows) if "eval_reward" in row][-1]
        self._seed = seed
        self._held_out = rows[evaluated]["eval_reward"]
        self._rows: list[Row] = []  # since the last evaluation
        self._without_signal: list[Row] = []  # the latest consecutive steps for which `lacks_signal` is true
        self._has_signal = False  # in any step
        self._warned = False  # of steps without a signal
        for row in rows[1:]:
            self._see_signal(row)
            self._warned = self._warned or len(self._without_signal) >= WARN_AFTER
        done = rows[-1]["step"]
        self._bar = self.add_task("", total=self._config.steps, completed=done, seed=seed, numbers="")
        self._show_evaluation(rows[evaluated])
        self._rows += rows[evaluated + 1 :]

    def _see_signal(self, row: Row) -> None:
        self._without_signal = [*self._without_signal, row] if lacks_signal(row) else []
        self._has_signal = self._has_signal or not self._without_signal

    def show(self, row: Row) -> None:
        """Show that a step is done. `row` has the metrics of the step."""
        self._held_out = row.get("eval_reward", self._held_out)
        shares = f"reward {row['reward']:.2f}  clipped {row['clip_fraction']:.2f}  held out {self._held_out:.2f}"
        self.update(self._bar, advance=1, numbers=f"{shares}  {row['tokens_per_second']:,.0f} tokens/s")
        self._rows.append(row)
        if "eval_reward" in row:
            self._show_evaluation(row)
        self._see_signal(row)
        steps = len(self._without_signal)
        never = row["step"] == self._config.steps and not self._has_signal
        if (steps >= WARN_AFTER or never) and not self._warned:
            self._warned = True
            mean, cut = (fmean(row[name] for row in self._without_signal) for name in ("reward", "truncated"))
            self.say(
                f"WARNING: seed {self._seed} is learning nothing from its rewards. In {steps} consecutive steps, all "
                f"answers to each prompt had the same reward, {mean:.3g} on average, and {cut:.0%} of the answers were "
                "cut off at max_new_tokens. samples.jsonl has some answers.",
                style="bold red",
            )

    def _show_evaluation(self, row: Row) -> None:
        """Without a bar, print a line. Training numbers are means over the steps since the last evaluation."""
        place = f"seed {self._seed}  step {row['step']} of {self._config.steps}"
        means = [text.format(fmean(r[name] for r in self._rows)) for name, text in SHOWN.items() if self._rows]
        if self._lines:
            estimates = {suffix: read_estimate(row, "eval_reward", suffix) for suffix in suffixes(row)}
            held_out = [f"{suffix[1:] or 'held-out reward'} {x}" for suffix, x in estimates.items() if x is not None]
            self.say("  ".join([place, *held_out, *means]))
        self._rows = []
