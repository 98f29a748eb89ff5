"""`linear_log_probs`: hidden states and a head to the log-probs of given ids, without holding the logits.

Everything about a head is here: which modules are understood, what of a LoRA adapter enters the computation, and how
autocast casts the operands. A head that cannot be honoured exactly is refused, never read in part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .layout import HeadRows, accumulator
from .validation import FLOATS, Call


class LogProbOutput(NamedTuple):
    """Log-probs and entropies in nats, fp32 (fp64 for fp64 hidden states), 0 at masked positions."""

    log_probs: Tensor  # shape of target_ids
    entropy: Tensor | None  # shape of target_ids; None unless asked for


def linear_log_probs(
    hidden: Tensor,
    lm_head: Tensor | nn.Module,
    target_ids: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    entropy: bool = False,
    backend: str = "auto",
) -> LogProbOutput:
    """Log-probability of each target id under `softmax(softcap(logit_scale * (h W^T + bias)) / temperature)`.

    Differentiable with respect to hidden states, head, bias and LoRA adapter; the backward recomputes the logits and
    skips rows whose upstream gradient is zero. A row's value does not depend, in any bit, on the other rows, on
    `entropy` or on whether gradients are recorded. A second derivative raises.

    Args:
        hidden: [B, T, H] or [N, H], fp32, bf16, fp16 or fp64. hidden[t] predicts target_ids[t]: nothing is shifted
            here.
        lm_head: weight [V, H] of the same dtype, an `nn.Linear`, or a PEFT LoRA or modules_to_save wrapper around one.
        target_ids: [B, T] or [N] int64. Where masked anything may stand; it is never used as an index.
        mask: [B, T] or [N], bool or 0/1: the tokens that count. None: target_ids != -100. Masked rows cost nothing.
        bias: [V], if it is not the module's own.
        logit_scale: multiplies the logits (Cohere, Granite).
        logit_softcap: c in c * tanh(logits / c) (Gemma 2), None for none.
        temperature: divides the capped logits; a number, a tensor with no dimension, or one value per token.
        vocab_size: columns from here on are padding and get no probability. None: all V.
        entropy: also return the entropy of each distribution, in nats, differentiable.
        backend: "triton", "torch" or "auto"; an explicit choice never falls back.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. On accelerators an id out of range
            is not looked for (unless GSPO_CHECK=1); its log-prob is NaN.
    """
    call = Call("linear_log_probs")
    _, head, backend = head_rows(
        call,
        hidden,
        lm_head,
        target_ids,
        mask,
        bias,
        logit_scale,
        logit_softcap,
        temperature,
        vocab_size,
        entropy,
        backend,
    )
    out = ops.linear_log_probs(head, backend)
    shape = target_ids.shape
    return LogProbOutput(out.log_probs.view(shape), out.entropy.view(shape) if entropy else None)


def head_rows(
    call: Call,
    hidden: Tensor,
    lm_head: Tensor | nn.Module,
    target_ids: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    logit_scale: float,
    logit_softcap: float | None,
    temperature: float | Tensor,
    vocab_size: int | None,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, HeadRows, str]:
    """Check and flatten what makes log-probs. Returns (how many values are invalid, rows, backend that runs)."""
    call.tensor(
        "hidden",
        hidden,
        dtypes=FLOATS,
        shapes=[(None, None, None), (None, None)],
        shape_text="[B, T, H] or [N, H]",
    )
    shape, device = hidden.shape[:-1], hidden.device
    call.tensor(
        "target_ids",
        target_ids,
        dtypes=[torch.int64],
        shapes=[shape],
        shape_text=f"{list(shape)} like hidden",
        device=device,
    )
    mask, invalid = token_mask(call, mask, target_ids, device)
    call.boolean("entropy", entropy)
    backend = ops.pick_backend(call, backend, device)

    flat = hidden.reshape(-1, hidden.shape[-1])
    weight, bias, adapter_hidden, adapter_weight = _resolve(call, lm_head, bias, flat)
    flat, weight, bias = _autocast(flat, weight, bias)
    call.head(weight, bias, flat)
    call.logit_options(logit_scale, logit_softcap, vocab_size, weight.shape[0])
    columns = weight.shape[0] if vocab_size is None else vocab_size

    wrong = mask & ((target_ids < 0) | (target_ids >= columns))
    invalid = invalid + call.flag(
        "target_ids",
        wrong,
        f"between 0 and {columns - 1} where mask is true",
        lambda: sorted(set(target_ids[wrong].tolist()))[:5],
    )
    call.temperature(temperature, shape, device)
    divisor, bad = _temperature(call, temperature, mask, flat)
    return (
        invalid + bad,
        HeadRows(
            flat, weight, bias, adapter_hidden, adapter_weight, target_ids.reshape(-1), mask.reshape(-1),
            divisor, float(logit_scale),
            None if logit_softcap is None else float(logit_softcap), columns, entropy,
        ),
        backend,
    )  # fmt: skip


def token_mask(call: Call, mask: Tensor | None, like: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The mask as bool, in the shape of `like`, and how many of its values are neither 0 nor 1."""
    if mask is None:
        mask = like != -100 if like.dtype == torch.int64 else torch.ones_like(like, dtype=torch.bool)
    shape = like.shape
    call.tensor("mask", mask, dtypes=(torch.bool, *FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8),
    shapes=[shape],
                shape_text=str(list(shape)), device=device)  # fmt: skip
    if mask.dtype == torch.bool:
        return mask, torch.zeros((), dtype=torch.int64, device=device)
    wrong = (mask != 0) & (mask != 1)
    return mask != 0, call.flag("mask", wrong, "0 or 1", lambda: mask[wrong][:5].tolist())


