"""A transformers model's head for `gspo_kernels`: what the model does to its logits, and a call from inside the head.

    head = fuse_head(model)  # measures and checks once; head.remove() undoes it
    out = model(input_ids=ids, attention_mask=mask, with_head=lambda hidden, lm_head, **options: gspo_fused_loss(
        hidden[:, :-1], lm_head, ids[:, 1:], advantages, **options)).result

The model's own forward runs as it is, up to the call of its head. There, instead of making logits, `with_head` is
called with the hidden states, the head and what the model would do to the logits. It runs inside the head module's own
call, so the hooks that wrap that module (DDP's, FSDP2's) have gathered its weight and will reduce its gradient.
ZeRO-3 has not been tried.

What a model does to its logits after the head is not looked up by its name but measured: the head is made to return
known numbers, and what comes out is compared with softcap(scale x) over the columns that are left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gspo_kernels import linear_log_probs
from gspo_kernels.head import own_call

_ATTRIBUTE = "_gspo_fused_head"
_PROBE = 64.0  # logits of a trained model lie within it, and every soft-cap in use bends there
_MEASURED = 1e-5  # relative: what fp32 leaves of a scale that is measured


class HeadOutput(NamedTuple):
    """What a call with `with_head` returns."""

    result: Any  # of `with_head`
    model_output: Any  # the model's own, its logits without meaning: aux_loss, router_logits, ...


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


class HeadError(ValueError):
    """The model does something between hidden states and logits that cannot be fused."""


def fuse_head(model: nn.Module) -> FusedHead:
    """Let `model` be called with `with_head`; the same object again if it already can be.

    Args:
        model: a causal language model of transformers, plain, in PEFT, or in DistributedDataParallel. With FSDP2
            every rank calls this, before or after sharding.

    Raises:
        HeadError: what the model does to its logits is no scale, soft-cap or cut of columns, its forward does not call
            its output embeddings, or fused log-probs differ from its own. The model is as before.
        TypeError, ValueError: of `linear_log_probs`, for a head that is not understood (DoRA, a sharded weight).
    """
    base = base_model(model)
    found = vars(base).get(_ATTRIBUTE)
    if found is not None:
        return found
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise HeadError(f"fuse_head: model must have output embeddings, got {type(base).__name__} without")
    fused = FusedHead(base, head)
    try:
        fused.options = _measure(fused)
        _compare(fused)
    except BaseException:
        fused.remove()
        raise
    return fused


def base_model(model: Any) -> Any:
    """The transformers model inside wrappers of DDP, torch.compile and PEFT."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


