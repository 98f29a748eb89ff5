"""`linear_log_probs`: hidden states and a head to the log-probs of given ids, without holding the logits.

What a head may be stands in `head.py`; here its arguments are checked, cast as autocast would, and flattened to rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import ops
from .backends import pick_backend
from .head import resolve
from .layout import HeadRows, accumulator
from .precision import AUTOCAST_DEVICES
from .validation import FLOATS, Call, few


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
        lm_head: weight [V, H] of the same dtype, an `nn.Linear`, or PEFT's LoRA, modules_to_save or
            trainable_token_indices around one; the last costs a copy of the weight.
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
        shape_text=lambda: f"{list(shape)} like hidden",
        device=device,
    )
    mask, invalid = token_mask(call, mask, target_ids, device)
    call.boolean("entropy", entropy)
    backend = pick_backend(call, backend, device)

    if hidden.shape[-1] == 0:
        call.fail("hidden", "a tensor [B, T, H] or [N, H] with H >= 1", hidden)
    flat = hidden.flatten(0, -2)
    head = resolve(call, lm_head, bias, flat, mask.reshape(-1))
    flat, weight, bias = _autocast(flat, head.weight, head.bias)
    call.head(weight, bias, flat)
    call.logit_options(logit_scale, logit_softcap, vocab_size, weight.shape[0])
    columns = weight.shape[0] if vocab_size is None else int(vocab_size)

    wrong = mask & ((target_ids < 0) | (target_ids >= columns))
    invalid = invalid + call.flag(
        "target_ids",
        wrong,
        lambda: f"between 0 and {columns - 1} where mask is true",
        lambda: sorted(set(target_ids[wrong].tolist()))[:5],
    )
    call.temperature(temperature, shape, device)
    divisor, bad = _temperature(call, temperature, mask, flat)
    return (
        invalid + bad,
        HeadRows(
            flat, weight, bias, head.adapter_hidden, head.adapter_weight, target_ids.reshape(-1), mask.reshape(-1),
            divisor, float(logit_scale),
            None if logit_softcap is None else float(logit_softcap), columns, entropy,
        ),
        backend,
    )  # fmt: skip


def token_mask(call: Call, mask: Tensor | None, like: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The mask as bool, in the shape of `like`, and how many of its values are neither 0 nor 1."""
    if mask is None:
        mask = like != -100 if like.dtype == torch.int64 else torch.ones_like(like, dtype=torch.bool)
    return call.mask(mask, shapes=[like.shape], shape_text=lambda: str(list(like.shape)), device=device)


def _temperature(
    call: Call, temperature: float | Tensor, mask: Tensor, hidden: Tensor
) -> tuple[Tensor | None, Tensor | int]:
    """The temperature as a tensor, None for 1; and how many of its values are not finite and > 0."""
    if not isinstance(temperature, Tensor):
        dtype = accumulator(hidden.dtype)
        return None if temperature == 1 else hidden.new_full((), float(temperature), dtype=dtype), 0
    temperature = temperature.to(accumulator(hidden.dtype))
    wrong = mask & ~((temperature > 0) & temperature.isfinite())
    bad = call.flag(
        "temperature",
        wrong,
        "finite and > 0 where mask is true",
        lambda: few(temperature.expand_as(mask)[wrong]),
    )
    # Where nobody looked, a bad temperature gives NaN, as a bad id does.
    return torch.where(temperature > 0, temperature, torch.nan).reshape(-1 if temperature.ndim else ()), bad


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as F.linear would under autocast."""
    kind = hidden.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: Any) -> Any:  # what it cannot cast is left to `Call.head` to refuse
        eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return cast(hidden), cast(weight), cast(bias)
