"""The training loop: sample groups of answers, reward them, compute advantages and old log-probs, update, evaluate.

`Learner.prepare` goes from prompts to old log-probs, and `Learner.learn` takes the updates. `Rollout` in `sampling.py`
and `Batch` in `update.py` have the shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.advantages import RunningMoments

from ..tasks import Example, RewardBatch, Task, batches
from ..tasks.rewards import joined
from . import distributed
from .advantages import advantages_of
from .chat import encode
from .config import TrainConfig
from .data import Reward
from .held_out import (
    changes_between,
    check_failures,
    collect,
    defined_by,
    held_out_metrics,
    held_out_results,
    lines_of,
    rewards_by_prompt,
    sentence,
)
from .loading import pick_device, policy_of_seed, set_seed
from .measures import Update, numbers_of_step
from .optimizer import Optimizer
from .policy import PRINTABLE, ROUNDED, Policy
from .progress import TrainingProgress
from .report import HELD_OUT, Row, RunFolder, RunReport, SeedResult
from .resuming import continue_command, start_of
from .sampling import Rollout, fitting, padded, sampler_weights
from .stopping import StopSignals
from .update import Batch, TrainingError, mini_batches, update, with_log_probs
from .zero_advantage import live_rows, skipping

SAMPLES = 4  # answers that each evaluation writes to samples.jsonl
REDRAW = 30.0  # seconds between refreshes of curves.png


def train(config: TrainConfig, task: Task | None = None, reward: Reward | None = None) -> RunReport:
    """Train once per seed. Write metrics.jsonl, samples.jsonl, curves.png and the models to `config.folder`.

    On the CPU of one machine, the same seed and thread count always give the same numbers. Ctrl-C and SIGTERM save a
    checkpoint and, unless `config.save` is off, the current model; then they raise KeyboardInterrupt or
    SystemExit(143). Start this in each process of torchrun to train with several processes.

    Args:
        task: instead of `config.task` or `config.data`.
        reward: instead of the task's rewards and `config.reward`.

    Raises:
        InputError: an option, a file or the checkpoint cannot be used.
        TrainingError: a loss or a gradient is not finite; every call of a reward function failed in the rewards of a
            step or in the evaluation before the first step; or no reward applied to any answer in that evaluation.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with (
        distributed.processes(config),
        StopSignals(together=distributed.world() > 1) as stop,
        RunFolder(config) as folder,
        TrainingProgress(config) as progress,
    ):
        device = pick_device(config.device)
        task, folder.record, saved, notes = start_of(config, task, reward)
        for note in notes:
            progress.say(note)
        results = []
        for seed in config.seeds:
            if saved and config.seeds.index(saved["seed"]) > config.seeds.index(seed):
                results.append(SeedResult.from_rows(seed, folder.rows_of(seed, saved["sizes"]["metrics.jsonl"])))
                continue
            training = Training(config, seed, task, device, folder, progress, stop)
            results.append(training.run(saved if saved and saved["seed"] == seed else None))
        return RunReport(results, folder.path, *folder.plot())


@dataclass(frozen=True)
class Prepared:
    """A sampled rollout with everything that its updates need."""

    step: int  # from 1
    rollout: Rollout
    rewards: RewardBatch
    epochs: list[list[Tensor]]  # for each epoch the row numbers of each mini-batch
    running: RunningMoments  # moments of the rewards so far, this rollout included
    batch: Batch


