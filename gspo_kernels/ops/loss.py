"""The operators of a loss: `policy_loss_op` from log-probs, and `fused_loss_op` from hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import metrics
from ..backends.dispatch import implementation
from ..backends.live_tiles import exact_work, work_of_all_ranks
from ..backends.precision import multiply_no_nan, without_autocast
from ..backends.rows import Cache, Cached, HeadResult, HeadRows, LiveTiles, PolicyResult, PolicyRows
from ..layout import segment_sum, sequence_of_row
from ..objective import Objective
from ..ranks.collectives import gather
from .head import Gradients, all_columns, by_argument, fake_log_probs, head_backward_op, needed_gradients
from .tuples import NAMESPACE, Operator, restore, save

# -- the loss of log-probs


def _sum_over_ranks(x: Tensor, group: str) -> Tensor:
    return gather(x, group).sum(0)


_sum_op: Any = torch.library.custom_op(f"{NAMESPACE}::sum_over_ranks", _sum_over_ranks, mutates_args=())
_sum_op.register_fake(lambda x, group: torch.empty_like(x))  # a graph cannot resolve the name of a group


def mean_over_ranks(x: Tensor, mask: Tensor, group: str) -> Tensor:
    """Compute the mean of `x` where `mask` is True, over all ranks of a group ("": this rank only), [] fp64.

    The mean of nothing is 0.
    """
    sums = torch.stack([torch.where(mask, x.double(), 0).sum(), mask.sum().double()])
    total, count = (_sum_op(sums, group) if group else sums).unbind()
    return total / count.clamp(min=1)


@Operator
def policy_loss_op(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective, backend: str
) -> PolicyResult:
    """Compute the loss of rows, and its coefficients and metrics. Only the loss is differentiable."""
    with without_autocast(log_probs.device):
        # If sequences are sharded over ranks, the torch backend computes the loss.
        kernels = implementation("torch" if policy.group else backend)
        return kernels.policy_forward(log_probs, entropy, mask, policy, objective)


@policy_loss_op.fake
def _fake_policy(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective, backend: str
) -> PolicyResult:
    rows = log_probs.shape[0]
    return PolicyResult(
        loss=log_probs.new_empty(()),
        log_ratio=log_probs.new_empty(rows if objective.ratio == "token" else policy.offsets.shape[0] - 1),
        coefficient=torch.empty_like(log_probs),
        entropy_coefficient=log_probs.new_empty(rows if objective.entropy_coef != 0 else 0),
        metrics=log_probs.new_empty(len(metrics.NAMES) + bool(policy.group), dtype=torch.float64),
    )


def _save_policy_loss(ctx: Any, inputs: list[Any], result: PolicyResult) -> None:
    """Save the coefficients for the backward."""
    log_probs, *_ = inputs
    ctx.mark_non_differentiable(*(x for name, x in result._asdict().items() if name != "loss"))
    ctx.save_for_backward(log_probs, result.coefficient, result.entropy_coefficient)


def _differentiate_policy_loss(ctx: Any, upstream: PolicyResult, needs: dict[str, bool]) -> Gradients:
    """Compute the gradients of log-probs and entropies from the gradient of the loss."""
    if upstream.loss is None:
        return {}
    log_probs, coefficient, entropy_coefficient = ctx.saved_tensors
    scaled = scale_op(log_probs, coefficient, entropy_coefficient, upstream.loss)
    has_entropy = needs["entropy"] and scaled.entropy.numel() > 0
    return {"log_probs": scaled.log_probs, "entropy": scaled.entropy if has_entropy else None}


policy_loss_op.autograd(_save_policy_loss, _differentiate_policy_loss)


# -- the upstream gradient


class Coefficients(NamedTuple):
    """Derivatives of the loss, or of what the caller computes from it."""

    log_probs: Tensor  # [N]
    entropy: Tensor  # [N]; [0] without an entropy bonus


@Operator
def scale_op(log_probs: Tensor, coefficient: Tensor, entropy_coefficient: Tensor, d_loss: Tensor) -> Coefficients:
    """Multiply the coefficients by the upstream gradient.

    `log_probs` is not used. As a parameter, it puts this operator, which has no derivative, into the graph of a double
    backward, which therefore raises an error. Without it, a double backward would silently lack a term.
    """
    return Coefficients(multiply_no_nan(coefficient, d_loss), multiply_no_nan(entropy_coefficient, d_loss))


@scale_op.fake
def _fake_scale(log_probs: Tensor, coefficient: Tensor, entropy_coefficient: Tensor, d_loss: Tensor) -> Coefficients:
    return Coefficients(torch.empty_like(coefficient), torch.empty_like(entropy_coefficient))


scale_op.no_autograd(lambda *_: "policy_loss")


# -- the loss of hidden states


class FusedResult(NamedTuple):
    """All results of the forward: of the head, of the policy loss, and what the backward needs."""

    head: HeadResult
    policy: PolicyResult
    live_tiles: LiveTiles
    work: Tensor  # [6] fp64: the fields of `live_tiles.Work`; [0] if the backward is exact and recomputes all logits
    cached: Cached  # without tile_mass


@Operator
def fused_loss_op(
    head: HeadRows, policy: PolicyRows, objective: Objective, gradient_budget: float, cache_bytes: int, backend: str
) -> FusedResult:
    """Compute log-probs and loss of rows, and choose the cells of the backward. Only the loss is differentiable."""
    kernels = implementation(backend)
    cached_rows = kernels.cache_rows(head, cache_bytes) if cache_bytes else 0
    cache = Cache(cached_rows, may_have_gradient(head.mask, policy, objective)) if cached_rows else None
    result, cached = kernels.forward_and_cache(head, gradient_budget > 0, cache)
    entropy = result.entropy if head.entropy else None
    with without_autocast(head.hidden.device):
        loss_kernels = implementation("torch") if policy.group else kernels
        loss = loss_kernels.policy_forward(result.log_probs, entropy, head.mask, policy, objective)
    cell = kernels.cell_shape(head) if gradient_budget > 0 else None
    if cell is not None:
        live_tiles, work = kernels.choose(head, result, loss.coefficient, cached, cell, gradient_budget)
        cached = cached._replace(tile_mass=cached.tile_mass.new_empty(0, 0))
    elif _counts_work(cached_rows, policy, gradient_budget, cache_bytes):
        live_tiles = all_columns(head.hidden.device)
        work = exact_work(head, _has_gradient(head.mask, loss), cached)
    else:
        return FusedResult(result, loss, all_columns(head.hidden.device), loss.metrics.new_empty(0), cached)
    if policy.group:
        work = work_of_all_ranks(work, head, result, loss.coefficient, policy.group)
    return FusedResult(result, loss, live_tiles, torch.stack(work), cached)


def _counts_work(cached_rows: int, policy: PolicyRows, gradient_budget: float, cache_bytes: int) -> bool:
    """True if the work of an exact backward must be counted.

    It must be if a cache reduces it, or if another rank of a cp_group counts its work: all ranks join that collective.
    """
    return cached_rows > 0 or (policy.group != "" and (gradient_budget > 0 or cache_bytes > 0))


def may_have_gradient(mask: Tensor, policy: PolicyRows, objective: Objective) -> Tensor:
    """Mark the rows that may have a gradient, as far as that is known before the forward, [N] bool."""
    if objective.kl_coef != 0 or objective.entropy_coef != 0:
        return mask
    # A token's own advantage may be 0 although its sequence has a gradient.
    size = segment_sum(torch.where(mask, policy.advantages.abs(), 0), policy.offsets)  # [S]; NaN propagates
    return mask & (size != 0)[sequence_of_row(policy.offsets, mask.shape[0])]


def _has_gradient(mask: Tensor, loss: PolicyResult) -> Tensor:
    has_gradient = loss.coefficient != 0
    if loss.entropy_coefficient.numel():
        has_gradient = has_gradient | (loss.entropy_coefficient != 0)
    return mask & has_gradient


@fused_loss_op.fake
def _fake_fused(
    head: HeadRows, policy: PolicyRows, objective: Objective, gradient_budget: float, cache_bytes: int, backend: str
) -> FusedResult:
    result, cached = fake_log_probs(head, gradient_budget, cache_bytes, backend)
    loss = _fake_policy(result.log_probs, None, head.mask, policy, objective, backend)
    live_tiles = all_columns(head.hidden.device)
    cell = implementation(backend).cell_shape(head) if gradient_budget > 0 else None
    if cell:
        (rows, columns), n = cell, head.hidden.shape[0]
        cells = live_tiles.cells.new_empty(-(-n // rows), -(-head.vocab_size // columns))
        live_tiles = LiveTiles(live_tiles.order.new_empty(n), cells, live_tiles.counts.new_empty(2))
    cached_rows = implementation(backend).cache_rows(head, cache_bytes)
    has_work = cell is not None or _counts_work(cached_rows, policy, gradient_budget, cache_bytes)
    cached = cached._replace(tile_mass=cached.tile_mass.new_empty(0, 0))
    return FusedResult(result, loss, live_tiles, loss.metrics.new_empty(6 if has_work else 0), cached)


def _save_fused_loss(ctx: Any, inputs: list[Any], result: FusedResult) -> None:
    """Save head, results and coefficients for the backward."""
    head, *_, ctx.backend = inputs
    _, *details = result.policy
    ctx.mark_non_differentiable(*result.head, *details, *result.live_tiles, result.work, *result.cached)
    coefficients = Coefficients(result.policy.coefficient, result.policy.entropy_coefficient)
    save(ctx, head, result.head, coefficients, result.live_tiles, result.cached)


def _differentiate_fused_loss(ctx: Any, upstream: FusedResult, needs: dict[str, bool]) -> Gradients:
    """Compute the gradients of the head's operands from the gradient of the loss."""
    d_loss = upstream.policy.loss
    if d_loss is None:
        return {}
    head, result, of_loss, live_tiles, cached = restore(ctx)
    d_entropy = multiply_no_nan(of_loss.entropy, d_loss) if of_loss.entropy.numel() else None
    needed = needed_gradients(needs)
    d_log_probs = multiply_no_nan(of_loss.log_probs, d_loss)
    out = head_backward_op(head, result, cached, d_log_probs, d_entropy, live_tiles, None, needed, ctx.backend)
    return by_argument(out.gradients, needed)


fused_loss_op.autograd(_save_fused_loss, _differentiate_fused_loss)
