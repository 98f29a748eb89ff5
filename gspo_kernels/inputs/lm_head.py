"""Which modules count as a head: a weight, `nn.Linear`, and PEFT's wrappers around one.

Modules that we cannot fully reproduce are rejected: another forward than `hidden @ weight.T + bias`, hooks, a LoRA
variant, a sharded weight. The error names the reason. `call_inside` runs a function as the module's own forward, so
that its hooks fire; inside it, hooks are no reason to reject.
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
    """Run `function` as the module's forward, so that its hooks fire; its result is the module's output.

    ZeRO-3 also hooks the layers inside a PEFT head, each for its own parameters: their hooks fire too.
    """
    for module in reversed(take_apart(lm_head).called):
        if module is lm_head or _hooked_by_zero(module):
            function = functools.partial(_call_as, module, function)
    return function(hidden)


_running = threading.local()


def _call_as(module: nn.Module, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """Call the module with `function` as its forward. The real forward is back before `function` runs."""
    replaced, outer = vars(module).get("forward"), getattr(_running, "modules", ())

    def restore() -> None:
        _running.modules = outer
        vars(module).pop("forward", None)
        if replaced is not None:
            module.forward = replaced

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
    """Return whether all hooks are DeepSpeed's, which gather parameters and reduce gradients; False without hooks."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    owners = [str(hook.__module__) for kind in kinds for hook in kind.values()]
    return bool(owners) and all(owner.startswith("deepspeed.") for owner in owners)


def resolve(call: Call, lm_head: Any, bias: Tensor | None, hidden: Tensor, mask: Tensor) -> Head:
    """Return the tensors of a weight or a module, for rows `hidden` [N, H] with `mask` [N]."""
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
        weight, module_bias = _trained_rows(call, tokens)
        return Head(weight, module_bias if bias is None else bias)
    bias = module.bias if bias is None else bias
    if lora is None or not _adapts(call, lora):
        return Head(module.weight, bias)
    call.weight(module.weight, hidden)
    return Head(module.weight, bias, *_low_rank_term(call, lora, hidden, mask))


def take_apart(lm_head: nn.Module) -> Parts:
    """Return the layer inside PEFT's wrappers, and every module that a call of the head calls."""
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
    """Return the class name of a PEFT module, without importing PEFT; None for other modules."""
    return type(module).__name__ if type(module).__module__.startswith("peft.") else None


def _active(layer: Any) -> list[str]:
    """Return which of a PEFT layer's adapters are active."""
    adapters = layer.lora_A if hasattr(layer, "lora_A") else layer.trainable_tokens_delta
    return [name for name in layer.active_adapters if name in adapters]


def _adapts(call: Call, layer: Any) -> bool:
    """Return whether PEFT's layer adds something to the layer inside, which already holds merged adapters."""
    if layer.merged and layer.disable_adapters:
        call.fail("lm_head", "an adapter that is unmerged before it is disabled", Said("merged and disabled weights"))
    return not (layer.merged or layer.disable_adapters) and bool(_active(layer))


def _trained_rows(call: Call, tokens: Any) -> tuple[Tensor, Tensor | None]:
    """Return a copy of the weight [V, H] with PEFT's trained rows in place, differentiable, and the bias."""
    active = _active(tokens)
    for name in active:
        call.whole(tokens.trainable_tokens_delta[name])
    weight, bias = tokens.get_merged_weights(active), tokens.base_layer.bias
    if bias is not None:  # PEFT 0.21 drops it (peft #3649), a later one may not: what it makes of nothing is the bias
        bias = tokens.forward_adapters(weight.new_zeros(1, weight.shape[1]), active)[0]
    return weight, bias


def _more_than_linear(module: Any, parts: list[Any]) -> Iterator[str]:
    """Yield, in words, each reason why calling the head is more than a linear map."""

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
    """Return LoRA's term of the logits: scaled h A^T [N, R] and B [V, R], active adapters side by side."""
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
