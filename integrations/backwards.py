"""Shared by the TRL and verl adapters: settings of the head, and the metrics of its backward."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.backends.dispatch import backend_variable, pick_backend, triton_obstacle
from gspo_kernels.backends.workspace import cache_limit, check_cache
from gspo_kernels.inputs.head import HEAD_PRECISIONS
from gspo_kernels.metrics import combine, last_backward
from gspo_kernels.validation import Checks, TensorChecks

SKIP_ROWS = "skip_rows_without_gradient"  # the option of both adapters
METRICS = ("passes", "dropped_gradient_mass", "live_row_share")  # logged as gspo/passes, ...


class HeadSettings(NamedTuple):
    """Arguments of `linear_log_probs` that the integrations pass on."""

    gradient_budget: float = 0.0
    cache_mib: float | None = None
    head_precision: str | None = None

    def check(self, place: str) -> None:
        """Check the values.

        Raises:
            ValueError, TypeError: the message begins with `place`, the function or class that received the values.
        """
        Checks(place).budget(self.gradient_budget)
        check_cache(Checks(place), self.cache_mib)
        if self.head_precision is not None:
            Checks(place).choice("head_precision", self.head_precision, HEAD_PRECISIONS)

    def describe(self, device: torch.device) -> str:
        """Describe the settings in one line, with the largest default of `cache_mib` on `device` if it is not set."""
        mib = f"={cache_limit(Checks('cache_mib'), self.cache_mib, device) / 2**20:g}"
        if self.cache_mib is None and os.environ.get("GSPO_CACHE_MIB"):
            mib += " (GSPO_CACHE_MIB)"
        elif self.cache_mib is None:
            mib = f"{'<' if device.type == 'cuda' else ''}{mib} (default)"
        precision = "" if self.head_precision is None else f", head_precision={self.head_precision}"
        return f"gradient_budget={self.gradient_budget:g}, cache_mib{mib}{precision}"


class BackwardMetrics:
    """The metrics of each backward of `linear_log_probs` since the last `take`.

    Call `collect` between any two backwards. It does not synchronise with the GPU.
    """

    def __init__(self) -> None:
        self._latest = last_backward()
        self._backwards: list[dict[str, Tensor]] = []

    def begin(self) -> None:
        """Ignore all backwards before this call, for example from another model."""
        self._latest = last_backward()

    def collect(self) -> None:
        """Add the most recent backward, unless it was added before."""
        latest = last_backward()
        if latest is not self._latest:
            self._latest = latest
            self._backwards.append(latest)

    def take(self, group: Any = None) -> dict[str, float]:
        """Combine the metrics of all backwards, forget them, and return those that are logged; {} without a backward.

        This synchronises once. The result equals the metrics of one backward with all tokens: see `metrics.combine`,
        which also explains `group`.
        """
        if not self._backwards:
            return {}
        combined = combine(self._backwards, group)
        self._backwards = []
        values = torch.stack([combined[name] for name in METRICS]).tolist()
        return {f"gspo/{name}": value for name, value in zip(METRICS, values, strict=True)}


class RowShare:
    """The share of the rows with a gradient, which a model's RowCheckpoint has counted, over all ranks.

    Args:
        checkpoint: the RowCheckpoint.
        total: total(counts) sums an int64 tensor [2] over all ranks.
        device: the device of this tensor.
        announces: whether this rank prints a line if no row is ever left out.
    """

    def __init__(
        self, checkpoint: Any, total: Callable[[Tensor], Tensor], device: torch.device | int | str, announces: bool
    ) -> None:
        self.checkpoint = checkpoint
        self._total = total
        self._device = device
        self._announces = announces

    def take(self) -> dict[str, float]:
        """The metric of all backwards since the last call; {} without counted rows. All ranks must call this together.

        Prints once why layers were differentiated for all rows.
        """
        live, rows = self._total(torch.tensor(self.checkpoint.take(), device=self._device)).tolist()
        if rows:
            return {"gspo/rows_differentiated": live / rows}
        if self.checkpoint.fallbacks and self._announces:
            self._announces = False
            reasons = ", ".join(sorted(self.checkpoint.fallbacks))
            print(f"gspo_kernels: {SKIP_ROWS} has no effect: layers get {reasons}", flush=True)
        return {}


def describe_backend(place: str, device: torch.device, dtype: torch.dtype) -> str:
    """Name the backend for a head in `dtype` on `device` and, if it is PyTorch on an accelerator, say why.

    This may run the self-check of the kernels.
    """
    name = pick_backend(TensorChecks(place), "auto", device, dtype)
    why = ""
    if backend_variable() != "auto":
        why = " (GSPO_BACKEND)"
    elif name == "torch" and device.type != "cpu":
        why = f" ({triton_obstacle(device) or 'the self-check failed'})"
    return f"backend {name} on {device}{why}"
