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
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from gspo_kernels.inputs.lm_head import call_inside, is_a, is_fsdp_unit, placed_by_accelerate, take_apart
from gspo_kernels.validation import Checks, Unquoted, dtype_name, values_are_checked

from .head_options import HeadError, LogitOptions, compare, generators_restored, identity, measure, packing_prevented
from .rows import is_flash_attention, text_config

_ATTRIBUTE = "_gspo_fused_head"


class HeadOutput(NamedTuple):
    """The return value of a model call with `with_head`."""

    result: Any  # the return value of `with_head`; hooks find its tensors only if it is a tensor, tuple, list or dict
    model_output: Any  # the model's output with aux_loss, router_logits, ...; ignore its logits, they are placeholders


def fuse_head(model: nn.Module) -> FusedHead:
    """Add the keyword argument `with_head` to the model's forward, and return the model's FusedHead.

    A second call returns the same FusedHead. If the head is replaced, resized or hooked later, or a number of the model
    or its configuration changes (`logit_scale`, `final_logit_softcapping`), the next call of the model with `with_head`
    measures and checks the head again. A hook of the head must always do the same: if it begins to change the logits in
    another way, nothing notices it.

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
    check_model("fuse_head", model)
    base = base_model(model)
    existing = fused_head_of(base)
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


def check_model(place: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        Checks(place).fail("model", "a transformers model", model, TypeError)


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
    """Strip the wrappers of DDP, FSDP1, DeepSpeed, torch.compile and PEFT from a transformers model."""
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
    return fused_head_of(base_model(model)) is not None


def fused_head_of(model: Any) -> FusedHead | None:
    """The FusedHead of a transformers model; None if it has none or lost its forward to pickle.

    Pickle saves a bound method by its name, which in the loaded model is the forward of its class.
    """
    fused = vars(model).get(_ATTRIBUTE)
    return None if fused is None or fused._forwards[-1].__func__ is type(model).forward else fused


class FusedHead:
    """A model whose forward takes `with_head`. The head module is replaced only during calls with `with_head`.

    Attributes:
        model, head: the transformers model, and its output embeddings at the last call.
        fused_lm_head: answers calls of the model with `fused_lm_head=True`, which TRL makes. It gets `run`, with its
            first argument set, and the other arguments of the call. If None, the wrapped forward gets such calls.
    """

    def __init__(self, model: Any, head: Any) -> None:
        self.model = model
        self.head = head
        self.fused_lm_head: Callable[..., Any] | None = None
        self._options: LogitOptions | None = None
        self._measured: tuple[Any, ...] = ()  # `_identity` at the measurement of the options
        self._forwards: list[Any] = []  # the model's forwards that we installed, the outermost last
        setattr(model, _ATTRIBUTE, self)
        self.install()

    def install(self) -> None:
        """Wrap the model's forward. May be called again once another wrapper encloses ours."""
        wrapped = self.model.forward

        # `generate` and Trainer inspect the signature of forward, so keep it by `wraps`. accelerate takes the function
        # out of the bound method and binds it again, so the function needs the model as its first argument.
        @functools.wraps(type(self.model).forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            # `model` may be a deep copy, which has a FusedHead of its own.
            call = _method_of(model, wrapped)
            fused = vars(model).get(_ATTRIBUTE)
            if fused is None:  # removed, while another wrapper still calls this function
                return call(*args, **kwargs)
            if fused.fused_lm_head is not None and kwargs.pop("fused_lm_head", False):
                return fused.fused_lm_head(functools.partial(fused.run, call), *args, **kwargs)
            with_head = kwargs.pop("with_head", None)
            return call(*args, **kwargs) if with_head is None else fused.run(call, *args, with_head=with_head, **kwargs)

        forward.wrapped = wrapped  # pyright: ignore[reportAttributeAccessIssue] - a function
        self.model.forward = types.MethodType(forward, self.model)
        self._forwards.append(self.model.forward)

    def is_outermost(self) -> bool:
        """True if no other wrapper encloses our forward, except accelerate's, which passes all calls on."""
        # accelerate stores the forward inside its wrapper as `_original_forward`.
        return self._forwards[-1] in (self.model.forward, vars(self.model).get("_original_forward"))

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
        """False before the first measurement. A deep copy starts unmeasured."""
        return self._options is not None

    def is_outdated(self) -> bool:
        """True if the head or a number of the model changed since the measurement."""
        return self.is_measured() and self._measured != self._identity()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_options": None, "_measured": ()}  # of a copy

    def _identity(self) -> tuple[Any, ...]:
        """Everything that the options depend on: the head, and the numbers of the model and its configuration.

        NumPy numbers and tensors without dimensions count as numbers. The version of a tensor tells whether it was
        changed in place, without reading its value from the device. Numbers whose name ends in "_id" are left out:
        trainers set them, and they do not change logits.
        """
        config = self.model.config
        owners = (self.model, getattr(self.model, "base_model", self.model), config, text_config(config))
        attributes = [(name, x) for owner in owners for name, x in vars(owner).items() if not name.endswith("_id")]
        numbers = [(name, x) for name, x in attributes if isinstance(x, Number) and not isinstance(x, bool)]
        tensors = [(name, x) for name, x in attributes if isinstance(x, Tensor) and x.ndim == 0]
        for own in (self.model._parameters, self.model._buffers):
            tensors += [(name, x) for name, x in own.items() if x is not None and x.ndim == 0]
        trained = [name for name, x in tensors if x.requires_grad]
        if trained:
            raise HeadError(
                f"fuse_head: {trained[0]} of {type(self.model).__name__} must not be trained, because the scale of "
                "logits gets no gradient from the losses, got requires_grad=True"
            )
        return *identity(self.head), *numbers, *((name, x, x._version) for name, x in tensors)

    def remove(self) -> None:
        """Restore the model's forward. A second call does nothing.

        Raises:
            HeadError: another wrapper encloses the forward that `fuse_head` installed. Remove that wrapper first.
        """
        if _ATTRIBUTE not in vars(self.model):
            return
        if len(self._forwards) > 1 or vars(self.model).get("forward") != self._forwards[-1]:
            raise HeadError("FusedHead.remove: model.forward must be the one that fuse_head installed, got another one")
        wrapped = _method_of(self.model, self._forwards[-1].wrapped)
        if getattr(wrapped, "__func__", None) is type(self.model).forward:
            del self.model.forward  # the class's forward becomes visible again
        else:
            self.model.forward = wrapped
        delattr(self.model, _ATTRIBUTE)

    def run(self, forward: Callable[..., Any], *args: Any, with_head: Callable[..., Any], **kwargs: Any) -> Any:
        """Call the model's `forward`, but give the hidden states to `with_head` instead of computing logits."""
        if isinstance(with_head, _Probe):
            return self._forward_with(forward, with_head.function, *args, **kwargs)
        if not callable(with_head):
            got = Unquoted(f"a {type(with_head).__name__}")
            Checks("fuse_head").fail("with_head", "a function of hidden states, head and options", got, TypeError)
        if kwargs.get("labels") is not None:
            Checks("fuse_head").fail("labels", "None in a call with with_head, which makes no logits", kwargs["labels"])
        _check_packed(self.model, args, kwargs)
        self.head = self.model.get_output_embeddings()
        options = self._options
        if options is None or self.is_outdated():
            options = self.measure(functools.partial(self.run, forward))  # self.model would run its hooks twice
        captured: list[Tensor] = []

        def capture(hidden: Tensor) -> Tensor:
            captured.append(hidden)
            return hidden.new_zeros(*hidden.shape[:-1], 1)  # [B, T, 1], in place of the logits

        output = self._forward_with(forward, capture, *args, **kwargs)
        # With a device_map, `with_head` gets the hidden states on the device of the model's inputs, where its targets
        # are. The losses move all of them to the device of the head, and the results back.
        inputs = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *captured)
        device = next(x.device for x in inputs if isinstance(x, Tensor))

        def function(hidden: Tensor) -> Any:
            return with_head(hidden.to(device), self.head, **options.kwargs())

        return HeadOutput(call_inside(self.head, function, captured[0]), output)

    def _forward_with(
        self, forward: Callable[..., Any], function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """Run `forward` with `function` in place of the model's head. The hooks of the head do not fire."""
        parents = [(m, name) for m in self.model.modules() for name, x in m._modules.items() if x is self.head]
        stand_in = _StandIn(self.head, function)
        try:
            for module, name in parents:
                module._modules[name] = stand_in
            output = forward(*args, **kwargs)
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
        autocast = torch.autocast(device.type, enabled=False)
        with generators_restored(self.model), torch.no_grad(), autocast, packing_prevented(self.model):
            output = call(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                return_dict=True,
                with_head=_Probe(function),
            )
        return output.logits


def _check_packed(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse packed sequences that would attend to each other.

    transformers keeps sequences apart where position_ids begin again. With a cache or an attention_mask [B, T] it
    silently does not. The attention of the flash-attn package does, unless the row has padding. Masks that the caller
    has built, such as [B, 1, T, T], are used as they are.
    """
    if torch.compiler.is_compiling():  # reading values would break the graph
        return
    names = inspect.signature(type(model).forward).parameters
    inputs: dict[str, Any] = {**dict(zip([*names][1:], args, strict=False)), **kwargs}
    positions = inputs.get("position_ids")
    mask: Any = inputs.get("attention_mask")
    has_mask = isinstance(mask, Tensor) and mask.ndim == 2
    use_cache = inputs.get("use_cache")
    use_cache = getattr(text_config(model.config), "use_cache", False) if use_cache is None else use_cache
    if use_cache and model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        use_cache = False  # as in transformers
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return
    if not has_mask and inputs.get("attention_mask") is not None:
        return
    if not has_mask and not use_cache and inputs.get("past_key_values") is None:
        return
    is_flash = is_flash_attention(model.config)
    if is_flash and (not has_mask or len(positions) > 1):
        return
    # On a GPU, the host waits for the values. So check only single rows, because several rows are rarely packed.
    # transformers waits for single rows, too, if there is neither a mask nor a cache.
    if len(positions) > 1 and not values_are_checked(positions.device):
        return
    if is_flash and mask.all():
        return
    begins = positions[:, 1:] <= positions[:, :-1]
    if has_mask and mask.shape == positions.shape:  # positions of padding may be anything
        begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if begins.any().item():
        packed = "for packed sequences (position_ids begin again, which transformers ignores otherwise)"
        check = Checks("fuse_head")
        if has_mask:
            check.fail("attention_mask", f"None {packed}", mask)
        check.fail("use_cache", f"False {packed}", True)


def _method_of(model: Any, forward: Any) -> Any:
    """Bind the forward to `model`, which may be a deep copy of the model that it belongs to."""
    function = getattr(forward, "__func__", None)
    return forward if function is None else types.MethodType(function, model)


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
    """The operations that `model` applies to its logits, as keyword arguments of the losses.

    For training loops that compute the hidden states without `with_head`. Arguments and errors are the same as in
    `fuse_head`. Afterwards the model is fused only if it was fused before.
    """
    check_model("logit_options", model)
    was_fused = is_fused(model)
    fused = fuse_head(model)
    try:
        if fused.is_outdated():
            _measure(fused, model)
        return fused.options.kwargs()
    finally:
        if not was_fused:
            fused.remove()