class Learner:
    """Samples, updates and evaluates the policy of one seed. Writes no files."""

    def __init__(
        self, config: TrainConfig, seed: int, task: Task, policy: Policy, say: Callable[[str], object]
    ) -> None:
        self.config = config
        self.seed = seed
        self.policy = policy
        self.say = say
        self.task, left_out = fitting(config, policy, task)
        if left_out:
            say(f"max_prompt_tokens={config.max_prompt_tokens}: {left_out} prompts are left out")
        self.skipping = skipping(config, policy)
        self.optimizer = Optimizer(policy, config)
        self.running = RunningMoments()
        self.start: Row | None = None  # the rewards of the evaluation before the first step

    def seed_generators(self, step: int) -> None:
        """Seed the generators of Python, NumPy and torch, which rewards and modules may use, for a step."""
        set_seed(hash((self.seed, step, distributed.rank())) % 2**32)

    def prepare(self, step: int, examples: list[Example]) -> Prepared:
        """Sample the rollout of a step. Compute its rewards, advantages and old log-probs."""
        config = self.config
        self.seed_generators(step)
        # Random numbers and padding are the same for every number of processes, and so are the answers.
        seeds = distributed.share([(self.seed, step, place) for place in range(len(examples))])
        width = max(map(len, encode(self.policy, [example.prompt for example in examples])))
        options: dict[str, Any] = {"group_size": config.group_size, "temperature": config.temperature}
        options |= {"max_new_tokens": config.max_new_tokens, "seeds": seeds, "width": width}
        options["truncation"] = config.truncation
        with distributed.gathered(self.policy), sampler_weights(self.policy, config.sampler_precision):
            answers, rewards = collect(config, self.policy, self.task, distributed.share(examples), **options)
        rollout = padded(self.policy, distributed.gather_lists(answers))
        rewards = joined(distributed.gather(rewards))  # of all processes, so that all stop together
        check_failures(rewards, f"step {step}", self.say)
        epochs = mini_batches(config, self.seed, step)
        running = replace(self.running)  # if a signal comes before the updates, the last step's moments are saved
        batch = self.batch_of(rollout, rewards, epochs[0], running)
        return Prepared(step, rollout, rewards, epochs, running, batch)

    def batch_of(
        self, rollout: Rollout, rewards: RewardBatch, first_epoch: list[Tensor], running: RunningMoments
    ) -> Batch:
        """Compute advantages and old log-probs. Update the running moments of the rewards."""
        config = self.config
        if not self.skipping.is_on:
            batch = with_log_probs(config, self.policy, rollout, first_epoch)
            return replace(batch, advantages=advantages_of(config, batch, rewards, running))
        # Advantages come first, because they decide which answers run. They do not depend on log-probs here.
        advantages = advantages_of(config, Batch(rollout, rollout.log_probs, None), rewards, running)
        live, reuses_first = live_rows(advantages, rollout.answer_mask), self.skipping.reuses_first
        batch = with_log_probs(config, self.policy, rollout, first_epoch, live, reuses_first)
        return replace(batch, advantages=advantages)

    def learn(self, prepared: Prepared) -> tuple[Row, list[Update]]:
        """Update the policy with a rollout. Return the step's metrics, and each update's.

        Raises:
            NotFiniteError: the loss or the gradient of an update is not finite.
        """
        config, step, rewards, batch = self.config, prepared.step, prepared.rewards, prepared.batch
        self.running = prepared.running
        parts = [rows for epoch in prepared.epochs for rows in epoch]
        updates = []
        for i, rows in enumerate(parts):
            is_first = self.skipping.reuses_first and i == 0
            updates.append(update(config, self.policy, self.optimizer, batch, rows, is_first))
        row = {
            "step": step,
            **rewards.metrics(config.group_size),
            "truncated": prepared.rollout.truncated.float().mean().item(),
            **numbers_of_step(updates),
            "clip_fraction_first_update": updates[0].numbers["clip_fraction"],
            "learning_rate": config.learning_rate_at(self.optimizer.updates - 1),
            "answer_tokens": int(prepared.rollout.answer_mask.sum()) / config.rollout_size,
        }
        return row, updates

    def evaluate(self, step: int) -> tuple[Row, list[Row]]:
        """Reward greedy answers to held-out prompts. Return the metrics, and this process's first answers."""
        config = self.config
        greedy: dict[str, Any] = {"temperature": None, "max_new_tokens": config.max_new_tokens}
        held_out = distributed.share(self.task.held_out)
        rewards = [self.task.rewards([], [])]  # a process may have no prompts
        samples: list[Row] = []
        size = config.rollout_size // distributed.world()
        with distributed.gathered(self.policy):  # once, because processes may have different numbers of batches
            for start in range(0, len(held_out), size):
                answers, scored = collect(config, self.policy, self.task, held_out[start : start + size], **greedy)
                rewards.append(scored)
                samples += islice(lines_of(answers, scored), SAMPLES - len(samples))
        together = joined(distributed.gather(joined(rewards)))
        when = f"the evaluation {f'after step {step}' if step else 'before the first step'}"
        check_failures(together, when, self.say, allowed=step > 0)
        if not step and not any(together.scored):
            names = " and ".join(map(repr, together.components))
            raise TrainingError(
                f"no answer has a reward: {names} returned None for all {len(together.total)} answers in {when}"
            )
        now = rewards_by_prompt(together)
        metrics = {"eval_reward": together.mean, **held_out_metrics(now, self.start), "eval_rewards": now}
        return metrics, samples


