"""What a head is: a weight, or a module of which everything that makes its logits is understood.

A module is never read in part. What its call would do beyond `hidden @ weight.T + bias` plus plain LoRA (another
forward, hooks, a LoRA variant, a sharded weight) is refused by name. From inside the module's own call (`own_call`) its
hooks have done their part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .layout import accumulator
from .portable_tiles import tile_shape
from .precision import exact_products, whole_columns
from .validation import Call, Said


class Head(NamedTuple):
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    adapter_hidden: Tensor | None = None  # [N, R]: LoRA's h A^T, scaled
    adapter_weight: Tensor | None = None  # [V, R]: LoRA's B


_running = threading.local()


@contextmanager
def own_call(module: nn.Module) -> Iterator[None]:
    """Inside `module`'s call: its forward is the caller's, and its hooks run around it."""
    before = getattr(_running, "module", None)
    _running.module = module
    try:
        yield
    finally:
        _running.module = before


def resolve(call: Call, lm_head: Any, bias: Tensor | None, hidden: Tensor, mask: Tensor) -> Head:
    """The tensors of a weight or a module, for rows `hidden` [N, H] of which `mask` [N] count."""
    if not isinstance(lm_head, nn.Module):
        return Head(lm_head, bias)
    module: Any = lm_head
    parts = [module]
    if _peft_name(module) == "ModulesToSaveWrapper":
        saved, active = module.modules_to_save, module.active_adapters
        trained = bool(active) and not module.disable_adapters and active[0] in saved
        module = saved[active[0]] if trained else module.original_module
        parts.append(module)
    lora = module if _peft_name(module) == "Linear" and hasattr(module, "lora_A") else None
    if lora is not None:
        module = lora.base_layer
        parts.append(module)
        for name in _active(lora):
            parts += [lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]]
    call.whole(getattr(module, "weight", None))
    for wrong in _more_than_linear(module, parts):
        call.fail(
            "lm_head",
            "a weight [V, H], or an nn.Linear (plain, or in PEFT's LoRA Linear or ModulesToSaveWrapper) without hooks "
            "or a forward of its own; if it only computes hidden @ weight.T + bias, pass those two",
            Said(wrong),
            TypeError,
        )
    if bias is not None and module.bias is not None:
        call.fail("bias", "None, because lm_head has a bias of its own", bias)
    bias = module.bias if bias is None else bias
    if lora is None:
        return Head(module.weight, bias)
    call.weight(module.weight, hidden)
    return Head(module.weight, bias, *_low_rank_term(call, lora, hidden, mask))


def _peft_name(module: Any) -> str | None:
    """The class name of a PEFT module, without importing PEFT."""
    return type(module).__name__ if type(module).__module__.startswith("peft.") else None


def _active(lora: Any) -> list[str]:
    return [name for name in lora.active_adapters if name in lora.lora_A]


def _more_than_linear(module: Any, parts: list[Any]) -> Iterator[str]:
    """What makes calling the head more than a linear map, in words."""

    def name(x: Any) -> str:
        return f"{type(x).__module__}.{type(x).__name__}"

    if not isinstance(module, nn.Linear):
        yield name(module)
    for part in parts:
        if part is getattr(_running, "module", None):
            continue
        if isinstance(part, nn.Linear) and type(part).forward is not nn.Linear.forward:
            yield f"{name(part)} with a forward of its own"
        elif "forward" in vars(part):
            yield f"{name(part)} with a replaced forward"
        elif part._forward_hooks or part._forward_pre_hooks:
            yield f"{name(part)} with forward hooks"
        elif part._backward_hooks or part._backward_pre_hooks:
            yield f"{name(part)} with backward hooks"


def _low_rank_term(call: Call, lora: Any, hidden: Tensor, mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """LoRA as one more low-rank term of the logits: the active adapters side by side, h A^T scaled, and B."""
    if lora.merged:
        if lora.disable_adapters:
            got = Said("merged and disabled LoRA weights")
            call.fail("lm_head", "an adapter that is unmerged before it is disabled", got)
        return None, None  # the weight already holds them
    if lora.disable_adapters or not _active(lora):
        return None, None
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
        hidden_parts.append(_adapter(dropped, lora_a.weight.to(dtype), mask) * lora.scaling[name])
        weight_parts.append(lora_b.weight)
    return torch.cat(hidden_parts, -1), torch.cat(weight_parts, -1)


# h A^T is part of the logits, so it keeps their promises: never rounded, blind to masked rows, and the same bits in any
# batch. A plain F.linear keeps none of them.


def _adapter_op(x: Tensor, lora_a: Tensor, mask: Tensor) -> Tensor:
    index, tile_rows = mask.nonzero()[:, 0], tile_shape(x.device, x.dtype)[0]
    out = x.new_zeros(x.shape[0], lora_a.shape[0])
    tile = x.new_zeros(tile_rows, x.shape[1])
    right = whole_columns(lora_a).t()
    with exact_products(x.device):
        for rows in index.split(tile_rows):
            tile[: len(rows)], tile[len(rows) :] = x[rows], 0
            out[rows] = torch.mm(tile, right)[: len(rows), : lora_a.shape[0]]
    return out


def _adapter_backward_op(x: Tensor, lora_a: Tensor, mask: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    index = (mask & (d_out != 0).any(1)).nonzero()[:, 0]
    d_x, d_rows = torch.zeros_like(x), d_out[index]
    with exact_products(x.device):
        d_x[index] = torch.mm(d_rows, lora_a)
        return d_x, torch.mm(d_rows.t(), x[index])


_adapter: Any = torch.library.custom_op("gspo_kernels::adapter", _adapter_op, mutates_args=())
_adapter_backward: Any = torch.library.custom_op(
    "gspo_kernels::adapter_backward", _adapter_backward_op, mutates_args=()
)
_adapter.register_fake(lambda x, lora_a, mask: x.new_empty(x.shape[0], lora_a.shape[0]))
_adapter_backward.register_fake(lambda x, lora_a, mask, d_out: (torch.empty_like(x), torch.empty_like(lora_a)))
_adapter.register_autograd(
    lambda ctx, d_out: (*_adapter_backward(*ctx.saved_tensors, d_out), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
