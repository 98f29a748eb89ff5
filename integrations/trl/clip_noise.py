"""A callback that logs which clip decisions rounding changes in a TRL training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from gspo_kernels import Objective
from gspo_kernels.validation import Checks, Unquoted

from ..huggingface import ClipNoise, LogProbsByPrecision, clip_noise, log_probs_by_precision
from .config import CLIPPING_LOSS_TYPES
from .zero_advantage import live_rows, loss_mask


class ClipNoiseCallback(TrainerCallback):
    """Log the share of clip decisions that a forward in fp32 would change (`clip_noise`).

        trainer.add_callback(ClipNoiseCallback(trainer, every=50))

    A few answers of each measured rollout's last mini-batch are scored twice: before the rollout's first update and
    before its last one. Each time they are scored in the trainer's precision and in fp32, without dropout, even if the
    model trains with it. The callback does not change a bit of the training. The logs get
    `gspo/clip_noise`, its parts `gspo/clip_noise_body` and `gspo/clip_noise_head`, and `gspo/clip_noise_log_ratio`, the
    error of log-ratios in nats. A single share is coarse: average over the training.

    Args:
        trainer: a GRPOTrainer with a text model, whose weights are neither sharded nor quantized.
        every: optimizer steps between measured rollouts; a rollout is measured at most once.
        answers: number of answers to measure, per process.

    Raises:
        TypeError, ValueError: an argument is invalid, the trainer's `loss_type` has a gradient outside the clip window,
            `Objective` refuses its `epsilon`, `epsilon_high` or `delta`, or its rollouts get a single update, where the
            ratio is always 1.
    """

    def __init__(self, trainer: GRPOTrainer, every: int = 50, answers: int = 8) -> None:
        check = Checks("ClipNoiseCallback")
        if not isinstance(trainer, GRPOTrainer):
            check.fail("trainer", "a GRPOTrainer", Unquoted(f"a {type(trainer).__name__}"), TypeError)
        for name, value in (("every", every), ("answers", answers)):
            check.number(name, value, "a whole number >= 1", lambda x: x >= 1 and x == int(x))
        if trainer.loss_type not in CLIPPING_LOSS_TYPES:
            check.fail("trainer.loss_type", f"one of {', '.join(CLIPPING_LOSS_TYPES)}", trainer.loss_type)
        self.trainer: Any = trainer
        self._objective()
        self.every, self.answers = int(every), int(answers)
        args: Any = trainer.args
        self._generate_every = args.steps_per_generation * trainer.num_iterations  # micro-batches per rollout
        if self._generate_every <= args.gradient_accumulation_steps:
            expected = "settings with several updates per rollout (steps_per_generation, num_iterations)"
            check.fail("trainer", expected, Unquoted("one update, where the ratio is always 1"))
        self._temperature = trainer.temperature  # TRL, too, reads it only when the trainer is made
        self._next_step = 0
        self._rollout: Any = None  # the buffer of the rollout whose first update has been seen
        self._batch: dict[str, Tensor] = {}
        self._before: LogProbsByPrecision | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure a rollout before its first and before its last update."""
        trainer = self.trainer
        if trainer._buffered_inputs is not self._rollout:
            self._rollout = trainer._buffered_inputs
            is_due = state.global_step >= self._next_step
            self._next_step = state.global_step + self.every if is_due else self._next_step
            self._batch = self._answers(self._rollout[-1]) if is_due else {}
            self._before = self._log_probs() if is_due else None
        elif self._before is not None and -trainer._step % self._generate_every < args.gradient_accumulation_steps:
            self._log(self._before, self._log_probs())
            self._before = None

    def _answers(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Take the first answers whose advantage is not 0, or the first answer if there are none."""
        if "pixel_values" in batch:
            Checks("ClipNoiseCallback").fail("trainer", "a training without images", Unquoted("pixel_values"))
        rows = live_rows(batch, self.trainer.loss_type).nonzero()[: self.answers, 0]
        rows = rows if len(rows) else rows.new_zeros(1)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
        return {name: batch[name][rows] for name in names if name in batch}

    def _log_probs(self) -> LogProbsByPrecision:
        """Log-probs of the completions [b, C]."""
        trainer, batch = self.trainer, self._batch
        ids, attended = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        mask = torch.cat([torch.zeros_like(batch["prompt_mask"]), loss_mask(batch)], 1)
        out = log_probs_by_precision(trainer.model, ids, attended, mask, temperature=self._temperature)
        return LogProbsByPrecision(*(x[:, batch["prompt_ids"].shape[1] - 1 :] for x in out))

    def _objective(self) -> Objective:
        """The ratio and the clip window of the trainer's present settings."""
        trainer = self.trainer
        window = (trainer.epsilon_low, trainer.epsilon_high)
        return Objective(trainer.importance_sampling_level, "clip", *window, delta=trainer.args.delta)

    def _log(self, before: LogProbsByPrecision, after: LogProbsByPrecision) -> None:
        trainer, batch = self.trainer, self._batch
        noise = clip_noise(before, after, batch["advantages"], loss_mask(batch), self._objective())
        sums = torch.tensor(noise, dtype=torch.float64, device=trainer.accelerator.device)
        total = ClipNoise(*trainer.accelerator.reduce(sums, reduction="sum").tolist())
        for name, value in total.metrics().items():
            trainer._metrics["train"][f"gspo/{name}"].append(value)
