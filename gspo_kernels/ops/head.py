"""The operators of a head: `linear_log_probs_op`, and `head_backward_op`, the backward of all operators with a head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import metrics
from ..backends.dispatch import implementation
from ..backends.live_tiles import exact_work
from ..backends.rows import Cache, Cached, HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient
from ..layout import accumulator
from ..ranks.shards import shard_of
from .tuples import Operator, restore, save

Gradients = dict[str, Tensor | None]  # by the name of the operator's argument


# -- log-probs


class LogProbsResult(NamedTuple):
    """Log-probs and entropies, and what the forward keeps for the backward."""

    head: HeadResult
    cached: Cached


@Operator
def linear_log_probs_op(head: HeadRows, gradient_budget: float, cache_bytes: int, backend: str) -> LogProbsResult:
    """Compute log-probs and entropies of rows. Both are differentiable."""
    kernels = implementation(backend)
    rows = kernels.cache_rows(head, cache_bytes) if cache_bytes else 0
    cache = Cache(rows, head.mask) if rows else None
    return LogProbsResult(*kernels.forward_and_cache(head, gradient_budget > 0, cache))


@linear_log_probs_op.fake
def fake_log_probs(head: HeadRows, gradient_budget: float, cache_bytes: int, backend: str) -> LogProbsResult:
    log_probs = head.hidden.new_empty(head.hidden.shape[0], dtype=accumulator(head.hidden.dtype))  # [N]
    entropy = log_probs.new_empty(log_probs.shape[0] if head.entropy else 0)
    result = HeadResult(log_probs, entropy, torch.empty_like(log_probs), torch.empty_like(log_probs))
    kernels = implementation(backend)
    cached = kernels.empty_cached(head, gradient_budget > 0, kernels.cache_rows(head, cache_bytes))
    return LogProbsResult(result, cached)


def _save_log_probs(ctx: Any, inputs: list[Any], result: LogProbsResult) -> None:
    """Save the inputs and the result for the backward."""
    head, ctx.gradient_budget, _, ctx.backend = inputs
    ctx.mark_non_differentiable(result.head.shift, result.head.log_total, *result.cached)
    save(ctx, head, *result)


def _differentiate_log_probs(ctx: Any, upstream: LogProbsResult, needs: dict[str, bool]) -> Gradients:
    """Compute the gradients of the head's operands from the gradients of log-probs and entropies."""
    head, result, cached = restore(ctx)
    d_log_probs, d_entropy = upstream.head.log_probs, upstream.head.entropy if head.entropy else None
    if d_entropy is not None and ctx.gradient_budget > 0:
        raise ValueError(
            "linear_log_probs: gradient_budget must be 0 if the entropies have a gradient, because the budget does not "
            f"bound its error, got {ctx.gradient_budget}; detach the entropies if they are only logged"
        )
    # The caller's gradients of masked rows may be anything, including NaN.
    if d_log_probs is None:
        d_log_probs = torch.zeros_like(result.log_probs)
    else:
        d_log_probs = torch.where(head.mask, d_log_probs, 0)
    if d_entropy is not None:
        d_entropy = torch.where(head.mask, d_entropy, 0)
    needed = needed_gradients(needs)
    every = all_columns(head.hidden.device)
    budget = ctx.gradient_budget
    out = head_backward_op(head, result, cached, d_log_probs, d_entropy, every, budget, needed, ctx.backend)
    metrics.record_backward(out.work, d_hidden=needed.hidden, d_weight=needed.weight)
    return by_argument(out.gradients, needed)


linear_log_probs_op.autograd(_save_log_probs, _differentiate_log_probs)


# -- the backward


def all_columns(device: torch.device) -> LiveTiles:
    """The LiveTiles of an exact backward: all columns of every row with a gradient."""
    return LiveTiles(
        order=torch.empty(0, dtype=torch.int64, device=device),
        cells=torch.empty(0, 0, dtype=torch.bool, device=device),
        counts=torch.empty(0, dtype=torch.int64, device=device),
    )


class BackwardResult(NamedTuple):
    """Gradients of a head's operands, and how much was computed."""

    gradients: HeadGradients
    work: Tensor  # [6] fp64: the fields of `live_tiles.Work`; [0] if the caller chose the cells


@Operator
def head_backward_op(
    head: HeadRows,
    result: HeadResult,
    cached: Cached,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    live_tiles: LiveTiles,
    gradient_budget: float | None,
    needs: NeedsGradient,
    backend: str,
) -> BackwardResult:
    """Compute the gradients of a head's operands. Gradients that are not needed are empty tensors.

    If `gradient_budget` is not None, `live_tiles` is not used: the cells to compute are chosen here.
    """
    kernels = implementation(backend)
    work = d_log_probs.new_empty(0, dtype=torch.float64)
    if gradient_budget is not None:
        cell = kernels.cell_shape(head) if gradient_budget > 0 else None
        if cell is not None:
            live_tiles, work_parts = kernels.choose(head, result, d_log_probs, cached, cell, gradient_budget)
        else:
            has_gradient = d_log_probs != 0 if d_entropy is None else (d_log_probs != 0) | (d_entropy != 0)
            work_parts = exact_work(head, has_gradient, cached)
        work = torch.stack(work_parts)
    if head.shard and not shard_of(head.shard).columns():  # this rank holds only padding of the vocabulary
        operands = zip((getattr(head, name) for name in HeadGradients._fields), needs, strict=True)
        gradients = HeadGradients(*(torch.zeros_like(x) if needed else None for x, needed in operands))
    else:
        gradients = kernels.head_backward(head, result, d_log_probs, d_entropy, needs, live_tiles, cached)
    return BackwardResult(without_none(head, gradients), work)


@head_backward_op.fake
def _fake_gradients(
    head: HeadRows,
    result: HeadResult,
    cached: Cached,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    live_tiles: LiveTiles,
    gradient_budget: float | None,
    needs: NeedsGradient,
    backend: str,
) -> BackwardResult:
    gradients = empty_gradients(head, needs)
    return BackwardResult(gradients, head.hidden.new_empty(0 if gradient_budget is None else 6, dtype=torch.float64))


head_backward_op.no_autograd(
    lambda head, result, cached, d_log_probs, d_entropy, live_tiles, gradient_budget, needs, backend: (
        "gspo_fused_loss" if gradient_budget is None else "linear_log_probs"
    )
)


def without_none(head: HeadRows, gradients: HeadGradients) -> HeadGradients:
    """Replace gradients that are None by empty tensors, because operators return tensors."""
    return HeadGradients(*[head.hidden.new_empty(0) if x is None else x for x in gradients])


def empty_gradients(head: HeadRows, needs: NeedsGradient) -> HeadGradients:
    """Allocate the gradients that a fake backward returns: like the operands, or [0] if not needed."""

    def like(operand: Tensor | None, needed: bool) -> Tensor:
        if operand is None or not needed:
            return head.hidden.new_empty(0)
        return torch.empty_like(operand, memory_format=torch.contiguous_format)

    return HeadGradients(*(like(getattr(head, name), getattr(needs, name)) for name in HeadGradients._fields))


def needed_gradients(needs: dict[str, bool]) -> NeedsGradient:
    """Which operands need a gradient, given which arguments of a forward operator do."""
    return NeedsGradient(*(needs[f"head_{name}"] for name in NeedsGradient._fields))


def by_argument(gradients: HeadGradients, needed: NeedsGradient) -> Gradients:
    """The gradients that are needed, by their argument names in the forward operators."""
    return {f"head_{name}": x for name, x in gradients._asdict().items() if getattr(needed, name)}
