"""A transformers model's head for `gspo_kernels`: what the model does to its logits, and a call from inside the head.

    head = fuse_head(model)  # measures and checks once; head.remove() undoes it
    out = model(input_ids=ids, attention_mask=mask, with_head=lambda hidden, lm_head, **options: gspo_fused_loss(
        hidden[:, :-1], lm_head, ids[:, 1:], advantages, **options)).result

The model's own forward runs as it is, up to the call of its head. There, instead of making logits, `with_head` is
called with the hidden states, the head and what the model would do to the logits (`head_options.py`). It runs inside
the head module's own call, so the hooks that wrap that module (DDP's, FSDP2's, ZeRO-3's) have gathered its weight, will
gather it again for the backward and reduce its gradient.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from gspo_kernels.inputs.lm_head import call_inside
from gspo_kernels.validation import Field

from .head_options import HeadError, LogitOptions, compare, identity, measure, packing_prevented

_ATTRIBUTE = "_gspo_fused_head"


class HeadOutput(NamedTuple):
    """What a call with `with_head` returns."""

    result: Any  # of `with_head`; tensors in it are found by hooks in tuples, lists and dicts, and nowhere else
    model_output: Any  # the model's own, its logits without meaning: aux_loss, router_logits, ...


def fuse_head(model: nn.Module) -> FusedHead:
    """Let `model` be called with `with_head`; the same object again if it already can be.

    Args:
        model: a causal language model of transformers, plain, in PEFT, in DistributedDataParallel or in DeepSpeed's
            engine. With FSDP (1 and 2) every rank calls this, before or after sharding. Parameters that ZeRO-3 has
            partitioned are there in the engine's calls only: then the first with `with_head` measures, checks, raises.
            Where PEFT trains rows of the head (trainable_token_indices), each call takes a copy of the weight [V, H],
            and its backward a gradient of that size. Two threads must not call one model at once.

    A head that is replaced, resized or hooked later is measured and checked anew by the next call.

    Raises:
        HeadError: what the model does to its logits is no scale, soft-cap or cut of columns, its forward does not call
            its output embeddings, or fused log-probs differ from its own. The model is as before.
        TypeError, ValueError: of `linear_log_probs`, for a head that is not understood (DoRA, a sharded weight); no
            module.
    """
    if not isinstance(model, nn.Module):
        Field("fuse_head").fail("model", "a transformers model", model, TypeError)
    base = base_model(model)
    found = vars(base).get(_ATTRIBUTE)
    if found is not None:
        return found
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise HeadError(f"fuse_head: model must have output embeddings, got {type(base).__name__} without")
    if any(p.is_meta for p in base.parameters()):
        raise HeadError(f"fuse_head: {type(base).__name__} must have values, got parameters on the meta device")
    fused = FusedHead(base, head)
    try:
        if not any(hasattr(p, "ds_id") for p in head.parameters()):  # so ZeRO-3 marks its own
            fused.measure(model if isinstance(model, FullyShardedDataParallel) else base)  # by whole calls, with hooks
    except BaseException:
        fused.remove()
        raise
    return fused


def base_model(model: Any) -> Any:
    """The transformers model inside wrappers of DDP, FSDP1, DeepSpeed, torch.compile and PEFT."""
    while True:
        deepspeed = type(model).__module__.startswith("deepspeed.")
        if deepspeed or isinstance(model, nn.parallel.DistributedDataParallel | FullyShardedDataParallel):
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
        self._options: LogitOptions | None = None
        self._of: tuple[Any, ...] = ()  # the identity of the head that they are of
        self._forward = model.forward

        # `generate` and Trainer read signatures, accelerate binds and unwraps: they are to find the class's forward.
        @functools.wraps(type(model).forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[_ATTRIBUTE]._call(*args, **kwargs)  # of a copied model, its own

        self._wrapped = types.MethodType(forward, model)
        model.forward = self._wrapped
        setattr(model, _ATTRIBUTE, self)

    @property
    def options(self) -> LogitOptions:
        if self._options is None:
            raise HeadError(
                "FusedHead.options: model must be fused before ZeRO-3 partitions it, or have been called with "
                "`with_head`, got neither"
            )
        return self._options

    def measure(self, call: Callable[..., Any]) -> LogitOptions:
        """What the model, called by `call`, does to its logits; HeadError if it does something else."""
        probe = functools.partial(self._probe, call)
        options = measure(self.model, self.head, probe)
        compare(self.model, self.head, probe, options)
        self._options, self._of = options, identity(self.head)
        return options

    def remove(self) -> None:
        """The forward as it was. What wrapped it later has to go first; a second time nothing happens."""
        if _ATTRIBUTE not in vars(self.model):
            return
        if vars(self.model).get("forward") != self._wrapped:
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
        if kwargs.get("labels") is not None:
            Field("fuse_head").fail("labels", "None beside with_head, which makes no logits", kwargs["labels"])
        self.head = self.model.get_output_embeddings()
        options = self._options
        if options is None or self._of != identity(self.head):
            options = self.measure(self._call)  # not by a whole call: this is inside one
        states: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            states.append(hidden)
            return hidden.new_zeros(*hidden.shape[:-1], 1)

        output = self._forward_with(keep, *args, **kwargs)
        result = call_inside(self.head, lambda hidden: with_head(hidden, self.head, **options.kwargs()), states[0])
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

    def _probe(self, call: Callable[..., Any], function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the model's logits of two tokens, with `function` for a head.

        Leaves no trace in gradients, random numbers or quantised weights.
        """
        device = next(self.model.parameters()).device
        ids = torch.arange(2, device=device)[None]
        devices = [device] if device.type == "cuda" else []
        autocast = torch.autocast(device.type, enabled=False)
        with torch.random.fork_rng(devices=devices), torch.no_grad(), autocast, packing_prevented(self.model):
            output = call(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                return_dict=True,
                with_head=_Probe(function),
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


def logit_options(model: nn.Module) -> Mapping[str, Any]:
    """What `model` does to its logits, for a loop that gets hidden states by itself: arguments of the losses."""
    base = base_model(model)
    already = vars(base).get(_ATTRIBUTE)
    fused = fuse_head(model)
    try:
        return fused.options.kwargs()
    finally:
        if already is None:
            fused.remove()
