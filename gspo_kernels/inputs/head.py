"""Check, cast and flatten the arguments that determine log-probs: `HeadArguments` to `HeadRows`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import memory
from ..backends.dispatch import pick_backend
from ..backends.precision import AUTOCAST_DEVICES
from ..backends.rows import HeadRows, NeedsGradient
from ..backends.workspace import cache_limit, workspace_bytes
from ..layout import accumulator
from ..ranks.collectives import sum_gradient
from ..ranks.dtensors import is_dtensor, local_hidden, local_rows
from ..ranks.shards import Shard, columns_over, shard_over
from ..validation import FLOATS, HALF, TensorChecks, Unquoted, positive, up_to_five
from .lm_head import Head, HeadModules, resolve, weight_of

HEAD_PRECISIONS = ("fp32", "bf16x3")  # the values of `head_precision` besides None


class HeadArguments(NamedTuple):
    """Arguments that determine log-probs, with the head taken apart. `linear_log_probs` documents them."""

    hidden: Tensor
    lm_head: Tensor | HeadModules
    target_ids: Tensor
    mask: Tensor | None
    bias: Tensor | None
    logit_scale: float
    logit_softcap: float | None
    temperature: float | Tensor
    vocab_size: int | None
    entropy: bool
    gradient_budget: float
    cache_mib: float | None
    backend: str
    head_precision: str | None = None
    tp_group: Any = None  # a process group of several ranks
    reduce_hidden: str = "all"


class HeadInputs(NamedTuple):
    """The arguments after they are checked, cast as autocast would cast them, and flattened."""

    rows: HeadRows
    needs: NeedsGradient  # all False when gradients are disabled
    gradient_budget: float  # 0 if nothing needs a gradient, because a budget only changes the backward
    cache_bytes: int  # `cache_mib` in bytes; 0 if nothing needs a gradient
    backend: str  # "torch" or "triton"


def head_rows(check: TensorChecks, arguments: HeadArguments) -> HeadInputs:
    """Check, cast and flatten the arguments. `check` names the public function in error messages."""
    target_ids = arguments.target_ids
    tp_group = arguments.tp_group
    hidden = arguments.hidden
    we_sum_gradient = not is_dtensor(hidden)  # the model sums the gradient of a DTensor
    if not we_sum_gradient:
        hidden = local_hidden(check, hidden, tp_group)
    check.budget(arguments.gradient_budget)
    check.choice("reduce_hidden", arguments.reduce_hidden, ("all", "none"))
    precision = arguments.head_precision
    if precision is not None:
        check.choice("head_precision", precision, HEAD_PRECISIONS)
    text = "[B, T, H] or [N, H]"
    check.tensor("hidden", hidden, dtypes=FLOATS, shapes=[(None, None, None), (None, None)], shape_text=text)
    shape, device = hidden.shape[:-1], hidden.device
    like_hidden = lambda: f"{list(shape)} like hidden"  # noqa: E731
    check.tensor("target_ids", target_ids, dtypes=[torch.int64], shapes=[shape], shape_text=like_hidden, device=device)
    mask = target_ids != -100 if arguments.mask is None else arguments.mask
    mask = check.mask(mask, shapes=[shape], shape_text=lambda: str(list(shape)), device=device)
    if hidden.shape[-1] == 0:
        check.fail("hidden", "a tensor [B, T, H] or [N, H] with H >= 1", hidden)
    rows = hidden.flatten(0, -2)  # [N, H]
    if tp_group is not None and we_sum_gradient and arguments.reduce_hidden == "all":
        rows = sum_gradient(rows, tp_group)
    lm_head, bias = arguments.lm_head, arguments.bias
    whole_weight = weight_of(lm_head)
    from_bf16 = rows.dtype == torch.bfloat16
    if precision is not None and rows.dtype in HALF and getattr(whole_weight, "dtype", None) == torch.float32:
        rows = rows.float()
    if isinstance(lm_head, HeadModules):
        head = resolve(check, lm_head, bias, rows, mask.reshape(-1), tp_group)
    else:
        head = Head(
            weight=local_rows(lm_head) if is_dtensor(lm_head) else lm_head,
            bias=local_rows(bias) if is_dtensor(bias) else bias,
        )
    weight, bias = head.weight, head.bias
    if precision is None:
        rows, weight, bias = _autocast(rows, weight, bias)
    check.head(weight, bias, rows, has_precision=precision is not None)
    weight_item = head.weight.element_size() if weight.dtype != head.weight.dtype else 0
    backend = pick_backend(check, arguments.backend, device, rows.dtype)
    split = ""
    if precision == "bf16x3" and rows.dtype == torch.float32 and backend == "triton":
        split = "weight" if from_bf16 else "both"
    softcap, vocab_size = arguments.logit_softcap, arguments.vocab_size
    columns = weight.shape[0] if tp_group is None else columns_over(tp_group, whole_weight)
    check.logit_options(arguments.logit_scale, softcap, vocab_size, columns)
    columns = columns if vocab_size is None else int(vocab_size)
    _check_ids(check, target_ids, mask, columns)
    temperature = _temperature(check, arguments.temperature, mask, rows)
    needs = _needed_by_autograd(rows, weight, bias, head.adapter_hidden, head.adapter_weight)
    if any(needs):
        saved = {"hidden": rows, "lm_head": weight, "bias": bias, "target_ids": target_ids, "mask": mask}
        check.not_made_in_inference_mode(**saved)
    checked = HeadRows(
        hidden=rows,
        weight=weight,
        bias=bias,
        adapter_hidden=head.adapter_hidden,
        adapter_weight=head.adapter_weight,
        target_ids=target_ids.reshape(-1),
        mask=mask.reshape(-1),
        temperature=temperature,
        logit_scale=float(arguments.logit_scale),
        logit_softcap=None if softcap is None else float(softcap),
        vocab_size=columns,
        entropy=arguments.entropy,
        workspace=workspace_bytes(),
        split=split,
    )
    if tp_group is not None:
        checked = _of_shard(checked, shard_over(tp_group, whole_weight, columns))
    largest = partial(memory.largest_default_cache, checked, needs, backend, weight_item)
    return HeadInputs(
        rows=checked,
        needs=needs,
        gradient_budget=float(arguments.gradient_budget) if any(needs) else 0.0,
        cache_bytes=cache_limit(check, arguments.cache_mib, device, any(needs), largest),
        backend=backend,
    )


def _of_shard(head: HeadRows, shard: Shard) -> HeadRows:
    """Keep this rank's columns. A rank that holds only padding computes one column, which is ignored."""
    target_ids = head.target_ids - shard.first
    return head._replace(target_ids=target_ids, vocab_size=max(shard.columns(), 1), shard=shard.text)


