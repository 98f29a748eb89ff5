"""Let a transformers model call a loss, or compute log-probs, at its head instead of making logits.

    head = fuse_head(model)  # measures and checks the head; head.remove() undoes it
    out = model(input_ids=ids, attention_mask=mask, with_head=lambda hidden, lm_head, **options: gspo_fused_loss(
        hidden[:, :-1], lm_head, ids[:, 1:], advantages, **options)).result

The model's forward runs unchanged up to its head. There `with_head` is called with the hidden states, the head module
and what the model would do to the logits (`head_options.py`); no logits are made. It runs as the head module's forward,
so the hooks of that module (DDP's, FSDP2's, ZeRO-3's) gather the weight, gather it again for the backward and reduce
its gradient.
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

    result: Any  # what `with_head` returned; module hooks see its tensors only in tuples, lists and dicts
    model_output: Any  # the model's output: aux_loss, router_logits, ...; its logits are meaningless


def fuse_head(model: nn.Module) -> FusedHead:
    """Let `model` be called with `with_head`. For a model that is fused already, return its FusedHead.

    Args:
        model: a causal language model of transformers, plain or wrapped by PEFT, DistributedDataParallel, FSDP or
            DeepSpeed's engine. With FSDP (1 and 2) every rank calls this, before or after sharding. Parameters that
            ZeRO-3 has partitioned exist only during the engine's calls: there the first call with `with_head` measures,
            checks and raises. Where PEFT trains rows of the head (trainable_token_indices), each call copies the weight
            [V, H], and its backward makes a gradient of that size. Two threads must not call one model at once.

    A head that is replaced, resized or hooked later is measured and checked again by the next call.

    Raises:
        HeadError: the model does something to its logits that is not a scale, a soft-cap or a cut of columns; its
            forward does not call its output embeddings; or fused log-probs differ from its own. The model is unchanged.
        TypeError, ValueError: `model` is not a module; or `linear_log_probs` does not support its head (DoRA, a sharded
            weight).
    """
    if not isinstance(model, nn.Module):
        Field("fuse_head").fail("model", "a transformers model", model, TypeError)
    base = base_model(model)
    existing = vars(base).get(_ATTRIBUTE)
    if existing is not None:
        return existing
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise HeadError(f"fuse_head: model must have output embeddings, got {type(base).__name__} without")
    if any(p.is_meta for p in base.parameters()):
        raise HeadError(f"fuse_head: {type(base).__name__} must have values, got parameters on the meta device")
    fused = FusedHead(base, head)
    try:
        if not any(hasattr(p, "ds_id") for p in head.parameters()):  # ds_id: partitioned by ZeRO-3
            fused.measure(model if isinstance(model, FullyShardedDataParallel) else base)  # FSDP1's wrapper gathers
    except BaseException:
        fused.remove()
        raise
    return fused


def base_model(model: Any) -> Any:
    """Return the transformers model inside wrappers of DDP, FSDP1, DeepSpeed, torch.compile and PEFT."""
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
    """A model whose forward takes `with_head`. Its head module is replaced only while such a call runs."""

    def __init__(self, model: Any, head: Any) -> None:
        self.model, self.head = model, head
        self._options: LogitOptions | None = None
        self._measured_head: tuple[Any, ...] = ()  # `identity` of the head that the options were measured on
        self._forward = model.forward

        # `generate` and Trainer inspect forward's signature; accelerate unwraps it and binds it to the model again.
        @functools.wraps(type(model).forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[_ATTRIBUTE]._call(*args, **kwargs)  # a copied model has its own FusedHead

        self._wrapped = types.MethodType(forward, model)
        model.forward = self._wrapped
        setattr(model, _ATTRIBUTE, self)

    @property
    def options(self) -> LogitOptions:
        """What the model does to its logits; HeadError before the first measurement."""
        if self._options is None:
            raise HeadError(
                "FusedHead.options: model must be fused before ZeRO-3 partitions it, or have been called with "
                "`with_head`, got neither"
            )
        return self._options

    def measure(self, call: Callable[..., Any]) -> LogitOptions:
        """Measure what the model, called through `call`, does to its logits, and check fused log-probs.

        Raises:
            HeadError: it does something else than `LogitOptions` can say, or fused log-probs differ.
        """
        probe = functools.partial(self._probe, call)
        options = measure(self.model, self.head, probe)
        compare(self.model, self.head, probe, options)
        self._options, self._measured_head = options, identity(self.head)
        return options

    def remove(self) -> None:
        """Restore the model's forward. Do nothing if that has been done.

        Raises:
            HeadError: the forward was wrapped again since; undo that first.
        """
        if _ATTRIBUTE not in vars(self.model):
            return
        if vars(self.model).get("forward") != self._wrapped:
            raise HeadError("FusedHead.remove: model.forward must be the one that was installed, got another above it")
        if getattr(self._forward, "__func__", None) is type(self.model).forward:
            del self.model.forward  # uncovers the class's
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
        if options is None or self._measured_head != identity(self.head):
            options = self.measure(self._call)  # not self.model: its hooks run already, around this call
        captured: list[Tensor] = []

        def capture(hidden: Tensor) -> Tensor:
            captured.append(hidden)
            return hidden.new_zeros(*hidden.shape[:-1], 1)

        output = self._forward_with(capture, *args, **kwargs)
        result = call_inside(self.head, lambda hidden: with_head(hidden, self.head, **options.kwargs()), captured[0])
        return HeadOutput(result, output)

    def _forward_with(self, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward with `function` in place of its head, whose hooks do not fire."""
        places = [(m, name) for m in self.model.modules() for name, x in m._modules.items() if x is self.head]
        stand_in = _StandIn(self.head, function)
        try:
            for module, name in places:
                module._modules[name] = stand_in
            output = self._forward(*args, **kwargs)
        finally:
            for module, name in places:
                module._modules[name] = self.head
        if stand_in.calls != 1:
            raise HeadError(
                f"fuse_head: {type(self.model).__name__}'s forward must call its output embeddings once, "
                f"got {stand_in.calls} calls"
            )
        return output

    def _probe(self, call: Callable[..., Any], function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the model's logits [1, 2, columns] of two tokens, with `function` in place of its head.

        Leaves gradients, random number generators and quantised weights as they were.
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
    """A `with_head` that takes the head's place instead of being called inside it: the model's output has logits."""

    function: Callable[[Tensor], Tensor]


class _StandIn(nn.Module):
    """Takes the head's place in the model: its forward is `function`, its other attributes are the head's."""

    def __init__(self, head: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self).update(head=head, function=function, calls=0)  # not as a submodule

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.function(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["head"], name)


def logit_options(model: nn.Module) -> Mapping[str, Any]:
    """Return what `model` does to its logits, as keyword arguments of the losses, for a loop with hidden states.

    Args and errors: those of `fuse_head`. The model is left as it was, fused or not.
    """
    was_fused = _ATTRIBUTE in vars(base_model(model))
    fused = fuse_head(model)
    try:
        return fused.options.kwargs()
    finally:
        if not was_fused:
            fused.remove()
