"""Answers without a gradient, such as clipped ones: the layers of the model are not differentiated for them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from gspo_kernels.validation import Checks

from ..huggingface import base_model, skip_rows_without_gradient
from ..huggingface.row_checkpoint import RowCheckpoint, parallel_in_rows
from ..huggingface.rows import interaction_of_rows
from .logs import replace_method

OPTION = "skip_rows_without_gradient"


class LiveRows:
    """Leaves out rows of the trainer's model in the backward of its layers, wherever gradients stay the same."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.requested: bool | None = None
        self.description = ""  # for the line that the trainer prints
        self._checkpoint: RowCheckpoint | None = None
        self._is_announced = False
        log = trainer.log

        @functools.wraps(log)
        def log_with_share(*args: Any, **kwargs: Any) -> Any:
            if self._checkpoint is not None and trainer.model.training:
                counts = torch.tensor(self._checkpoint.take(), device=trainer.accelerator.device)
                live, rows = trainer.accelerator.reduce(counts, reduction="sum").tolist()
                if rows:
                    trainer._metrics["train"]["gspo/rows_differentiated"].append(live / rows)
                self._announce(rows)
            return log(*args, **kwargs)

        replace_method(trainer, "log", log_with_share)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the rows of forwards in this context as answers."""
        if self._checkpoint is None:
            yield
            return
        self._checkpoint.counts_rows = False
        try:
            yield
        finally:
            self._checkpoint.counts_rows = True

    def _announce(self, rows: int) -> None:
        """Print once why layers were differentiated for all rows of a log."""
        assert self._checkpoint is not None
        if self._checkpoint.fallbacks and not rows and not self._is_announced:
            self._is_announced = True
            if self.trainer.accelerator.is_main_process:
                reasons = ", ".join(sorted(self._checkpoint.fallbacks))
                print(f"gspo_kernels: {OPTION} has no effect: layers get {reasons}", flush=True)

    def decide(self) -> None:
        """Decide from the current settings of trainer and model, which callbacks may change."""
        reason = reason_against_skipping(self.trainer)
        is_on = self.requested is not False and reason is None
        if is_on and self._checkpoint is None:
            self._checkpoint = skip_rows_without_gradient(self.trainer.model)
        if self._checkpoint is not None:
            self._checkpoint.is_on = is_on
        why = f" ({reason})" if reason and self.requested is not False else ""
        self.description = f"{OPTION}={is_on}{why}"


def check_request(place: str, trainer: Any, requested: bool | None) -> None:
    """Check the option of `accelerate_trainer` or of the trainer's GSPOConfig.

    Args:
        place: the function or class that the user called, for messages.

    Raises:
        TypeError: the option is not a bool or None.
        ValueError: it is True, and rows cannot be left out. The message names the reason.
    """
    check = Checks(place)
    if requested is not None:
        check.boolean(OPTION, requested)
    if requested and (reason := reason_against_skipping(trainer)):
        check.fail(OPTION, f"None or False with {reason}", True)


def reason_against_skipping(trainer: Any) -> str | None:
    """Name what makes the gradients of a row depend on other rows, or keeps layers from being recomputed by rows."""
    args = trainer.args
    base = base_model(trainer.accelerator.unwrap_model(trainer.model))
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    reasons = {
        "gradient_checkpointing=False": not args.gradient_checkpointing,
        f"{type(base).__name__}, which has no gradient checkpointing": not base.supports_gradient_checkpointing,
        f"router_aux_loss_coef={args.router_aux_loss_coef}": trainer.aux_loss_enabled,
        "fp8": trainer.accelerator.mixed_precision == "fp8",  # the scale of a tensor depends on all rows
        "torch_compile=True": args.torch_compile,
        "context or sequence parallelism": any(getattr(parallel, f"{kind}_size", 1) > 1 for kind in ("cp", "sp")),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return reason or parallel_in_rows(base) or interaction_of_rows(base)
