"""The torch.library operators and their autograd.

Each public function calls one differentiable operator. The operators' backwards call two more, `head_backward` and
`scale`:

    linear_log_probs            hidden states, head -> log-probs, entropies     (backward: head_backward)
    policy_loss                 log-probs -> loss                               (backward: scale)
    fused_loss                  hidden states, head -> loss                     (backward: head_backward)

Gradients are computed by formulas, not by autograd. `head_backward` and `scale` have no derivative, so double backward
raises an error. LoRA's product h A^T is another operator, in `backends/adapter.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import metrics
from .backends.dispatch import implementation
from .backends.live_tiles import all_columns
from .backends.precision import multiply_no_nan
from .backends.rows import HeadGradients, HeadResult, HeadRows, LiveTiles, NeedsGradient, PolicyResult, PolicyRows
from .custom_op import Operator, restore, save
from .layout import accumulator
from .objective import Objective

Gradients = dict[str, Tensor | None]  # by the name of the operator's argument


# -- linear_log_probs


@Operator
def linear_log_probs(head: HeadRows, backend: str) -> HeadResult:
    """Compute log-probs and entropies of rows. Both are differentiable."""
    return implementation(backend).head_forward(head)


@linear_log_probs.fake
def _fake_head(head: HeadRows, backend: str) -> HeadResult:
    log_probs = head.hidden.new_empty(head.hidden.shape[0], dtype=accumulator(head.hidden.dtype))  # [N]
    entropy = log_probs.new_empty(log_probs.shape[0] if head.entropy else 0)
    return HeadResult(log_probs, entropy, torch.empty_like(log_probs), torch.empty_like(log_probs))


def _save_linear_log_probs(ctx: Any, inputs: tuple[HeadRows, str], result: HeadResult) -> None:
    """Save the inputs and the result for the backward."""
    head, ctx.backend = inputs
    ctx.mark_non_differentiable(result.shift, result.log_total)
    save(ctx, head, result)


def _differentiate_linear_log_probs(ctx: Any, upstream: HeadResult, needs: dict[str, bool]) -> Gradients:
    """Compute the gradients of the head's operands from the gradients of log-probs and entropies."""
    head, result = restore(ctx)
    d_log_probs = torch.zeros_like(result.log_probs) if upstream.log_probs is None else upstream.log_probs
    d_entropy = upstream.entropy if head.entropy else None
    return _head_gradients(ctx.backend, head, result, d_log_probs, d_entropy, all_columns(head.hidden.device), needs)


linear_log_probs.autograd(_save_linear_log_probs, _differentiate_linear_log_probs)


# -- head_backward


@Operator
def head_backward(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    live_tiles: LiveTiles,
    needs: NeedsGradient,
    backend: str,
) -> HeadGradients:
    """Compute the gradients of a head's operands. Gradients that are not needed are empty tensors."""
    gradients = implementation(backend).head_backward(head, result, d_log_probs, d_entropy, needs, live_tiles)
    return HeadGradients(*(head.hidden.new_empty(0) if x is None else x for x in gradients))


@head_backward.fake
def _fake_gradients(
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    live_tiles: LiveTiles,
    needs: NeedsGradient,
    backend: str,
) -> HeadGradients:
    def like(operand: Tensor | None, needed: bool) -> Tensor:
        if operand is None or not needed:
            return head.hidden.new_empty(0)
        return torch.empty_like(operand, memory_format=torch.contiguous_format)

    return HeadGradients(*(like(getattr(head, name), getattr(needs, name)) for name in HeadGradients._fields))


def _head_gradients(
    backend: str,
    head: HeadRows,
    result: HeadResult,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    live_tiles: LiveTiles,
    needs: dict[str, bool],
) -> Gradients:
    """Compute the gradients of the operands of `head`, by their argument names in the forward operators."""
    needed = NeedsGradient(*(needs[f"head_{name}"] for name in NeedsGradient._fields))
    gradients = head_backward(head, result, d_log_probs, d_entropy, live_tiles, needed, backend)
    return {f"head_{name}": x for name, x in gradients._asdict().items() if getattr(needed, name)}


# -- policy_loss


@Operator
def policy_loss(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective, backend: str
) -> PolicyResult:
    """Compute the loss of rows, and its coefficients and metrics. Only the loss is differentiable."""
    with torch.autocast(log_probs.device.type, enabled=False):
        return implementation(backend).policy_forward(log_probs, entropy, mask, policy, objective)


@policy_loss.fake
def _fake_policy(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective, backend: str
) -> PolicyResult:
    rows = log_probs.shape[0]
    return PolicyResult(
        loss=log_probs.new_empty(()),
        log_ratio=log_probs.new_empty(rows if objective.ratio == "token" else policy.offsets.shape[0] - 1),
        coefficient=torch.empty_like(log_probs),
        entropy_coefficient=log_probs.new_empty(rows if objective.entropy_coef != 0 else 0),
        metrics=log_probs.new_empty(len(metrics.NAMES)),
    )


class _LogProbs(NamedTuple):
    """Log-probs that the backward of `policy_loss` passes to `scale`. Nothing else reads them."""

    log_probs: Tensor  # [N]


class _Coefficients(NamedTuple):
    """Derivatives of the loss. The backward multiplies them by the upstream gradient."""

    coefficient: Tensor  # [N] d(loss)/d(log_prob)
    entropy_coefficient: Tensor  # [N] d(loss)/d(entropy), or [0]


