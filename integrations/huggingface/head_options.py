"""Measure what a transformers model does to its logits after its head, and check it against the model's own logits.

No model is looked up by name. The head is made to return known numbers, and the model's output is compared with
softcap(scale * x) over the remaining columns. `fused_head.py` calls the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import linear_log_probs
from gspo_kernels.inputs.lm_head import call_inside

_PROBE_RANGE = 64.0  # logits of trained models lie within it, and every soft-cap in use is curved there
_SCALE_ERROR = 1e-5  # relative error of a scale that is measured in fp32

# Calls the model with a function of hidden states in place of its head; returns the model's logits.
Probe = Callable[[Callable[[Tensor], Tensor]], Tensor]


class HeadError(ValueError):
    """The model does something between hidden states and logits that cannot be fused."""


@dataclass(frozen=True)
class LogitOptions:
    """softcap(logit_scale * z) over the first vocab_size columns, where z is what the head returns."""

    logit_scale: float
    logit_softcap: float | None
    vocab_size: int

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the losses."""
        return {
            "logit_scale": self.logit_scale,
            "logit_softcap": self.logit_softcap,
            "vocab_size": self.vocab_size,
        }

    def apply(self, z: Tensor) -> Tensor:
        """Return the logits, float64, of the head's outputs [..., columns]."""
        z = self.logit_scale * z.double()[..., : self.vocab_size]
        return z if self.logit_softcap is None else self.logit_softcap * torch.tanh(z / self.logit_softcap)


def measure(model: Any, head: Any, probe: Probe) -> LogitOptions:
    """Measure the scale, soft-cap and columns that the model applies to numbers that its head is made to return.

    Raises:
        HeadError: the model's logits are not softcap(scale * x) over the first columns.
    """
    columns = _columns(head)
    ramp = torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, columns, dtype=torch.float32)
    small, large = torch.full((columns,), 2.0**-10), torch.full((columns,), 2.0**20)

    def logits_of(z: Tensor) -> Tensor:
        logits = probe(lambda hidden: z.to(hidden.device).expand(*hidden.shape[:-1], columns))
        return logits[0, -1].double().cpu()

    near, far, curve = logits_of(small), logits_of(large), logits_of(ramp)
    numbers = _numbers(model.config)
    slope, plateau = near[0].item() / 2.0**-10, abs(far[0].item())
    scale = _snap(slope, [1.0, *numbers, *(1 / n for n in numbers)])
    softcap = _snap(plateau, numbers) if plateau < abs(slope) * 2.0**19 else None
    options = LogitOptions(scale, softcap, near.shape[0])
    expected, eps = options.apply(ramp), torch.finfo(_logits_dtype(head)).eps
    same_shape = options.vocab_size <= columns and curve.shape == expected.shape
    if not (same_shape and torch.allclose(curve, expected, rtol=max(_SCALE_ERROR, 2 * eps), atol=max(1e-4, 2 * eps))):
        at = int((curve - expected).abs().argmax()) if same_shape else 0
        raise HeadError(
            f"fuse_head: {type(model).__name__} must make its logits of what its head returns by a scale, a soft-cap "
            f"and a cut of columns, got something else (in column {at} of {ramp[at]:g} it makes {curve[at]:g}, these "
            f"would make {expected[at]:g})"
        )
    return options


