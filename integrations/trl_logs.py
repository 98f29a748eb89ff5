"""What an accelerated trainer of TRL prints and logs, and what it does before each batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .backwards import BackwardMetrics, BackwardSettings, describe_backend


def print_settings(trainer: Any, head: object, settings: BackwardSettings) -> None:
    """Print backend, head and settings in one line, on the main process."""
    # By default, TRL shows no logger's INFO messages. Like Trainer's own logs, the line goes to stdout.
    if trainer.accelerator.is_main_process:
        backend = describe_backend("accelerate_trainer", trainer.accelerator.device)
        autocast = {"bf16": ", cast to bfloat16", "fp16": ", cast to float16"}.get(
            trainer.accelerator.mixed_precision, ""
        )
        print(f"gspo_kernels: {backend}; {head}{autocast}; {settings}", flush=True)


def log_backwards(trainer: Any) -> None:
    """Make the trainer log the metrics of the backwards of its training steps, but not with the logs of evaluations."""
    backwards, step, log = BackwardMetrics(), trainer.training_step, trainer.log

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        backwards.begin()
        loss = step(*args, **kwargs)
        backwards.collect()
        return loss

    @functools.wraps(log)
    def log_with_backwards(*args: Any, **kwargs: Any) -> Any:
        for name, values in backwards.take().items():
            trainer._metrics["train"][name].extend(values)  # the next log of training has their mean
        return log(*args, **kwargs)

    trainer.training_step, trainer.log = training_step, log_with_backwards


def call_before_each_batch(trainer: Any, function: Callable[[], None]) -> None:
    """Call `function` before the trainer prepares a batch, which includes scoring its completions."""
    prepare = trainer._prepare_inputs

    @functools.wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        function()
        return prepare(*args, **kwargs)

    trainer._prepare_inputs = prepare_inputs
