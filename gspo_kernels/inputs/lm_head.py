"""Take the tensors of a head from its module: an `nn.Linear`, or one of PEFT's wrappers around an `nn.Linear`.

Modules that we cannot fully reproduce are rejected: those with a forward other than `hidden @ weight.T + bias`, with
hooks, with a LoRA variant, or with a sharded weight. The error names the reason. `call_inside` runs a function as the
module's forward, so that the module's hooks fire. While it runs, a module with hooks is accepted.

Wrappers of FSDP, PEFT, DeepSpeed and accelerate are recognized without importing these packages, even if `fully_shard`
has replaced the class of a module with a subclass.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layout import accumulator
from ..ops.adapter import adapter_product
from ..ranks.collectives import sum_gradient
from ..ranks.dtensors import is_dtensor, local, local_rows
from ..validation import TensorChecks, Unquoted


class Head(NamedTuple):
    """The tensors of a head."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None = None  # [N, R]: LoRA's h A^T, scaled
    adapter_weight: Tensor | None = None  # [V, R]: LoRA's B


class HeadModules(NamedTuple):
    """The modules of a head."""

    linear: Any  # the innermost layer
    lora: Any  # PEFT's LoRA layer around `linear`, or None
    tokens: Any  # PEFT's layer that trains a few rows of the weight of `linear`, or None
    called: list[Any]  # every module that runs in the head's forward, the head itself first


def call_inside(lm_head: nn.Module, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """Run `function` as the module's forward, so that the module's hooks fire, and return the module's output.

    The hooks of `parallelize_module` expect a DTensor as the module's output, so only its input hooks fire: they
    gather hidden states that are sharded over tokens. `function` receives a plain tensor.

    Modules inside a PEFT head may be FSDP units of their own, or have hooks of ZeRO-3 or accelerate. Their forwards are
    nested in the same way. So all parameters of the head are gathered while `function` runs, and FSDP and ZeRO-3 reduce
    all of their gradients.
    """
    for module in reversed(take_apart(lm_head).called):
        if module is lm_head or _must_be_called(module):
            function = functools.partial(_call_as, module, function)
    return function(hidden)


_running = threading.local()  # `modules`: the modules whose forward `call_inside` is running in this thread


def _call_as(module: nn.Module, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """Call the module with `function` as its forward. The original forward is restored before `function` runs."""
    inner = unwrapped(module)  # FSDP1's wrapper gathers parameters in its own forward, which must run
    # accelerate's forward moves tensors to the device of the module, and then calls this one.
    name = "_old_forward" if placed_by_accelerate(inner) else "forward"
    original, outer = vars(inner).get(name), getattr(_running, "modules", ())

    def restore() -> None:
        _running.modules = outer
        vars(inner).pop(name, None)
        if original is not None:
            setattr(inner, name, original)

    def temporary_forward(x: Tensor) -> Any:
        restore()
        _running.modules = (*outer, module)
        return function(local(x))

    setattr(inner, name, temporary_forward)
    try:
        with _output_hooks_of_tensor_parallelism_removed(module):
            return module(hidden)
    finally:
        restore()


@contextlib.contextmanager
def _output_hooks_of_tensor_parallelism_removed(module: nn.Module) -> Iterator[None]:
    """Remove the hooks by which `parallelize_module` converts the module's output."""
    hooks = module._forward_hooks
    before = dict(hooks)
    of_output = {key for key, hook in before.items() if getattr(hook, "__module__", "") == _DISTRIBUTE_MODULE}
    for key in of_output:
        del hooks[key]
    try:
        yield
    finally:
        if of_output:  # also restore the order of the hooks
            now = {key: hook for key, hook in before.items() if key in hooks or key in of_output} | dict(hooks)
            hooks.clear()
            hooks.update(now)


_DISTRIBUTE_MODULE = "torch.distributed.tensor._api"  # where `parallelize_module` defines its hooks


def is_a(module: Any, package: str, name: str = "") -> bool:
    """True if the module is an instance of the class `name` of `package`, which need not be imported."""
    classes = [cls for cls in type(module).__mro__ if f"{cls.__module__}.".startswith(f"{package}.")]
    return any(cls.__name__ == name or not name for cls in classes)


def unwrapped(module: Any) -> Any:
    """Strip FSDP1's wrappers from a module."""
    while is_a(module, _FSDP, "FullyShardedDataParallel"):
        module = module.module
    return module


_FSDP = "torch.distributed.fsdp"


def is_fsdp_unit(module: Any) -> bool:
    """True if calling the module gathers parameters: FSDP1's wrapper, or a module after `fully_shard`."""
    return is_a(module, _FSDP, "FullyShardedDataParallel") or is_a(module, _FSDP, "FSDPModule")


def placed_by_accelerate(module: Any) -> bool:
    """True if accelerate moves inputs to the device of the module (`device_map`), or loads its weights."""
    return "_hf_hook" in vars(module) and "_old_forward" in vars(module)


def _must_be_called(module: Any) -> bool:
    """True if calling the module makes its parameters available, and has no other effect.

    FSDP, ZeRO-3 and accelerate gather, load or move parameters, and FSDP and ZeRO-3 reduce their gradients.
    """
    inner = unwrapped(module)
    hooks = [hook for x in {module, inner} for kind in _kinds_of_hooks(x) for hook in kind.values()]
    known = all(owner(hook).startswith((f"{_FSDP}.", "deepspeed.")) for hook in hooks)
    return known and (bool(hooks) or module is not inner or placed_by_accelerate(inner))


def _kinds_of_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def owner(hook: Any) -> str:
    """Name of the Python module that defines a hook."""
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))  # `func` of a functools.partial