def _save_policy_loss(ctx: Any, inputs: tuple[Any, ...], result: PolicyResult) -> None:
    """Save the coefficients for the backward."""
    log_probs, *_ = inputs
    ctx.mark_non_differentiable(*(x for name, x in result._asdict().items() if name != "loss"))
    save(ctx, _LogProbs(log_probs), _Coefficients(result.coefficient, result.entropy_coefficient))


def _differentiate_policy_loss(ctx: Any, upstream: PolicyResult, needs: dict[str, bool]) -> Gradients:
    """Compute the gradients of log-probs and entropies from the gradient of the loss."""
    if upstream.loss is None:
        return {}
    (log_probs,), (coefficient, entropy_coefficient) = restore(ctx)
    scaled = scale(log_probs, coefficient, entropy_coefficient, upstream.loss)
    has_entropy = needs["entropy"] and scaled.entropy.numel() > 0
    return {"log_probs": scaled.log_probs, "entropy": scaled.entropy if has_entropy else None}


policy_loss.autograd(_save_policy_loss, _differentiate_policy_loss)


# -- scale


class ScaledCoefficients(NamedTuple):
    """Gradients with respect to log-probs and entropies."""

    log_probs: Tensor  # [N]
    entropy: Tensor  # [N], or [0]


@Operator
def scale(log_probs: Tensor, coefficient: Tensor, entropy_coefficient: Tensor, d_loss: Tensor) -> ScaledCoefficients:
    """Multiply the coefficients by the upstream gradient.

    `log_probs` is not used. As a parameter, it puts this operator, which has no derivative, into the graph of a double
    backward, which therefore raises an error. Without it, a double backward would silently lack a term.
    """
    return ScaledCoefficients(_times(coefficient, d_loss), _times(entropy_coefficient, d_loss))


@scale.fake
def _fake_scale(
    log_probs: Tensor, coefficient: Tensor, entropy_coefficient: Tensor, d_loss: Tensor
) -> ScaledCoefficients:
    return ScaledCoefficients(torch.empty_like(coefficient), torch.empty_like(entropy_coefficient))


def _times(coefficient: Tensor, d_loss: Tensor) -> Tensor:
    """Multiply coefficients by the upstream gradient. A coefficient of 0 gives 0, even if d_loss is inf."""
    return multiply_no_nan(coefficient, d_loss.to(coefficient.dtype))


# -- fused_loss


class FusedResult(NamedTuple):
    """Results of head and policy loss, the cells that the backward computes, and the work of the backward."""

    head: HeadResult
    policy: PolicyResult
    live_tiles: LiveTiles
    work: Tensor  # [3]: the fields of `live_tiles.Work`; [0] if the backward is exact


@Operator
def fused_loss(
    head: HeadRows, policy: PolicyRows, objective: Objective, gradient_budget: float, backend: str
) -> FusedResult:
    """Compute log-probs and loss of rows, and choose the cells of the backward. Only the loss is differentiable."""
    kernels = implementation(backend)
    result, shares = kernels.forward_with_shares(head, wanted=gradient_budget > 0)
    entropy = result.entropy if head.entropy else None
    with torch.autocast(head.hidden.device.type, enabled=False):
        loss = kernels.policy_forward(result.log_probs, entropy, head.mask, policy, objective)
    if shares is None:
        return FusedResult(result, loss, all_columns(head.hidden.device), loss.loss.new_empty(0))
    live_tiles, work = kernels.choose(head, result, loss.coefficient, shares, gradient_budget)
    return FusedResult(result, loss, live_tiles, torch.stack(work).to(loss.loss.dtype))


@fused_loss.fake
def _fake_fused(
    head: HeadRows, policy: PolicyRows, objective: Objective, gradient_budget: float, backend: str
) -> FusedResult:
    result = _fake_head(head, backend)
    loss = _fake_policy(result.log_probs, None, head.mask, policy, objective, backend)
    live_tiles = all_columns(head.hidden.device)
    cell = implementation(backend).cell_shape(head) if gradient_budget > 0 else None
    if cell:
        (rows, columns), n = cell, head.hidden.shape[0]
        cells = live_tiles.cells.new_empty(-(-n // rows), -(-head.vocab_size // columns))
        live_tiles = LiveTiles(live_tiles.order.new_empty(n), cells, live_tiles.counts.new_empty(2))
    return FusedResult(result, loss, live_tiles, result.log_probs.new_empty(3 if cell else 0))


def _save_fused_loss(ctx: Any, inputs: tuple[Any, ...], result: FusedResult) -> None:
    """Save head, results and coefficients for the backward."""
    head, *_, ctx.backend = inputs
    details = (x for name, x in result.policy._asdict().items() if name != "loss")
    ctx.mark_non_differentiable(*result.head, *details, *result.live_tiles, result.work)
    coefficients = _Coefficients(result.policy.coefficient, result.policy.entropy_coefficient)
    save(ctx, head, result.head, coefficients, result.live_tiles)


def _differentiate_fused_loss(ctx: Any, upstream: FusedResult, needs: dict[str, bool]) -> Gradients:
    """Compute the gradients of the head's operands from the gradient of the loss."""
    d_loss = upstream.policy.loss
    if d_loss is None:
        return {}
    head, result, (coefficient, entropy_coefficient), live_tiles = restore(ctx)
    d_entropy = _times(entropy_coefficient, d_loss) if entropy_coefficient.numel() else None
    return _head_gradients(ctx.backend, head, result, _times(coefficient, d_loss), d_entropy, live_tiles, needs)


fused_loss.autograd(_save_fused_loss, _differentiate_fused_loss)
