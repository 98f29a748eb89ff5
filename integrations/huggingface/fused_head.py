"""Call a loss at the head of a transformers model, or compute log-probs there, without making logits.

    head = fuse_head(model)  # measures and checks the head; head.remove() restores the model
    out = model(input_ids=ids, attention_mask=mask, with_head=lambda hidden, lm_head, **options: gspo_fused_loss(
        hidden[:, :-1], lm_head, ids[:, 1:], advantages, **options)).result

The model's forward runs, but its head only records the hidden states, so no logits are made. Afterwards, `with_head` is
called with three things: the hidden states, the head module, and the operations that the model would apply to the
logits (`head_options.py`).

`with_head` runs as the head module's forward, so the hooks of the head (such as FSDP2's and ZeRO-3's) fire. These hooks
gather the weight for the forward and again for the backward, and reduce the weight's gradient.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from gspo_kernels.inputs.lm_head import call_inside, is_a, is_fsdp_unit, placed_by_accelerate, take_apart
from gspo_kernels.validation import Checks, dtype_name

from .head_options import HeadError, LogitOptions, compare, identity, measure, packing_prevented

_ATTRIBUTE = "_gspo_fused_head"


class HeadOutput(NamedTuple):
    """The return value of a model call with `with_head`."""

    result: Any  # the return value of `with_head`; hooks find its tensors only if it is a tensor, tuple, list or dict
    model_output: Any  # the model's output with aux_loss, router_logits, ...; ignore its logits, they are placeholders


def fuse_head(model: nn.Module) -> FusedHead:
    """Add the keyword argument `with_head` to the model's forward, and return the model's FusedHead.

    A second call returns the same FusedHead. If the head is replaced, resized or hooked later, or a number of the model
    or its configuration changes (`logit_scale`, `final_logit_softcapping`), the next call of the model with `with_head`
    measures and checks the head again.

    `copy.deepcopy` copies the model with its FusedHead. Pickle, and so `torch.save` of the model, keeps no instance's
    forward: call this function on the loaded model.

    Args:
        model: a causal language model of transformers, plain or wrapped by PEFT, DistributedDataParallel, FSDP or
            DeepSpeed's engine.

    With FSDP (1 and 2) and `parallelize_module`, call this on every rank, before or after sharding. The head may be
    sharded by `ColwiseParallel`. If ZeRO-3 has already partitioned the parameters, they exist only during the engine's
    calls. In this case, the first call with `with_head` measures and checks the head, and may raise the errors below.
    If PEFT trains single tokens of the head (trainable_token_indices), each call copies the weight [V, H], and the
    backward makes a gradient [V, H]. Two threads must not call the same model at the same time.

    Raises:
        HeadError: the model has no output embeddings, or has parameters on the meta device; between head and logits,
            the model does something other than scale, soft-cap or drop the last columns; the model's forward does not
            call its output embeddings exactly once; or the fused log-probs differ from the log-probs of the model's
            logits. In each case the model is unchanged.
        TypeError, ValueError: `model` is not a module; or `linear_log_probs` does not support the head (DoRA, a weight
            that is sharded other than by `ColwiseParallel`).
    """
    if not isinstance(model, nn.Module):
        Checks("fuse_head").fail("model", "a transformers model", model, TypeError)
    base = base_model(model)
    existing = _installed(base)
    if existing is not None and existing.is_measured():
        return existing
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise HeadError(f"fuse_head: model must have output embeddings, got a {type(base).__name__} without them")
    # accelerate keeps offloaded parameters on the meta device, and loads them when it calls their module.
    unplaced = (module for module in base.modules() if not placed_by_accelerate(module))
    if any(p is not None and p.is_meta for module in unplaced for p in module._parameters.values()):
        raise HeadError(f"fuse_head: parameters of {type(base).__name__} must have values, got the meta device")
    fused = FusedHead(base, head) if existing is None else existing  # of a deep copy, or under ZeRO-3
    try:
        if not any(hasattr(p, "ds_id") for p in head.parameters()):  # ZeRO-3 sets ds_id on parameters it partitions
            _measure(fused, model)
    except BaseException:
        if existing is None:
            fused.remove()
        raise
    return fused


def _measure(fused: FusedHead, model: Any) -> None:
    """Measure the logits of `model`, which may be wrapped."""
    # Under FSDP, call the outermost unit, because only its call gathers the parameters outside other units.
    root = next(filter(is_fsdp_unit, _unwrap(model)), fused.model)
    fused.measure(root)
    # FSDP2 keeps the root's parameters gathered for a backward. An optimizer that is made now would get these temporary
    # parameters, and train nothing.
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def base_model(model: Any) -> Any:
    """Return the transformers model inside wrappers of DDP, FSDP1, DeepSpeed, torch.compile and PEFT."""
    *_, base = _unwrap(model)
    return base


def _unwrap(model: Any) -> Iterator[Any]:
    """Yield the model, and every model inside its wrappers, the transformers model last."""
    while True:
        yield model
        data_parallel = isinstance(model, nn.parallel.DistributedDataParallel | FullyShardedDataParallel)
        if data_parallel or is_a(model, "deepspeed"):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif is_a(model, "peft") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return


def is_fused(model: nn.Module) -> bool:
    """True if the model takes `with_head`."""
    return _installed(base_model(model)) is not None


def _installed(model: Any) -> FusedHead | None:
    """Return the FusedHead of a transformers model, or None if it has none or lost its forward to pickle."""
    fused = vars(model).get(_ATTRIBUTE)
    return None if fused is None or lost_to_pickle(fused._wrapped) else fused


def lost_to_pickle(method: Any) -> bool:
    """True for a model's forward that we installed if the model was pickled and loaded since.

    Pickle saves a bound method by its name, which in the loaded model is the forward of its class.
    """
    return method.__func__ is type(method.__self__).forward


class FusedHead:
    """A model whose forward takes `with_head`. The head module is replaced only during calls with `with_head`."""

    def __init__(self, model: Any, head: Any) -> None:
        self.model = model
        self.head = head
        self._options: LogitOptions | None = None
        self._measured: tuple[Any, ...] = ()  # `_identity` at the measurement of the options
        self._forward = model.forward

        # `generate` and Trainer inspect the signature of forward, so keep it by `wraps`. accelerate takes the function
        # out of the bound method and binds it again, so the function needs the model as its first argument.
        @functools.wraps(type(model).forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Look the FusedHead up in `self`, because a copy of the model has a FusedHead of its own.
            return vars(self)[_ATTRIBUTE]._call(*args, **kwargs)

        self._wrapped = types.MethodType(forward, model)
        model.forward = self._wrapped
        setattr(model, _ATTRIBUTE, self)

    @property
    def options(self) -> LogitOptions:
        """The operations that the model applies to its logits. Raise a HeadError before the first measurement."""
        if self._options is None:
            raise HeadError(
                "FusedHead.options: model must be fused before ZeRO-3 partitions it, or called once with `with_head`, "
                "got neither"
            )
        return self._options

    def __str__(self) -> str:
        """Describe the head in a few words, such as "head 151936 x 896 float32, LoRA"."""
        modules = take_apart(self.head)
        weight = modules.linear.weight
        rows, columns = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3 keeps the shape of a partitioned weight
        parts = [f"head {rows} x {columns} {dtype_name(weight.dtype)}"]
        parts += ["LoRA"] * (modules.lora is not None) + ["trained tokens"] * (modules.tokens is not None)
        parts += ["bias"] * (getattr(modules.linear, "bias", None) is not None)
        if self._options is not None:
            scale, softcap, vocab_size = self._options.kwargs().values()
            parts += [f"logit scale {scale:g}"] * (scale != 1)
            parts += [] if softcap is None else [f"soft-cap {softcap:g}"]
            parts += [f"vocabulary {vocab_size}"] * (vocab_size != rows)
        return ", ".join(parts)

    def measure(self, call: Callable[..., Any]) -> LogitOptions:
        """Measure the operations that the model applies to its logits, and check the fused log-probs.

        Args:
            call: the model, or a wrapper that gathers its parameters.

        Raises:
            HeadError: `LogitOptions` cannot express the operations, or the fused log-probs differ from the
                log-probs of the model's logits.
        """
        self.head = self.model.get_output_embeddings()
        probe = functools.partial(self._probe, call)
        options = measure(self.model, self.head, probe)
        compare(self.model, self.head, probe, options)
        self._options, self._measured = options, self._identity()
        return options

    def is_measured(self) -> bool:
        """False before the first measurement, which a deep copy makes anew."""
        return self._options is not None

    def is_outdated(self) -> bool:
        """True if the head or a number of the model changed since the measurement."""
        return self.is_measured() and self._measured != self._identity()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_options": None, "_measured": ()}  # of a copy

    def _identity(self) -> tuple[Any, ...]:
        """Return everything that the options depend on: the head, and the numbers of the model and its configuration.

        Numbers whose name ends in "_id" are left out. Trainers set them, and they do not change logits.
        """
        config = self.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        owners = (self.model, getattr(self.model, "base_model", self.model), config, text)
        numbers = [
            (name, x)
            for owner in owners
            for name, x in vars(owner).items()
            if isinstance(x, int | float) and not isinstance(x, bool) and not name.endswith("_id")
        ]
        return *identity(self.head), *numbers

    def remove(self) -> None:
        """Restore the model's forward. A second call does nothing.

        Raises:
            HeadError: another wrapper encloses the forward that `fuse_head` installed. Remove that wrapper first.
        """
        if _ATTRIBUTE not in vars(self.model):
            return
        if vars(self.model).get("forward") != self._wrapped:
            raise HeadError("FusedHead.remove: model.forward must be the one that fuse_head installed, got another one")
        if getattr(self._forward, "__func__", None) is type(self.model).forward:
            del self.model.forward  # the class's forward becomes visible again
        else:
            self.model.forward = self._forward
        delattr(self.model, _ATTRIBUTE)

    def _call(self, *args: Any, with_head: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        if with_head is None:
            return self._forward(*args, **kwargs)
        if isinstance(with_head, _Probe):
            return self._forward_with(with_head.function, *args, **kwargs)
        if kwargs.get("labels") is not None:
            Checks("fuse_head").fail("labels", "None in a call with with_head, which makes no logits", kwargs["labels"])
        self.head = self.model.get_output_embeddings()
        options = self._options
        if options is None or self.is_outdated():
            options = self.measure(self._call)  # calling self.model would run its hooks a second time
        captured: list[Tensor] = []

        def capture(hidden: Tensor) -> Tensor:
            captured.append(hidden)
            return hidden.new_zeros(*hidden.shape[:-1], 1)  # [B, T, 1], in place of the logits

        output = self._forward_with(capture, *args, **kwargs)
        # With a device_map, `with_head` gets the hidden states on the device of the model's inputs, where its targets
        # are. The losses move all of them to the device of the head, and the results back.
        inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *captured)
        device = next(x.device for x in inputs if isinstance(x, Tensor))

        def function(hidden: Tensor) -> Any:
            return with_head(hidden.to(device), self.head, **options.kwargs())

        return HeadOutput(call_inside(self.head, function, captured[0]), output)

    def _forward_with(self, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward with `function` in place of its head. The hooks of the head do not fire."""
        parents = [(m, name) for m in self.model.modules() for name, x in m._modules.items() if x is self.head]
        stand_in = _StandIn(self.head, function)
        try:
            for module, name in parents:
                module._modules[name] = stand_in
            output = self._forward(*args, **kwargs)
        finally:
            for module, name in parents:
                module._modules[name] = self.head
        if stand_in.calls != 1:
            # `copy.deepcopy` does not copy closures. TRL's forward is one that holds the original model.
            copied = " (is this a deep copy of a trainer's model? Its forward calls the original: use pickle instead)"
            raise HeadError(
                f"fuse_head: the forward of {type(self.model).__name__} must call its output embeddings once, "
                f"got {stand_in.calls} calls{'' if stand_in.calls else copied}"
            )
        return output

    def _probe(self, call: Callable[..., Any], function: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the model on two tokens with `function` in place of its head; return the model's logits [1, 2, columns].

        Gradients, random number generators and quantized weights do not change.
        """
        device = next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))
        ids = torch.arange(2, device=device)[None]  # [1, 2]
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
    """A `with_head` for measurements: the model makes its logits from the result of `function`."""

    function: Callable[[Tensor], Tensor]


class _StandIn(nn.Module):
    """A replacement of the head module. Its forward is `function`. All other attributes are taken from the head."""

    def __init__(self, head: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self).update(head=head, function=function, calls=0)  # nn.Module would register the head as a submodule

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.function(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["head"], name)


def logit_options(model: nn.Module) -> Mapping[str, Any]:
    """Return the operations that `model` applies to its logits, as keyword arguments of the losses.

    For training loops that compute the hidden states without `with_head`. Arguments and errors are the same as in
    `fuse_head`. Afterwards the model is fused only if it was fused before.
    """
    was_fused = is_fused(model)
    fused = fuse_head(model)
    try:
        if fused.is_outdated():
            _measure(fused, model)
        return fused.options.kwargs()
    finally:
        if not was_fused:
            fused.remove()
