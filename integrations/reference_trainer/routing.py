"""The experts that the routers of a mixture choose: record them and replay them.

Routing Replay (arXiv 2507.18071, section 5.3) trains with the experts that the old policy chose, so that an update does
not change which experts compute a token. The weights of these experts follow the current router.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Routers of transformers that return (logits, weights, experts), with the softmax of the logits as weights.
ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "MixtralTopKRouter", "OlmoeTopKRouter")


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers whose experts `routing` records, in the order of the layers; [] if the model has none."""
    return [module for module in model.modules() if type(module).__name__ in ROUTERS]


@contextmanager
def routing(model: Any, replayed: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Record the experts of one forward of the model. If `replayed` is not None, compute with those experts instead.

    Args:
        replayed: experts of an earlier forward of the same tokens, [B, width, layers, k] int64.

    Yields:
        A list that receives, for each layer, the experts that its router chose, [B * width, k] int64. `stacked` turns
        it into [B, width, layers, k]. It stays empty for a model without `routers`.
    """
    chosen: list[Tensor] = []

    def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        logits, weights, experts = output
        chosen.append(experts.detach())
        if replayed is None:
            return None
        experts = replayed[:, :, len(chosen) - 1].flatten(0, 1)
        probabilities = logits.float().softmax(-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):  # Mixtral always does
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return logits, probabilities.to(weights.dtype), experts

    hooks = [router.register_forward_hook(hook) for router in routers(model)]
    try:
        yield chosen
    finally:
        for handle in hooks:
            handle.remove()


def stacked(chosen: list[Tensor], batch: int) -> Tensor:
    """Stack the experts of each layer to [B, width, layers, k] int64."""
    return torch.stack(chosen, dim=1).unflatten(0, (batch, -1))
