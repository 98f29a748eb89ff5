"""Measure which operations a transformers model applies to its logits, and check the result against the model's logits.

This works for any model: there is no table of model names. The head is replaced by a function that returns known
numbers x. The model must turn them into softcap(scale * x) over the first columns. The probes that call the model are
in `fused_head.py`.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gspo_kernels import linear_log_probs
from gspo_kernels.inputs.lm_head import call_inside, owner, take_apart
from gspo_kernels.ranks.dtensors import is_dtensor, local

_PROBE_RANGE = 64.0  # logits of trained models lie in -64 ... 64, where every soft-cap in use is clearly curved
_SCALE_ERROR = 1e-5  # relative error of a scale that is measured in fp32

# A probe takes a function of hidden states, runs the model with this function in place of the head, and returns the
# model's logits.
Probe = Callable[[Callable[[Tensor], Tensor]], Tensor]


class HeadError(ValueError):
    """Between hidden states and logits, the model applies an operation that cannot be fused."""


@dataclass(frozen=True)
class LogitOptions:
    """The logits are softcap(logit_scale * z) over the first vocab_size columns of the head's output z."""

    logit_scale: float
    logit_softcap: float | None
    vocab_size: int

    def kwargs(self) -> dict[str, Any]:
        """The same options as keyword arguments of the losses."""
        return {
            "logit_scale": self.logit_scale,
            "logit_softcap": self.logit_softcap,
            "vocab_size": self.vocab_size,
        }

    def apply(self, z: Tensor) -> Tensor:
        """Compute logits [..., vocab_size] in float64 from the head's output [..., columns]."""
        z = self.logit_scale * z.double()[..., : self.vocab_size]
        return z if self.logit_softcap is None else self.logit_softcap * torch.tanh(z / self.logit_softcap)


def measure(model: Any, head: Any, probe: Probe) -> LogitOptions:
    """Measure the scale, the soft-cap and the number of columns of the model's logits.

    Three probes replace the head. Small numbers reveal the scale, large numbers reveal the soft-cap, and a ramp of
    numbers checks both.

    Raises:
        HeadError: the model's logits are not softcap(scale * x) over the first columns.
    """
    columns = _columns(head)
    ramp = torch.linspace(-_PROBE_RANGE, _PROBE_RANGE, columns, dtype=torch.float32)  # [columns]
    small = torch.full((columns,), 2.0**-10)
    large = torch.full((columns,), 2.0**20)

    def logits_of(z: Tensor) -> Tensor:
        logits = probe(lambda hidden: z.to(hidden.device).expand(*hidden.shape[:-1], columns))
        return logits[0, -1].double().cpu()  # [vocab_size]

    from_small = logits_of(small)
    from_large = logits_of(large)
    from_ramp = logits_of(ramp)
    numbers = _numbers(model.config)
    slope, plateau = from_small[0].item() / 2.0**-10, abs(from_large[0].item())
    scale = _snap(slope, [1.0, *numbers, *(1 / n for n in numbers)])
    softcap = _snap(plateau, numbers) if plateau < abs(slope) * 2.0**19 else None
    options = LogitOptions(scale, softcap, from_small.shape[0])
    expected = options.apply(ramp)
    eps = torch.finfo(_logits_dtype(head)).eps
    same_shape = options.vocab_size <= columns and from_ramp.shape == expected.shape
    rtol = max(_SCALE_ERROR, 2 * eps)
    atol = max(1e-4, 2 * eps)
    if not (same_shape and torch.allclose(from_ramp, expected, rtol=rtol, atol=atol)):
        column = int((from_ramp - expected).abs().argmax()) if same_shape else 0
        raise HeadError(
            f"fuse_head: the logits of {type(model).__name__} must be softcap(scale * x) over the first columns of its "
            f"head's output x, got other logits (column {column}: for x = {ramp[column]:g} the model returns "
            f"{from_ramp[column]:g}, but the measured scale and soft-cap give {expected[column]:g})"
        )
    return options


def compare(model: Any, head: Any, probe: Probe, options: LogitOptions) -> None:
    """Check fused log-probs against the model's own logits. Each target is the model's likeliest token.

    Raises:
        HeadError: the log-probs differ by more than rounding explains.
    """
    fused_results: list[Any] = []

    def with_fused(hidden: Tensor) -> Tensor:
        # Switch off dropout, and autocast, which the model's forward may have enabled. With either, the head and
        # `linear_log_probs` would not compute the same.
        with torch.autocast(hidden.device.type, enabled=False), _evaluated(head):
            hidden = hidden.to(_logits_dtype(head))
            logits = head(hidden)
            targets = options.apply(_all_columns(head, logits)).argmax(-1)  # [1, 2]

            def fused(x: Tensor) -> Tensor:
                return linear_log_probs(x, head, targets, **options.kwargs()).log_probs

            fused_results.extend((targets, call_inside(head, fused, hidden), logits.dtype))
        return logits

    logits = _all_columns(head, probe(with_fused)).double()
    targets, log_probs, dtype = fused_results  # on the device of the head
    targets, log_probs = targets.to(logits.device), log_probs.to(logits.device)
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]  # [1, 2]
    error = (log_probs.double() - expected).abs().max().item()
    allowed = 1e-4 + 8 * torch.finfo(dtype).eps * max(logits.abs().max().item(), 1.0)
    if not error <= allowed:
        raise HeadError(
            f"fuse_head: log-probs from the logits of {type(model).__name__} must equal the fused ones within "
            f"{allowed:.1e}, got a difference of {error:.1e}"
        )