def opened(lm_head: Tensor | nn.Module) -> Tensor | HeadModules:
    """Take a module apart. A weight is returned unchanged."""
    return take_apart(lm_head) if isinstance(lm_head, nn.Module) else lm_head


def weight_of(lm_head: Tensor | HeadModules) -> Any:
    """The weight of a head, or None if its module has none."""
    return getattr(lm_head.linear, "weight", None) if isinstance(lm_head, HeadModules) else lm_head


def device_map(lm_head: Tensor | HeadModules) -> torch.device | None:
    """Device to which accelerate moves the head's input; None without accelerate's hooks."""
    if not isinstance(lm_head, HeadModules) or not any(placed_by_accelerate(unwrapped(x)) for x in lm_head.called):
        return None
    return getattr(weight_of(lm_head), "device", None)


def moved(values: Any, device: torch.device) -> Any:
    """Move all tensors of a named tuple to `device`, including those in dictionaries."""

    def move(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: move(value) for name, value in x.items()}
        return x.to(device) if isinstance(x, Tensor) else x

    return type(values)(*map(move, values))


def resolve(
    check: TensorChecks, modules: HeadModules, bias: Tensor | None, hidden: Tensor, mask: Tensor, tp_group: Any
) -> Head:
    """Take the tensors of a module, for `hidden` [N, H] with `mask` [N].

    If the vocabulary is sharded over `tp_group`, the tensors are this rank's, and A is replicated.
    """
    module, lora, tokens, called = modules
    check.unsharded(local_rows(getattr(module, "weight", None)))
    for reason in _reasons_to_reject(module, called):
        check.fail(
            "lm_head",
            "a weight [V, H], or an nn.Linear (plain, or in PEFT's LoRA Linear, ModulesToSaveWrapper or "
            "TrainableTokensWrapper) without hooks or a custom forward; if yours is only "
            "hidden @ weight.T + bias, pass its weight and bias",
            Unquoted(reason),
            TypeError,
        )
    if bias is not None and module.bias is not None:
        check.fail("bias", "None, because lm_head has a bias", bias)
    if tokens is not None and _adapts(check, tokens):
        if tp_group is not None:
            got = Unquoted("trainable_token_indices")
            check.fail("lm_head", "a weight, an nn.Linear or LoRA, because it is sharded over ranks", got)
        weight, module_bias = _trained_rows(check, tokens)
        return Head(weight, module_bias if bias is None else bias)
    weight, bias = local_rows(module.weight), local_rows(module.bias if bias is None else bias)
    if lora is None or not _adapts(check, lora):
        return Head(weight, bias)
    check.weight(weight, hidden)
    return Head(weight, bias, *_low_rank_term(check, lora, hidden, mask, tp_group))


def take_apart(lm_head: nn.Module) -> HeadModules:
    """Find the innermost layer, PEFT's layer around it, and every module that runs in the head's forward."""
    called, lora, tokens = [lm_head], None, None
    module: Any = unwrapped(lm_head)

    def enter(child: Any) -> Any:
        called.append(child)
        return unwrapped(child)

    if _is_peft(module, "ModulesToSaveWrapper"):
        saved, active = module.modules_to_save, module.active_adapters
        trained = bool(active) and not module.disable_adapters and active[0] in saved
        module = enter(saved[active[0]] if trained else module.original_module)
    if _is_peft(module, "TrainableTokensWrapper"):
        module = enter(module.token_adapter)
    if _is_peft(module, "TrainableTokensLayer"):
        tokens, module = module, enter(module.base_layer)
    elif _is_peft(module, "Linear") and hasattr(module, "lora_A"):
        lora, module = module, enter(module.base_layer)
        for name in _active(lora) if not (lora.merged or lora.disable_adapters) else ():
            called += [lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]]
    return HeadModules(module, lora, tokens, called)


def _is_peft(module: Any, name: str) -> bool:
    """True if the module is an instance of PEFT's class `name` and its forward is the forward of that class."""
    forward = type(module).forward
    classes = [cls for cls in type(module).__mro__ if cls.__name__ == name and cls.__module__.startswith("peft.")]
    return any(cls.forward is forward for cls in classes)


