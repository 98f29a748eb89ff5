"""AdamW with a learning-rate schedule, and with fp32 copies of weights in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import InputError, TrainConfig
from .distributed import average_gradients, full, like
from .policy import Policy

FIRST_LOSS_SCALE = 2.0**16  # in fp16; as in torch.amp.GradScaler
UPDATES_TO_RAISE = 2000  # after so many updates without an overflow, the loss scale doubles


class Optimizer:
    """AdamW on the trainable weights of a policy. For bf16 and fp16 weights, it optimizes fp32 master copies.

    fp16 has no numbers below 6e-8, so in fp16 the loss is multiplied by a power of two before the backward, and the
    gradients are divided by it in fp32. If a gradient overflows, `lower_loss_scale` halves the factor, and the caller
    computes the gradients again. A torch.amp.GradScaler would leave the update out.
    """

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self._config = config
        trained = {name: weight for name, weight in policy.model.named_parameters() if weight.requires_grad}
        self.names = list(trained)
        self.weights = list(trained.values())
        self.masters = [w if w.dtype.itemsize >= 4 else w.detach().float().requires_grad_() for w in self.weights]
        self.updates = 0
        self._scales_loss = config.half_dtype == "float16"
        self.loss_scale = FIRST_LOSS_SCALE if self._scales_loss else 1.0
        self._updates_at_scale = 0
        self._adamw = torch.optim.AdamW(self.masters, lr=config.learning_rate, weight_decay=config.weight_decay)

    def zero_grad(self) -> None:
        for weight in (*self.weights, *self.masters):
            weight.grad = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss, times the loss scale."""
        (loss if self.loss_scale == 1 else loss * self.loss_scale).backward()
        self.collect()

    def lower_loss_scale(self) -> bool:
        """Halve the loss scale after an overflow. Return False if it is 1 already."""
        if self.loss_scale == 1:
            return False
        self.loss_scale /= 2
        self._updates_at_scale = 0
        return True

    def collect(self) -> None:
        """Add the gradients of half-precision weights to their masters', so that micro-batches add up in fp32."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                weight.grad = None

    def clip(self) -> float:
        """Average gradients over processes, and scale them to at most max_grad_norm. Return their norm."""
        average_gradients(self.masters)
        if self.loss_scale != 1:
            for master in self.masters:
                if master.grad is not None:
                    master.grad /= self.loss_scale
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self._config.max_grad_norm)
        return full(norm).item()

    def step(self) -> None:
        """Take one step with the learning rate of this update."""
        for group in self._adamw.param_groups:
            group["lr"] = self._config.learning_rate_at(self.updates)
        self._adamw.step()
        self.updates += 1
        self._updates_at_scale += 1
        if self._scales_loss and self._updates_at_scale == UPDATES_TO_RAISE:
            self.loss_scale *= 2
            self._updates_at_scale = 0
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def state(self) -> dict[str, Any]:
        """Weights and moments as whole tensors, and the number of updates. All processes must call this."""
        weights = {
            name: {key: full(x) for key, x in {"weight": master, **self._adamw.state[master]}.items()}
            for name, master in zip(self.names, self.masters, strict=True)
        }
        state = {"updates": self.updates, "weights": weights}
        if self._scales_loss:
            state |= {"loss_scale": self.loss_scale, "updates_at_scale": self._updates_at_scale}
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, including the policy's weights.

        Raises:
            InputError: the state has other weights than the policy.
        """
        saved = {name: tuple(x["weight"].shape) for name, x in state["weights"].items()}
        ours = {name: tuple(master.shape) for name, master in zip(self.names, self.masters, strict=True)}
        if differing := sorted(saved.items() ^ ours.items()):
            raise InputError(
                f"resume: expected a checkpoint with the trained weights of this model; {differing[0][0]} differs"
            )
        self.updates = state["updates"]
        if self._scales_loss and "loss_scale" in state:  # a run in another precision has none
            self.loss_scale, self._updates_at_scale = state["loss_scale"], state["updates_at_scale"]
        for name, master in zip(self.names, self.masters, strict=True):
            saved = {key: like(x, master) for key, x in state["weights"][name].items()}
            master.copy_(saved.pop("weight"))
            self._adamw.state[master] = saved
        self._copy_masters()