class FusedHead:
    """A model whose forward takes `with_head`. Its head is what it was, except while such a call lasts."""

    def __init__(self, model: Any, head: Any) -> None:
        self.model, self.head = model, head
        self.options = LogitOptions(1.0, None, 1)
        self._forward = model.forward
        # `generate` and Trainer read signatures: they are to find the original's.
        self._wrapped = functools.wraps(self._forward)(functools.partial(self._call))
        model.forward = self._wrapped
        setattr(model, _ATTRIBUTE, self)

    def remove(self) -> None:
        """The forward as it was. What wrapped it later has to go first."""
        if vars(self.model).get("forward") is not self._wrapped:
            raise HeadError("FusedHead.remove: model.forward must be the one that was installed, got another above it")
        if getattr(self._forward, "__func__", None) is type(self.model).forward:
            del self.model.forward  # it had none of its own
        else:
            self.model.forward = self._forward
        delattr(self.model, _ATTRIBUTE)

    def _call(self, *args: Any, with_head: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        if with_head is None:
            return self._forward(*args, **kwargs)
        if isinstance(with_head, _Probe):
            return self._forward_with(with_head.function, *args, **kwargs)
        states: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            states.append(hidden)
            return hidden.new_zeros(*hidden.shape[:-1], 1)

        output = self._forward_with(keep, *args, **kwargs)
        result = self.inside(lambda hidden: with_head(hidden, self.head, **self.options.kwargs()), states[0])
        return HeadOutput(result, output)

    def _forward_with(self, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """The model's forward, which calls `function` in the place of its head, whose hooks stay asleep."""
        places = [(m, name) for m in self.model.modules() for name, x in m._modules.items() if x is self.head]
        instead = _Instead(self.head, function)
        try:
            for module, name in places:
                module._modules[name] = instead
            output = self._forward(*args, **kwargs)
        finally:
            for module, name in places:
                module._modules[name] = self.head
        if instead.calls != 1:
            raise HeadError(
                f"fuse_head: {type(self.model).__name__}'s forward must call its output embeddings once, "
                f"got {instead.calls} calls"
            )
        return output

    def inside(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """function(hidden) as the head's own call, hooks and all. What it returns is the module's output to them."""
        before = vars(self.head).get("forward")
        self.head.forward = function
        try:
            with own_call(self.head):
                return self.head(hidden)
        finally:
            if before is None:
                del self.head.forward
            else:
                self.head.forward = before

    def probe(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The model's logits of two tokens, with `function` for a head; no trace in gradients or random numbers."""
        device = self.model.get_input_embeddings().weight.device
        ids = torch.arange(2, device=device)[None]
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            # A whole call, for a sharded model's hooks.
            output = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, with_head=_Probe(function)
            )
        return output.logits


class _Probe(NamedTuple):
    function: Callable[[Tensor], Tensor]


class _Instead(nn.Module):
    """What a model finds where its head is: a function, and else the head's own attributes."""

    def __init__(self, head: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self).update(head=head, function=function, calls=0)  # not as a submodule

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.function(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["head"], name)


def _measure(fused: FusedHead) -> LogitOptions:
    """Scale, soft-cap and columns of what the model does to numbers that its head is made to return."""
    columns = _columns(fused.head)
    x = torch.linspace(-_PROBE, _PROBE, columns, dtype=torch.float32)
    small, large = torch.full((columns,), 2.0**-10), torch.full((columns,), 2.0**20)

    def passed(z: Tensor) -> Tensor:
        logits = fused.probe(lambda hidden: z.to(hidden.device).expand(*hidden.shape[:-1], columns))
        return logits[0, -1].double().cpu()

    near, far, curve = passed(small), passed(large), passed(x)
    numbers = _numbers(fused.model.config)
    slope, reached = near[0].item() / 2.0**-10, abs(far[0].item())
    scale = _exactly(slope, [1.0, *numbers, *(1 / n for n in numbers)])
    softcap = _exactly(reached, numbers) if reached < abs(slope) * 2.0**19 else None
    options = LogitOptions(scale, softcap, near.shape[0])
    expected, eps = options.apply(x), torch.finfo(_logits_dtype(fused)).eps
    same_shape = options.vocab_size <= columns and curve.shape == expected.shape
    if not (same_shape and torch.allclose(curve, expected, rtol=max(_MEASURED, 2 * eps), atol=max(1e-4, 2 * eps))):
        name = type(fused.model).__name__
        raise HeadError(
            f"fuse_head: {name} must make its logits of what its head returns by a scale, a soft-cap and a cut of "
            f"columns, got something else (of {x[0]:g} it makes {curve[0]:g}, where these make {expected[0]:g})"
        )
    return options


def _compare(fused: FusedHead) -> None:
    """Fused log-probs of each row's best token against the model's own logits, from the same hidden states."""
    forward = fused.head.forward
    found: list[Tensor] = []

    def both(hidden: Tensor) -> Tensor:
        logits = forward(hidden)
        best = fused.options.apply(logits).argmax(-1)
        lp = linear_log_probs(hidden, fused.head, best, **fused.options.kwargs()).log_probs
        found.extend((best, lp))
        return logits

    logits = fused.probe(lambda hidden: fused.inside(both, hidden))
    best, log_probs = found
    own = logits.double().log_softmax(-1).gather(-1, best[..., None])[..., 0]
    error = (log_probs.double() - own).abs().max().item()
    allowed = 1e-4 + 8 * torch.finfo(_logits_dtype(fused)).eps * max(logits.double().abs().max().item(), 1.0)
    if not error <= allowed:
        raise HeadError(
            f"fuse_head: log-probs of {type(fused.model).__name__}'s own logits must equal the fused ones within "
            f"{allowed:.1e}, got a difference of {error:.1e}"
        )


def _columns(head: Any) -> int:
    """Rows of the head's weight, of the layer inside where PEFT wraps it; a sharded weight has its whole shape."""
    return head.weight.shape[0] if head.weight.ndim == 2 else head.out_features


def _logits_dtype(fused: FusedHead) -> torch.dtype:
    dtype = fused.head.weight.dtype
    return dtype if dtype.is_floating_point else torch.float32


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


def logit_options(model: nn.Module) -> Mapping[str, Any]:
    """What `model` does to its logits, for a loop that gets hidden states by itself: arguments of the losses."""
    base = base_model(model)
    already = vars(base).get(_ATTRIBUTE)
    fused = fuse_head(model)
    if already is None:
        fused.remove()
    return fused.options.kwargs()
