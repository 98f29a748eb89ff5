"""What an accelerated TRL trainer prints and logs, and how its methods are replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType

from gspo_kernels.inputs.lm_head import take_apart
from gspo_kernels.validation import dtype_name

from ..backwards import BackwardMetrics, HeadSettings, describe_backend
from ..huggingface.fused_head import FusedHead

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by the accelerator's mixed precision
_REPLACED = "_gspo_replaced"  # the attribute of a trainer that holds `method_before` of its replaced methods, by name


def print_settings(place: str, trainer: Any, head: FusedHead, settings: HeadSettings, skipping: str) -> None:
    """Print backend, head and settings in one line, on the main process. `place` begins the messages of errors."""
    # By default, TRL shows no logger's INFO messages. Like Trainer's own logs, the line goes to stdout.
    if trainer.accelerator.is_main_process:
        device = trainer.accelerator.device
        accelerator = trainer.accelerator
        # fp16=True does nothing on a CPU. With head_precision, autocast casts nothing, but DeepSpeed casts the weights.
        is_autocast = accelerator.native_amp and settings.head_precision is None
        casts = is_autocast or accelerator.distributed_type == DistributedType.DEEPSPEED
        autocast = _AUTOCAST.get(accelerator.mixed_precision) if casts else None
        dtype = autocast or take_apart(head.head).linear.weight.dtype
        backend = describe_backend(place, device, dtype)
        cast = f", cast to {dtype_name(dtype)}" if autocast else ""
        print(f"gspo_kernels: {backend}; {head}{cast}; {settings.describe(device)}; {skipping}", flush=True)


def log_backwards(trainer: Any) -> None:
    """Make the trainer log the metrics of the backwards of its training steps, but not with the logs of evaluations."""
    backwards = BackwardMetrics()
    step = trainer.training_step

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        backwards.begin()
        loss = step(*args, **kwargs)
        backwards.collect()
        return loss

    replace_method(trainer, "training_step", training_step)
    add_to_logs(trainer, backwards.take)


def add_to_logs(trainer: Any, take: Callable[[], dict[str, float]]) -> None:
    """Add the metrics that `take` returns to each log of training, but not to those of evaluations."""
    log = trainer.log

    @functools.wraps(log)
    def log_with_metrics(*args: Any, **kwargs: Any) -> Any:
        if trainer.model.training:  # TRL distinguishes the logs of training and evaluation in the same way
            for name, value in take().items():
                trainer._metrics["train"][name].append(value)  # TRL logs the mean of this single value
        return log(*args, **kwargs)

    replace_method(trainer, "log", log_with_metrics)


def replace_method(trainer: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of the instance. A method may be replaced several times."""
    vars(trainer).setdefault(_REPLACED, {}).setdefault(name, method_before(trainer, name))
    setattr(trainer, name, function)


def method_before(trainer: Any, name: str) -> Any:
    """The method as it was before `replace_method`: the instance's or, if it has none, the function of its class."""
    replaced = vars(trainer).get(_REPLACED, {})
    return replaced[name] if name in replaced else vars(trainer).get(name, getattr(type(trainer), name))