def compare(model: Any, head: Any, probe: Probe, options: LogitOptions) -> None:
    """Check the fused log-prob of each row's best token against the model's own logits of the same hidden states.

    Raises:
        HeadError: they differ by more than their rounding.
    """
    fused_side: list[Any] = []

    def with_fused(hidden: Tensor) -> Tensor:
        # Both sides round alike and have no dropout, whatever autocast and mode the model's forward sets.
        with torch.autocast(hidden.device.type, enabled=False), _evaluated(head):
            hidden = hidden.to(_logits_dtype(head))
            logits = head(hidden)
            best = options.apply(logits).argmax(-1)

            def fused(x: Tensor) -> Tensor:
                return linear_log_probs(x, head, best, **options.kwargs()).log_probs

            fused_side.extend((best, call_inside(head, fused, hidden), logits.dtype))
        return logits

    logits = probe(with_fused).double()
    best, log_probs, dtype = fused_side
    expected = logits.log_softmax(-1).gather(-1, best[..., None])[..., 0]
    error = (log_probs.double() - expected).abs().max().item()
    allowed = 1e-4 + 8 * torch.finfo(dtype).eps * max(logits.abs().max().item(), 1.0)
    if not error <= allowed:
        raise HeadError(
            f"fuse_head: log-probs of {type(model).__name__}'s own logits must equal the fused ones within "
            f"{allowed:.1e}, got a difference of {error:.1e}"
        )


@contextlib.contextmanager
def _evaluated(head: Any) -> Iterator[None]:
    """Switch `head` to evaluation mode (no dropout), except for the layers of `packing_prevented`."""
    with _in_mode([module for module in head.modules() if not _packs_in_evaluation(module)], training=False):
        yield


@contextlib.contextmanager
def packing_prevented(model: Any) -> Iterator[None]:
    """Keep bitsandbytes' 4-bit layers in training mode.

    On a CPU a layer that is called in evaluation mode without a gradient packs its weight for inference. That cannot be
    undone: its backward then fails, or gives no gradient.
    """
    with _in_mode([module for module in model.modules() if _packs_in_evaluation(module)], training=True):
        yield


def _packs_in_evaluation(module: Any) -> bool:
    return hasattr(getattr(module, "weight", None), "quant_state")


@contextlib.contextmanager
def _in_mode(modules: list[Any], training: bool) -> Iterator[None]:
    changed = [module for module in modules if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


def identity(head: Any) -> tuple[Any, ...]:
    """Return what measured options depend on: the head module, its columns, its patched forward and its hooks."""
    return id(head), _columns(head), id(vars(head).get("forward")), *(id(hook) for hook in _hooks(head))


def _hooks(head: Any) -> Iterator[Any]:
    """Yield the head's forward hooks, without those that gather and reduce sharded parameters."""
    for hook in (*head._forward_pre_hooks.values(), *head._forward_hooks.values()):
        function = getattr(hook, "func", hook)
        if not str(getattr(function, "__module__", "")).startswith(("torch.distributed.", "deepspeed.")):
            yield hook


def _columns(head: Any) -> int:
    """Return the rows of the head's weight [V, H]; a sharded weight has the shape of all shards."""
    weight = _weight(head)
    return weight.shape[0] if weight.ndim == 2 else getattr(head, "original_module", head).out_features


def _logits_dtype(head: Any) -> torch.dtype:
    dtype = _weight(head).dtype
    return dtype if dtype.is_floating_point else torch.float32


def _weight(head: Any) -> Tensor:
    """Return the weight of the head, or of the layer inside where PEFT wraps it."""
    layer = getattr(head, "original_module", head)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        raise HeadError(
            "fuse_head: the model's head must have a weight [V, H] (leave a head out of quantisation), "
            f"got {type(layer).__module__}.{type(layer).__name__} without"
        )
    return weight


def _numbers(config: Any) -> list[float]:
    """Return the positive numbers of a configuration and of its text part, to which measured values are snapped."""
    values = dict(config.to_dict())
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    values |= text.to_dict() if text is not None else {}
    return [float(x) for x in values.values() if _is_number(x) and x > 0 and math.isfinite(x)]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _snap(measured: float, candidates: list[float]) -> float:
    """Return the candidate nearest to `measured`, or `measured` if none is within the error of a measurement."""
    best = min(candidates, key=lambda c: abs(c - measured), default=measured)
    return best if abs(best - measured) <= _SCALE_ERROR * abs(measured) else measured
