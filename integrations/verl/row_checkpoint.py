"""Answers without a gradient, such as clipped ones: the layers of the model are not differentiated for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from verl.utils.device import get_device_id  # pyright: ignore[reportMissingImports]

from ..huggingface import RowCheckpoint, base_model
from .config import SKIP_ROWS
from .zero_advantage import interaction_in_model


def reason_against_skipping(engine: Any, module: nn.Module) -> str | None:
    """Name what makes the gradients of a row depend on other rows, or keeps layers from being recomputed by rows.

    Args:
        engine: verl's FSDP engine.
        module: its model, not yet sharded.
    """
    config = engine.model_config
    sequence_parallel = engine.engine_config.ulysses_sequence_parallel_size
    reasons = {
        "model.enable_gradient_checkpointing=False": not config.enable_gradient_checkpointing,
        "model.enable_activation_offload=True": config.enable_activation_offload,  # verl then uses its own checkpoint
        f"ulysses_sequence_parallel_size={sequence_parallel}": sequence_parallel > 1,
        "quantization-aware training": engine._qat_enabled,
        "output_router_logits=True": getattr(base_model(module).config, "output_router_logits", False),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return reason or interaction_in_model(module)


class RowShare:
    """The share of the rows with a gradient, for verl's metrics."""

    def __init__(self, checkpoint: RowCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._is_announced = False

    def take(self) -> dict[str, float]:
        """The metric of all backwards since the last call. All ranks must call this together."""
        counts = torch.tensor(self.checkpoint.take(), device=get_device_id())
        dist.all_reduce(counts)
        live, rows = counts.tolist()
        if rows:
            return {"gspo/rows_differentiated": live / rows}
        if self.checkpoint.fallbacks and not self._is_announced and dist.get_rank() == 0:
            reasons = ", ".join(sorted(self.checkpoint.fallbacks))
            print(f"gspo_kernels: {SKIP_ROWS} has no effect: layers get {reasons}", flush=True)
            self._is_announced = True
        return {}
