"""What a head is: a weight, or a module of which everything that makes its logits is understood.

A module is never read in part. What its call would do beyond `hidden @ weight.T + bias`, plain LoRA and rows that PEFT
trains (another forward, hooks, a LoRA variant, a sharded weight) is refused by name. From inside the module's own call
(`call_inside`) its hooks have done their part.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..backends.adapter import adapter_product
from ..layout import accumulator
from ..validation import Call, Said


class Head(NamedTuple):
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None = None  # [N, R]: LoRA's h A^T, scaled
    adapter_weight: Tensor | None = None  # [V, R]: LoRA's B


class Parts(NamedTuple):
    """A head module taken apart."""

    linear: Any  # the layer inside
    lora: Any  # PEFT's LoRA layer around it, or None
    tokens: Any  # PEFT's layer that trains some rows of it, or None
    called: list[Any]  # every module that a call of the head calls, the head first


def call_inside(lm_head: nn.Module, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """function(hidden) as the module's own call, hooks and all. What it returns is the module's output to them.

    ZeRO-3 hooks the layers inside a PEFT head as well, each for its own parameters: it is their call too.
    """
    for module in reversed(take_apart(lm_head).called):
        if module is lm_head or _hooked_by_zero(module):
            function = functools.partial(_call_as, module, function)
    return function(hidden)


_running = threading.local()


def _call_as(module: nn.Module, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """function(hidden) in place of the module's forward, which is there again for the function to call."""
    own, outer = vars(module).get("forward"), getattr(_running, "modules", ())

    def restore() -> None:
        _running.modules = outer
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own

    def instead(x: Tensor) -> Any:
        restore()
        _running.modules = (*outer, module)
        return function(x)

    module.forward = instead
    try:
        return module(hidden)
    finally:
        restore()


def _hooked_by_zero(module: nn.Module) -> bool:
    """Whether it has hooks of DeepSpeed, which gather parameters and reduce gradients, and no others."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    owners = [str(hook.__module__) for kind in kinds for hook in kind.values()]
    return bool(owners) and all(owner.startswith("deepspeed.") for owner in owners)


def resolve(call: Call, lm_head: Any, bias: Tensor | None, hidden: Tensor, mask: Tensor) -> Head:
    """The tensors of a weight or a module, for rows `hidden` [N, H] of which `mask` [N] count."""
    if not isinstance(lm_head, nn.Module):
        return Head(lm_head, bias)
    module, lora, tokens, parts = take_apart(lm_head)
    call.whole(getattr(module, "weight", None))
    for wrong in _more_than_linear(module, parts):
        call.fail(
            "lm_head",
            "a weight [V, H], or an nn.Linear (plain, or in PEFT's LoRA Linear, ModulesToSaveWrapper or "
            "TrainableTokensWrapper) without hooks or a forward of its own; if it only computes "
            "hidden @ weight.T + bias, pass those two",
            Said(wrong),
            TypeError,
        )
    if bias is not None and module.bias is not None:
        call.fail("bias", "None, because lm_head has a bias of its own", bias)
    if tokens is not None and _adapts(call, tokens):
        weight, own = _trained_rows(call, tokens)
        return Head(weight, own if bias is None else bias)
    bias = module.bias if bias is None else bias
    if lora is None or not _adapts(call, lora):
        return Head(module.weight, bias)
    call.weight(module.weight, hidden)
    return Head(module.weight, bias, *_low_rank_term(call, lora, hidden, mask))


def take_apart(lm_head: nn.Module) -> Parts:
    """The layer inside PEFT's wrappers, and all that their call comes to. Anything else is a layer by itself."""
    module: Any = lm_head
    called, lora, tokens = [module], None, None
    if _peft_name(module) == "ModulesToSaveWrapper":
        saved, active = module.modules_to_save, module.active_adapters
        trained = bool(active) and not module.disable_adapters and active[0] in saved
        module = saved[active[0]] if trained else module.original_module
        called.append(module)
    if _peft_name(module) == "TrainableTokensWrapper":
        module = module.token_adapter
        called.append(module)
    if _peft_name(module) == "TrainableTokensLayer":
        tokens, module = module, module.base_layer
        called.append(module)
    elif _peft_name(module) == "Linear" and hasattr(module, "lora_A"):
        lora, module = module, module.base_layer
        called.append(module)
        for name in _active(lora):
            called += [lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]]
    return Parts(module, lora, tokens, called)


def _peft_name(module: Any) -> str | None:
    """The class name of a PEFT module, without importing PEFT."""
    return type(module).__name__ if type(module).__module__.startswith("peft.") else None


def _active(layer: Any) -> list[str]:
    """The active adapters of those that a PEFT layer has."""
    own = layer.lora_A if hasattr(layer, "lora_A") else layer.trainable_tokens_delta
    return [name for name in layer.active_adapters if name in own]


def _adapts(call: Call, layer: Any) -> bool:
    """Whether PEFT's layer adds something to the layer inside, which holds merged adapters already."""
    if layer.merged and layer.disable_adapters:
        call.fail("lm_head", "an adapter that is unmerged before it is disabled", Said("merged and disabled weights"))
    return not (layer.merged or layer.disable_adapters) and bool(_active(layer))


def _trained_rows(call: Call, tokens: Any) -> tuple[Tensor, Tensor | None]:
    """The weight with PEFT's trained rows in their places, a copy [V, H] that passes gradients on; and the bias."""
    active = _active(tokens)
    for name in active:
        call.whole(tokens.trainable_tokens_delta[name])
    weight, bias = tokens.get_merged_weights(active), tokens.base_layer.bias
    if bias is not None:  # PEFT 0.21 drops it (peft #3649), a later one may not: what it makes of nothing is the bias
        bias = tokens.forward_adapters(weight.new_zeros(1, weight.shape[1]), active)[0]
    return weight, bias


def _more_than_linear(module: Any, parts: list[Any]) -> Iterator[str]:
    """What makes calling the head more than a linear map, in words."""

    def name(x: Any) -> str:
        return f"{type(x).__module__}.{type(x).__name__}"

    if not isinstance(module, nn.Linear):
        yield name(module)
    for part in parts:
        if isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward:
            yield f"{name(part)} with a forward of its own"
        elif part in getattr(_running, "modules", ()):
            continue
        elif "forward" in vars(part):
            yield f"{name(part)} with a replaced forward"
        elif part._forward_hooks or part._forward_pre_hooks:
            yield f"{name(part)} with forward hooks"
        elif part._backward_hooks or part._backward_pre_hooks:
            yield f"{name(part)} with backward hooks"


def _low_rank_term(call: Call, lora: Any, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """LoRA as one more low-rank term of the logits: the active adapters side by side, h A^T scaled, and B."""
    hidden_parts, weight_parts = [], []
    for name in _active(lora):
        variant = getattr(lora, "lora_variant", {}).get(name)
        lora_a, lora_b = lora.lora_A[name], lora.lora_B[name]
        if variant is not None or lora_b.bias is not None:
            what = "a LoRA bias" if variant is None else type(variant).__name__
            expected = "plain LoRA (no DoRA or other variant, no LoRA bias)"
            call.fail("lm_head", expected, Said(f"adapter {name!r} with {what}"))
        dtype = torch.promote_types(accumulator(hidden.dtype), lora_a.weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            dropped = lora.lora_dropout[name](hidden.to(dtype))
        hidden_parts.append(adapter_product(dropped, lora_a.weight.to(dtype), mask) * lora.scaling[name])
        weight_parts.append(lora_b.weight)
    return torch.cat(hidden_parts, -1), torch.cat(weight_parts, -1)
