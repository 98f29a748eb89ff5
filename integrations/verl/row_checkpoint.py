"""Where verl's engine may skip the model's backward for answers without a gradient, such as clipped ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..huggingface import base_model
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
