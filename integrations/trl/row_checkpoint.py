"""Skips the model's backward for answers without a gradient, such as clipped ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ..backwards import SKIP_ROWS, RowShare
from ..huggingface import base_model, skip_rows_without_gradient
from ..huggingface.row_checkpoint import RowCheckpoint, parallel_in_rows
from ..huggingface.rows import interaction_of_rows
from .config import check_wanted, wanted
from .logs import add_to_logs


class LiveRows:
    """Leaves out rows of the trainer's model in the backward of its layers, wherever gradients stay the same."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.requested: bool | None = None
        self.description = ""  # for the line that the trainer prints
        self._checkpoint: RowCheckpoint | None = None
        self._share: RowShare | None = None
        add_to_logs(trainer, lambda: {} if self._share is None else self._share.take())

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

    def decide(self, interaction: str | None) -> None:
        """Turn this on or off by the current settings of trainer and model, which callbacks may change.

        Args:
            interaction: `interaction_of_rows` of the model.
        """
        value = wanted(self.trainer, SKIP_ROWS, self.requested)
        reason = reason_against_skipping(self.trainer) or interaction
        is_on = value is not False and reason is None
        if is_on and self._checkpoint is None:
            self._install()
        if self._checkpoint is not None:
            self._checkpoint.is_on = is_on
        why = f" ({reason})" if reason and value is not False else ""
        self.description = f"{SKIP_ROWS}={is_on}{why}"

    def _install(self) -> None:
        accelerator = self.trainer.accelerator
        total = functools.partial(accelerator.reduce, reduction="sum")
        self._checkpoint = skip_rows_without_gradient(self.trainer.model)
        self._share = RowShare(self._checkpoint, total, accelerator.device, accelerator.is_main_process)


def check_rows(place: str, trainer: Any, requested: bool | None) -> None:
    """Check the option skip_rows_without_gradient: see `check_wanted`."""
    value = wanted(trainer, SKIP_ROWS, requested)
    check_wanted(
        place, SKIP_ROWS, value, lambda: reason_against_skipping(trainer) or interaction_of_rows(trainer.model)
    )


def reason_against_skipping(trainer: Any) -> str | None:
    """Name a setting that keeps layers from being recomputed by rows."""
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
    return reason or parallel_in_rows(base)