def _all_columns(head: Any, logits: Tensor) -> Tensor:
    """Gather the logits of all columns, [..., V]. `parallelize_module` may return only this rank's columns."""
    weight = _weight(head)
    if is_dtensor(logits):
        return cast("Any", logits).full_tensor()
    if not is_dtensor(weight) or logits.shape[-1] != local(weight).shape[0]:
        return logits
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(logits, cast("Any", weight).device_mesh, [Shard(logits.ndim - 1)]).full_tensor()


@contextlib.contextmanager
def _evaluated(head: Any) -> Iterator[None]:
    """Switch `head` to evaluation mode (no dropout), but leave bitsandbytes' layers alone (see `packing_prevented`)."""
    with in_mode([module for module in head.modules() if not _packs_in_evaluation(module)], training=False):
        yield


@contextlib.contextmanager
def packing_prevented(model: Any) -> Iterator[None]:
    """Keep bitsandbytes' 4-bit layers in training mode.

    On a CPU such a layer packs its weight for inference when it is called in evaluation mode without a gradient.
    Packing cannot be undone, and the layer's backward then fails or returns no gradient.
    """
    with in_mode([module for module in model.modules() if _packs_in_evaluation(module)], training=True):
        yield


def _packs_in_evaluation(module: Any) -> bool:
    # Not `module.weight`: in wrappers and parametrized layers, reading that attribute computes a weight.
    return hasattr(module._parameters.get("weight"), "quant_state")


@contextlib.contextmanager
def in_mode(modules: list[Any], training: bool) -> Iterator[None]:
    """Put modules, without their submodules, into training or evaluation mode."""
    changed = [module for module in modules if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training


@contextlib.contextmanager
def generators_restored(model: nn.Module) -> Iterator[None]:
    """Restore the generators of Python, NumPy, and torch on the CPU and on the devices of `model`."""
    devices = {x.device for x in model.parameters() if x.device.type in ("cuda", "xpu")}
    numpy: Any = sys.modules.get("numpy")  # these integrations do not require it
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=next((x.type for x in devices), "cuda")):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


def identity(head: Any) -> tuple[Any, ...]:
    """Everything that measured options depend on: the head, its columns, its patched forward and its hooks.

    These are the objects themselves: the id of a removed hook may be that of the next one.
    """
    return head, _columns(head), vars(head).get("forward"), *_hooks(head)


def _hooks(head: Any) -> Iterator[Any]:
    """Yield the head's forward hooks, without those that gather and reduce sharded parameters."""
    for hook in (*head._forward_pre_hooks.values(), *head._forward_hooks.values()):
        if not owner(hook).startswith(("torch.distributed.", "deepspeed.")):
            yield hook


def _columns(head: Any) -> int:
    """V of the head's weight [V, H]. A sharded weight reports its full shape."""
    weight = _weight(head)
    return weight.shape[0] if weight.ndim == 2 else take_apart(head).linear.out_features


def _logits_dtype(head: Any) -> torch.dtype:
    dtype = _weight(head).dtype
    return dtype if dtype.is_floating_point else torch.float32


def _weight(head: Any) -> Tensor:
    """The weight of the head. If FSDP1 or PEFT wraps the head, this is the weight of the wrapped layer."""
    layer = take_apart(head).linear
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        raise HeadError(
            "fuse_head: the model's head must have a weight [V, H] (exclude the head from quantization), "
            f"got a {type(layer).__module__}.{type(layer).__name__} without one"
        )
    return weight


def _numbers(config: Any) -> list[float]:
    """The positive numbers of a configuration and of its text part: candidates for `_snap`."""
    values = dict(config.to_dict())
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    values |= text.to_dict() if text is not None else {}
    return [float(x) for x in values.values() if _is_number(x) and x > 0 and math.isfinite(x)]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _snap(measured: float, candidates: list[float]) -> float:
    """Round `measured` to the nearest candidate. If none is within the measurement's error, leave it unchanged."""
    nearest = min(candidates, key=lambda c: abs(c - measured), default=measured)
    return nearest if abs(nearest - measured) <= _SCALE_ERROR * abs(measured) else measured
