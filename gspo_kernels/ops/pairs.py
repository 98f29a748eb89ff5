"""The operator `logits_at_op`: logits of (row, id) pairs, differentiable, without a pass over the vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import pairs as shared
from ..backends.dispatch import implementation
from ..backends.precision import exact_products
from ..backends.rows import ExtraRows, HeadGradients, HeadRows, KeptRows, NeedsGradient, Pairs
from ..layout import accumulator, segment_sum
from .head import (
    Gradients,
    by_argument,
    empty_gradients,
    linear_log_probs_op,
    needed_gradients,
    without_none,
)
from .tuples import Operator, restore, save


class PairLogits(NamedTuple):
    """The result of `logits_at_op`. Only the logits are differentiable."""

    logits: Tensor  # [K], 0 where not live
    slope: Tensor  # [K]: d(logit) / d(h W^T + a B^T + bias)


@Operator
def logits_at_op(head: HeadRows, pairs: Pairs, backend: str) -> PairLogits:
    """Compute the logits of live pairs, on every rank of a sharded vocabulary."""
    with exact_products(head.hidden.device):
        return PairLogits(*shared.logits_at(implementation(backend), head, pairs))


@logits_at_op.fake
def _fake_logits(head: HeadRows, pairs: Pairs, backend: str) -> PairLogits:
    logits = head.hidden.new_empty(pairs.ids.shape[0], dtype=accumulator(head.hidden.dtype))
    return PairLogits(logits, torch.empty_like(logits))


def _save_logits(ctx: Any, inputs: list[Any], result: PairLogits) -> None:
    head, pairs, ctx.backend = inputs
    ctx.mark_non_differentiable(result.slope)
    save(ctx, head, pairs, result)


def _differentiate_logits(ctx: Any, upstream: PairLogits, needs: dict[str, bool]) -> Gradients:
    if upstream.logits is None:
        return {}
    head, pairs, result = restore(ctx)
    needed = needed_gradients(needs)
    gradients = logits_at_backward_op(head, pairs, result.slope, upstream.logits, needed, ctx.backend)
    return by_argument(gradients, needed)


logits_at_op.autograd(_save_logits, _differentiate_logits)


@Operator
def logits_at_backward_op(
    head: HeadRows, pairs: Pairs, slope: Tensor, d_logits: Tensor, needs: NeedsGradient, backend: str
) -> HeadGradients:
    """Compute the gradients of a head's operands. Gradients that are not needed are empty tensors."""
    with exact_products(head.hidden.device):
        gradients = shared.gradients_at(implementation(backend), head, pairs, slope, d_logits, needs)
    return without_none(head, gradients)


@logits_at_backward_op.fake
def _fake_gradients(
    head: HeadRows, pairs: Pairs, slope: Tensor, d_logits: Tensor, needs: NeedsGradient, backend: str
) -> HeadGradients:
    return empty_gradients(head, needs)


logits_at_backward_op.no_autograd(lambda *_: "linear_log_probs")


# -- log-probs over kept sets, and of extra ids


def kept_log_probs(
    head: HeadRows, kept: KeptRows, gradient_budget: float, cache_bytes: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [N] and entropies ([N], or [0] if not requested) over kept sets. Both are differentiable.

    log p = log sigmoid(z_y - log sum exp z_j), with the target's logit z_y and the sum over the other ids of the set.
    This keeps the digits of 1 - p if p is near 1. A set of one id has log p = 0 and no gradient.
    """
    pairs, offsets = kept.pairs, kept.pairs.offsets
    z = logits_at_op(head, pairs, backend).logits
    others = torch.where(pairs.live & ~kept.is_target, z, -torch.inf)
    top = torch.segment_reduce(others.detach(), "max", offsets=offsets, initial=-torch.inf)
    top = torch.where(kept.computed & (top > -torch.inf), top, 0)
    top_of_pair = top[pairs.rows]
    sums = lambda x: segment_sum(x, offsets)  # noqa: E731
    mass = torch.where(kept.computed, sums((others - top_of_pair).exp()), 1)
    nothing = mass == 0  # all other logits are -inf
    log_mass = torch.where(nothing, -torch.inf, torch.where(nothing, 1, mass).log())
    over_top = sums(torch.where(pairs.live & kept.is_target, z, 0)) - top  # of the target
    log_probs = torch.where(kept.computed, F.logsigmoid(over_top - log_mass), 0)
    entropy = z.new_empty(0)
    if head.entropy:
        log_total = torch.logaddexp(log_mass, over_top)
        has_mass = pairs.live & (z != -torch.inf)
        log_p = torch.where(kept.is_target, log_probs[pairs.rows], (z - top_of_pair) - log_total[pairs.rows])
        log_p = torch.where(has_mass, log_p, 0)
        entropy = torch.where(kept.computed, -sums(torch.where(has_mass, log_p.exp() * log_p, 0)), 0)
    log_probs = torch.where(kept.invalid, torch.nan, log_probs)
    if kept.full is not None:
        rows = head._replace(mask=kept.full)
        out = linear_log_probs_op(rows, gradient_budget, cache_bytes, backend).head
        log_probs = torch.where(kept.full, out.log_probs, log_probs)
        entropy = torch.where(kept.full, out.entropy, entropy) if head.entropy else entropy
    return log_probs, entropy


def extra_log_probs(head: HeadRows, extra: ExtraRows, log_probs: Tensor, backend: str) -> Tensor:
    """Compute the log-probs of extra ids over the vocabulary, [N, k], differentiable; 0 if absent, NaN if invalid.

    Args:
        head: the head.
        extra: the extra ids.
        log_probs: of the targets, [N], as `linear_log_probs_op` returns them. An extra id's log-prob is the target's
            plus the difference of their logits, so it needs no pass over the vocabulary.
        backend: "torch" or "triton".
    """
    rows, width = extra.invalid.shape
    z = logits_at_op(head, extra.pairs, backend).logits.view(rows, width + 1)
    live = extra.pairs.live.view(rows, width + 1)[:, 1:]
    computed = torch.where(live, log_probs[:, None] + (z[:, 1:] - z[:, :1]), 0)
    return torch.where(extra.invalid, torch.nan, computed)
