"""What a transformers model does to its logits after its head: measured, then checked against its own logits.

It is not looked up by the model's name: the head is made to return known numbers, and what comes out is compared with
softcap(scale x) over the columns that are left. `fused_head.py` gives the calls.
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

_PROBE = 64.0  # logits of a trained model lie within it, and every soft-cap in use bends there
_MEASURED = 1e-5  # relative: what fp32 leaves of a scale that is measured

Probe = Callable[[Callable[[Tensor], Tensor]], Tensor]  # a function of hidden states, for a head: the model's logits


class HeadError(ValueError):
    """The model does something between hidden states and logits that cannot be fused."""


@dataclass(frozen=True)
class LogitOptions:
    """softcap(logit_scale z) over the first vocab_size columns: keyword arguments of the losses."""

    logit_scale: float
    logit_softcap: float | None
    vocab_size: int

    def kwargs(self) -> dict[str, Any]:
        return {
            "logit_scale": self.logit_scale, "logit_softcap": self.logit_softcap, "vocab_size": self.vocab_size,
        }  # fmt: skip

    def apply(self, z: Tensor) -> Tensor:
        z = self.logit_scale * z.double()[..., : self.vocab_size]
        return z if self.logit_softcap is None else self.logit_softcap * torch.tanh(z / self.logit_softcap)


def measure(model: Any, head: Any, probe: Probe) -> LogitOptions:
    """Scale, soft-cap and columns of what the model does to numbers that its head is made to return."""
    columns = _columns(head)
    x = torch.linspace(-_PROBE, _PROBE, columns, dtype=torch.float32)
    small, large = torch.full((columns,), 2.0**-10), torch.full((columns,), 2.0**20)

    def passed(z: Tensor) -> Tensor:
        logits = probe(lambda hidden: z.to(hidden.device).expand(*hidden.shape[:-1], columns))
        return logits[0, -1].double().cpu()

    near, far, curve = passed(small), passed(large), passed(x)
    numbers = _numbers(model.config)
    slope, reached = near[0].item() / 2.0**-10, abs(far[0].item())
    scale = _exactly(slope, [1.0, *numbers, *(1 / n for n in numbers)])
    softcap = _exactly(reached, numbers) if reached < abs(slope) * 2.0**19 else None
    options = LogitOptions(scale, softcap, near.shape[0])
    expected, eps = options.apply(x), torch.finfo(_logits_dtype(head)).eps
    same_shape = options.vocab_size <= columns and curve.shape == expected.shape
    if not (same_shape and torch.allclose(curve, expected, rtol=max(_MEASURED, 2 * eps), atol=max(1e-4, 2 * eps))):
        at = int((curve - expected).abs().argmax()) if same_shape else 0
        raise HeadError(
            f"fuse_head: {type(model).__name__} must make its logits of what its head returns by a scale, a soft-cap "
            f"and a cut of columns, got something else (in column {at} of {x[at]:g} it makes {curve[at]:g}, these "
            f"would make {expected[at]:g})"
        )
    return options


def compare(model: Any, head: Any, probe: Probe, options: LogitOptions) -> None:
    """Fused log-probs of each row's best token against the model's own logits, from the same hidden states."""
    found: list[Any] = []

    def both(hidden: Tensor) -> Tensor:
        # Of one rounding and without dropout, whatever autocast and mode the model's forward brings along.
        with torch.autocast(hidden.device.type, enabled=False), _evaluated(head):
            hidden = hidden.to(_logits_dtype(head))
            logits = head(hidden)
            best = options.apply(logits).argmax(-1)

            def fused(x: Tensor) -> Tensor:
                return linear_log_probs(x, head, best, **options.kwargs()).log_probs

            found.extend((best, call_inside(head, fused, hidden), logits.dtype))
        return logits

    logits = probe(both).double()
    best, log_probs, dtype = found
    own = logits.log_softmax(-1).gather(-1, best[..., None])[..., 0]
    error = (log_probs.double() - own).abs().max().item()
    allowed = 1e-4 + 8 * torch.finfo(dtype).eps * max(logits.abs().max().item(), 1.0)
    if not error <= allowed:
        raise HeadError(
            f"fuse_head: log-probs of {type(model).__name__}'s own logits must equal the fused ones within "
            f"{allowed:.1e}, got a difference of {error:.1e}"
        )


@contextlib.contextmanager
def _evaluated(head: Any) -> Iterator[None]:
    """Switch `head` to evaluation mode, without dropout, but for layers that `packing_prevented` looks after."""
    with _in_mode([module for module in head.modules() if not _packs_in_evaluation(module)], training=False):
        yield


@contextlib.contextmanager
def packing_prevented(model: Any) -> Iterator[None]:
    """Keep bitsandbytes' 4-bit layers in training mode.

    On a CPU, one that is called in evaluation mode without a gradient packs its weight for inference, for good: its
    backward then fails, or gives no gradient.
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
    """What measured options depend on: the module, its columns, and what others have hung on it since."""
    return id(head), _columns(head), id(vars(head).get("forward")), *(id(hook) for hook in _hooks(head))


def _hooks(head: Any) -> Iterator[Any]:
    """Those but the ones that gather and reduce sharded parameters."""
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
    """Numbers of a configuration, of its text part too: measured values that equal one are meant to be it."""
    values = dict(config.to_dict())
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    values |= text.to_dict() if text is not None else {}
    return [float(x) for x in values.values() if _is_number(x) and x > 0 and math.isfinite(x)]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _exactly(measured: float, candidates: list[float]) -> float:
    best = min(candidates, key=lambda c: abs(c - measured), default=measured)
    return best if abs(best - measured) <= _MEASURED * abs(measured) else measured