def _check_ids(check: TensorChecks, target_ids: Tensor, mask: Tensor, columns: int) -> None:
    """Check that unmasked ids are between 0 and columns - 1."""
    wrong = mask & (target_ids != target_ids.clamp(0, columns - 1))
    expected = lambda: f"between 0 and {columns - 1} where mask is true"  # noqa: E731
    check.flag("target_ids", wrong, expected, lambda: sorted(set(target_ids[wrong].tolist()))[:5])


def _temperature(check: TensorChecks, temperature: float | Tensor, mask: Tensor, hidden: Tensor) -> Tensor | None:
    """Check the temperature. Return it as a tensor [] or [N], or None if it is 1. Values must be finite and > 0."""
    if not isinstance(temperature, Tensor):
        expected = "a finite number > 0, within float32, or a tensor with no dimension or one value per token"
        check.number("temperature", temperature, expected, positive)
        if temperature == 1:
            return None
        return hidden.new_full((), float(temperature), dtype=accumulator(hidden.dtype))
    shape = list(mask.shape)
    text = lambda: f"with no dimension, or {shape} (one per token)"  # noqa: E731
    shapes, device = [(), mask.shape], mask.device
    check.tensor("temperature", temperature, dtypes=FLOATS, shapes=shapes, shape_text=text, device=device)
    if temperature.requires_grad:
        check.fail("temperature", "without gradient (it is a constant of the loss)", Unquoted("requires_grad=True"))
    temperature = temperature.to(accumulator(hidden.dtype))
    valid = (temperature > 0) & temperature.isfinite()
    wrong = mask & ~valid
    check.flag(
        "temperature",
        wrong,
        "finite and > 0 where mask is true",
        lambda: up_to_five(temperature.expand_as(mask)[wrong]),
    )
    # On a GPU bad values raise no error. They give NaN log-probs, like a bad id.
    return torch.where(valid, temperature, torch.nan).reshape(-1 if temperature.ndim else ())


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast operands as F.linear does under autocast."""
    kind = hidden.device.type
    if kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: Any) -> Any:
        """Cast a floating-point tensor to autocast's dtype. fp64 and other objects are returned unchanged."""
        eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return cast(hidden), cast(weight), cast(bias)


def _needed_by_autograd(*operands: Tensor | None) -> NeedsGradient:
    """Return whether each operand needs a gradient, in the order of `NeedsGradient`. All are False under no_grad."""
    if not torch.is_grad_enabled():
        return NeedsGradient(False, False, False, False, False)
    return NeedsGradient(*[x is not None and x.requires_grad for x in operands])