def _temperature(
    call: Call, temperature: float | Tensor, mask: Tensor, hidden: Tensor
) -> tuple[Tensor | None, Tensor | int]:
    """The temperature as a tensor, None for 1; and how many of its values are not finite and > 0."""
    if not isinstance(temperature, Tensor):
        dtype = accumulator(hidden.dtype)
        return None if temperature == 1 else hidden.new_full((), temperature, dtype=dtype), 0
    temperature = temperature.to(accumulator(hidden.dtype))
    wrong = mask & ~((temperature > 0) & temperature.isfinite())
    bad = call.flag(
        "temperature",
        wrong,
        "finite and > 0 where mask is true",
        lambda: temperature.expand_as(mask)[wrong][:5].tolist(),
    )
    # Where nobody looked, a bad temperature gives NaN, as a bad id does.
    return torch.where(temperature > 0, temperature, torch.nan).reshape(-1 if temperature.ndim else ()), bad


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as F.linear would under autocast."""
    if not torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _resolve(
    call: Call, lm_head: Tensor | nn.Module, bias: Tensor | None, hidden: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(weight, bias, adapter_hidden, adapter_weight) of a weight or a module."""
    if not isinstance(lm_head, nn.Module):
        return lm_head, bias, None, None
    peft_type = type(lm_head).__name__ if type(lm_head).__module__.startswith("peft.") else None
    module: Any = lm_head
    if peft_type == "ModulesToSaveWrapper":
        saved, active = module.modules_to_save, module.active_adapters
        trained = bool(active) and not module.disable_adapters and active[0] in saved
        return _resolve(call, saved[active[0]] if trained else module.original_module, bias, hidden)
    base: Any = module.base_layer if peft_type == "Linear" and hasattr(module, "lora_A") else module
    if not _is_plain_linear(base):
        call.fail(
            "lm_head",
            "a weight [V, H], an nn.Linear without hooks or an own forward, or PEFT's LoRA Linear or "
            "ModulesToSaveWrapper around one (if it computes hidden @ weight.T + bias, pass its weight and bias)",
            f"{type(base).__module__}.{type(base).__name__}",
            TypeError,
        )
    if bias is not None and base.bias is not None:
        call.fail("bias", "None, because lm_head has a bias of its own", f"a tensor {list(bias.shape)}")
    low_rank, adapter_weight = (None, None) if base is module else _lora(call, module, hidden)
    return base.weight, base.bias if bias is None else bias, low_rank, adapter_weight


def _is_plain_linear(module: Any) -> bool:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _lora(call: Call, module: Any, hidden: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """LoRA as one more low-rank term of the logits: the active adapters side by side, h A^T scaled, and B.

    h A^T is plain autograd in at least fp32, outside autocast: it is part of the logits, and those are not rounded.
    """
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.merged:
        if module.disable_adapters:
            call.fail(
                "lm_head",
                "an adapter that is unmerged before it is disabled",
                "merged and disabled LoRA weights",
            )
        return None, None  # the weight already holds them
    if module.disable_adapters or not names:
        return None, None
    hidden_parts, weight_parts = [], []
    for name in names:
        variant = getattr(module, "lora_variant", {}).get(name)
        lora_a, lora_b = module.lora_A[name], module.lora_B[name]
        if variant is not None or lora_b.bias is not None:
            what = "a LoRA bias" if variant is None else type(variant).__name__
            call.fail(
                "lm_head",
                "plain LoRA (no DoRA or other variant, no LoRA bias)",
                f"adapter {name!r} with {what}",
            )
        dtype = torch.promote_types(accumulator(hidden.dtype), lora_a.weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            low_rank = F.linear(module.lora_dropout[name](hidden.to(dtype)), lora_a.weight.to(dtype))
        hidden_parts.append(low_rank * module.scaling[name])
        weight_parts.append(lora_b.weight)
    return torch.cat(hidden_parts, -1), torch.cat(weight_parts, -1)
