"""Check, cast and flatten what makes log-probs: `HeadRows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..backends.dispatch import pick_backend
from ..backends.precision import AUTOCAST_DEVICES
from ..backends.rows import HeadRows
from ..layout import accumulator
from ..validation import FLOATS, Call, few
from .lm_head import resolve


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