class Training(Learner):
    """The training of one seed, with its files."""

    def __init__(
        self,
        config: TrainConfig,
        seed: int,
        task: Task,
        device: torch.device,
        folder: RunFolder,
        progress: TrainingProgress,
        stop: StopSignals,
    ) -> None:
        policy = policy_of_seed(config, seed, task.characters or PRINTABLE, device)
        super().__init__(config, seed, task, policy, progress.say)
        self.folder = folder
        self.progress = progress
        self.stop = stop
        folder.held_out = self.task.held_out
        self.step = 0  # rollouts that have been trained on
        self.rows: list[Row] = []
        self.updating = False  # between the first update of a step and the step's end

    def run(self, saved: dict[str, Any] | None) -> SeedResult:
        """Train from the beginning, or from a checkpoint. Save the model."""
        config = self.config
        if saved:
            self.restore(saved)
        prompts = islice(batches(self.task.train, config.prompts_per_step, self.seed), self.step, None)
        try:
            if not saved:
                self.begin()
            while self.step < config.steps:
                self.train_step(next(prompts))
            if config.save:
                self.folder.save_model(self.policy, self.seed)
        except (KeyboardInterrupt, SystemExit, TrainingError):
            try:
                self.save_stopped()
            finally:
                self.say_how_to_continue()
            raise
        return SeedResult.from_rows(self.seed, self.rows)

    def begin(self) -> None:
        """Print notes about the settings. Evaluate the policy before training, which is step 0."""
        say, config = self.progress.say, self.config
        self.seed_generators(0)
        say(self.skipping.description)
        if self.policy.rounds_merged:
            say(f"model: {ROUNDED}; with precision=fp32 or autocast, weights keep it")
        if config.updates_per_rollout * config.epochs == 1:
            say("updates_per_rollout=1: the importance ratio is always 1, and nothing is clipped")
        row = {"step": 0, **self.evaluate(0)[0], "eval_defined_by": defined_by(config, self.policy, self.task)}
        self.start = row["eval_rewards"]
        with self.stop.postponed():
            self.finish_step(row)
        if self.seed == config.seeds[0]:
            say(f"held out: {self.task.split or 'prompts from Python'}; written to {self.folder.path / HELD_OUT}")
        self.progress.begin(self.seed, [row])

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint: restore weights, optimizer and files."""
        rows = self.folder.rows_of(self.seed, saved["sizes"]["metrics.jsonl"])
        self.start = self.comparable(rows[0])
        self.optimizer.load(saved["optimizer"])
        self.running = RunningMoments(**saved["running"])
        self.folder.open(saved["sizes"])  # removes lines written after the checkpoint, so do this after all checks
        self.step = saved["step"]
        self.rows = rows
        self.progress.say(f"seed {self.seed}: continues after step {self.step}")
        self.progress.begin(self.seed, rows)

    def comparable(self, first: Row) -> Row | None:
        """Return the rewards of the evaluation before the first step, or None if what defines them has changed.

        Args:
            first: the metrics of that evaluation.
        """
        changed = changes_between(first["eval_defined_by"], defined_by(self.config, self.policy, self.task))
        if not changed:
            return first["eval_rewards"]
        say = "resume: held-out rewards from here on are not compared with those of step 0. Changed since then"
        self.progress.say(f"{say}: {changed}")
        return None

    def state(self) -> dict[str, Any]:
        """The state at the end of the last step, for `restore`. All processes must call this."""
        return {
            "seed": self.seed,
            "step": self.step,
            "optimizer": self.optimizer.state(),
            "running": dict(vars(self.running)),
        }

    def train_step(self, examples: list[Example]) -> None:
        """Sample one rollout, train on it, and write the step's metrics."""
        config = self.config
        started = time.perf_counter()
        prepared = self.prepare(self.step + 1, examples)
        step = prepared.step
        with self.stop.postponed():
            self.updating = True
            row, _ = self.learn(prepared)
            tokens = row["answer_tokens"] * config.rollout_size
            row["tokens_per_second"] = tokens / (time.perf_counter() - started)
            is_last = step == config.steps
            if step % config.eval_every == 0 or is_last:
                metrics, samples = self.evaluate(step)
                row |= metrics
                self.folder.write_samples(self.seed, step, samples)
            self.step = step
            self.finish_step({**row, "seconds": time.perf_counter() - started})
            self.updating = False
            every = config.checkpoint_every
            if every and (step % every == 0 or is_last):
                self.folder.save_checkpoint(self.state())
            if "eval_reward" in row:
                self.folder.plot(every=REDRAW)
        if distributed.world() > 1:
            self.stop.check(any(distributed.gather(self.stop.received is not None)))

    def finish_step(self, row: Row) -> None:
        """Write the metrics of a step."""
        self.folder.write(self.seed, row)
        self.rows.append(row)
        if row["step"]:
            self.progress.show(row)

    def save_stopped(self) -> None:
        """Save a run that was stopped at the end of a step or while sampling."""
        say = self.progress.say
        folder = self.folder
        if self.updating:
            say(f"stopped in the updates of step {self.step + 1} of seed {self.seed}, which are not saved")
        elif not self.rows:
            say(f"stopped before training seed {self.seed}")
        else:
            if self.stop.received is not None:
                say("stopping: saving a checkpoint; a second signal stops without saving")
            folder.save_checkpoint(self.state())
            if reason := folder.plot()[1]:
                say(reason)
            if self.config.save:
                say(f"model: {folder.save_model(self.policy, self.seed)}")
            if any("eval_change" in row for row in self.rows):
                say(f"seed {self.seed}: {sentence(held_out_results(self.rows))}")
            say(f"stopped after step {self.step} of seed {self.seed}; metrics: {folder.metrics}")

    def say_how_to_continue(self) -> None:
        """Print the command that continues the run, if it has a checkpoint."""
        say, folder = self.progress.say, self.folder
        if folder.checkpoint.is_file() and (self.rows or self.config.seeds[0] != self.seed):
            say(f"continue: {continue_command(folder.path, folder.record['from_python'])}")