def _active(layer: Any) -> list[str]:
    """Names of a PEFT layer's active adapters."""
    adapters = layer.lora_A if hasattr(layer, "lora_A") else layer.trainable_tokens_delta
    return [name for name in layer.active_adapters if name in adapters]


def _adapts(check: TensorChecks, layer: Any) -> bool:
    """True if PEFT's layer has an active adapter that is not merged into the weight of the layer inside."""
    if layer.merged and layer.disable_adapters:
        check.fail(
            "lm_head",
            "a head whose adapter is unmerged before it is disabled",
            Unquoted("a disabled adapter that is still merged into the weight"),
        )
    return not (layer.merged or layer.disable_adapters) and bool(_active(layer))


def _trained_rows(check: TensorChecks, tokens: Any) -> tuple[Tensor, Tensor | None]:
    """Copy the weight [V, H], with PEFT's trained rows in it; differentiable. Also return the bias [V]."""
    active = _active(tokens)
    for name in active:
        delta = tokens.trainable_tokens_delta[name]
        check.unsharded(delta)
        if delta.is_meta:
            check.fail(
                "lm_head", "a head whose trained rows are not offloaded by accelerate", Unquoted("them offloaded")
            )
    weight, bias = tokens.get_merged_weights(active), tokens.base_layer.bias
    if bias is not None:
        # PEFT 0.21 drops the bias (peft #3649), but a later version may add it. So take the bias from the layer itself:
        # it is the layer's output for a row of zeros.
        with torch.autocast(weight.device.type, enabled=False):
            bias = tokens.forward_adapters(weight.new_zeros(1, weight.shape[1]), active)[0]
    return weight, bias


def _replicated(check: TensorChecks, x: Any) -> Tensor:
    """Replace an unsharded DTensor by its local tensor. Other tensors are returned unchanged."""
    if is_dtensor(x) and any(placement.is_shard() for placement in x.placements):
        expected = "a LoRA head with a gathered A (under FSDP, call inside the module's forward)"
        check.fail("lm_head", expected, Unquoted(f"a DTensor with placements {tuple(x.placements)}"))
    return local(x)


def _reasons_to_reject(module: Any, called: list[Any]) -> Iterator[str]:
    """Yield each reason to reject the head.

    Reasons: the innermost layer is not an nn.Linear; a module has a custom or replaced forward, or hooks.
    """

    def name(x: Any) -> str:
        return f"{type(x).__module__}.{type(x).__name__}"

    if not isinstance(module, nn.Linear):
        yield name(module)
    for outer in called:
        x = unwrapped(outer)
        if isinstance(x, nn.Linear) and type(x).forward is not nn.Linear.forward:
            yield f"{name(x)} with a custom forward"
        elif outer in getattr(_running, "modules", ()):
            continue
        elif outer is not x:
            yield f"{name(x)} in {name(outer)}, which gathers its parameters only inside the module's forward"
        elif "forward" in vars(x):
            yield f"{name(x)} with a replaced forward"
        elif x._forward_hooks or x._forward_pre_hooks:
            yield f"{name(x)} with forward hooks"
        elif x._backward_hooks or x._backward_pre_hooks:
            yield f"{name(x)} with backward hooks"


def _low_rank_term(
    check: TensorChecks, lora: Any, hidden: Tensor, mask: Tensor, tp_group: Any
) -> tuple[Tensor, Tensor]:
    """Compute the factors of LoRA's term of the logits: scaled h A^T, [N, R], and B, [V, R].

    R is the sum of the ranks of all active adapters.
    """
    hidden_parts, weight_parts = [], []
    for name in _active(lora):
        variant = getattr(lora, "lora_variant", {}).get(name)
        lora_a, lora_b = lora.lora_A[name], lora.lora_B[name]
        if variant is not None or lora_b.bias is not None:
            unsupported = "a LoRA bias" if variant is None else type(variant).__name__
            expected = "plain LoRA (no DoRA or other variant, no LoRA bias)"
            check.fail("lm_head", expected, Unquoted(f"adapter {name!r} with {unsupported}"))
        left, right = _replicated(check, lora_a.weight), local_rows(lora_b.weight)
        if tp_group is not None:  # the gradient of A is a sum over the columns of all ranks
            left = sum_gradient(left, tp_group)
        dtype = torch.promote_types(accumulator(hidden.dtype), left.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            dropped = lora.lora_dropout[name](hidden.to(dtype))
        hidden_parts.append(adapter_product(dropped, left.to(dtype), mask) * lora.scaling[name])
        weight_parts.append(right)
    with torch.autocast(hidden.device.type, enabled=False):  # under bf16 autocast, `cat` refuses fp16 on a CPU
        return torch.cat(hidden_parts, -1), torch.cat(weight_parts, -1)
