"""The torch.library boundary: flat tensors and scalars in, flat tensors out, and the autograd between them.

Three differentiable operators stand behind the public functions, and two that only a backward calls:

    linear_log_probs            hidden states, head -> log-probs, entropies     (backward: head_backward)
    policy_loss                 log-probs -> loss                               (backward: scale)
    fused_loss                  both in one                                     (backward: head_backward)

The backward is the closed form. `head_backward` and `scale` have no derivative of their own, so a second derivative
raises. (LoRA's h A^T is one more operator, in `head.py`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import metrics
from .backends.dispatch import implementation
from .backends.live_tiles import all_columns, choose, exact_work
from .backends.precision import select_times
from .backends.rows import HeadResult, HeadRows, LiveTiles, PolicyResult, PolicyRows
from .layout import accumulator
from .objective import Objective

_HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? adapter_hidden, Tensor? adapter_weight, Tensor target_ids, "
    "Tensor mask, Tensor? temperature, float logit_scale, float? logit_softcap, int vocab_size, bool entropy"
)
_POLICY = (
    "Tensor offsets, Tensor advantages, Tensor? old_log_probs, Tensor? ref_log_probs, Tensor? token_weights, "
    "Tensor? normalizer, Tensor? kl_normalizer"
)
_OBJECTIVE = (
    "str ratio, str surrogate, float clip_low, float clip_high, float? dual_clip, float? delta, str aggregation, "
    "float? length_norm, float kl_coef, str kl_estimator, str? kl_aggregation, bool kl_ratio_factor, "
    "float entropy_coef, float sapo_temperature_pos, float sapo_temperature_neg"
)
_N_HEAD, _N_POLICY = len(HeadRows._fields), len(PolicyRows._fields)
_N_GRADIENTS = 5  # the first inputs: hidden, weight, bias, adapter_hidden, adapter_weight


def linear_log_probs(head: HeadRows, backend: str) -> HeadResult:
    """Differentiable log_probs and entropy of flat rows."""
    return HeadResult(*_linear_log_probs(*head, backend))


def policy_loss(
    log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective, backend: str
) -> PolicyResult:
    """Differentiable loss of flat rows."""
    return PolicyResult(*_policy_loss(log_probs, entropy, mask, *policy, *objective.values(), backend))


def fused_loss(
    head: HeadRows, policy: PolicyRows, objective: Objective, gradient_budget: float, backend: str
) -> tuple[HeadResult, PolicyResult, Tensor]:
    """Differentiable loss; everything else is detached. The last is the work of the backward, as `live_tiles.Work`."""
    out = _fused_loss(*head, *policy, *objective.values(), gradient_budget, backend)
    return HeadResult(*out[:4]), PolicyResult(*out[4:9]), out[-1]


def _define(name: str, inputs: str, outputs: str) -> Any:
    def decorate(fn: Any) -> Any:
        return torch.library.custom_op(
            f"gspo_kernels::{name}", fn, mutates_args=(), schema=f"({inputs}) -> ({outputs})"
        )

    return decorate


# -- linear_log_probs


@_define("linear_log_probs", f"{_HEAD}, str backend", "Tensor, Tensor, Tensor, Tensor")
def _linear_log_probs(*args: Any) -> HeadResult:
    return implementation(args[-1]).head_forward(HeadRows(*args[:_N_HEAD]))


@_linear_log_probs.register_fake
def _fake_head(*args: Any) -> HeadResult:
    head = HeadRows(*args[:_N_HEAD])
    rows = head.hidden.new_empty(head.hidden.shape[0], dtype=accumulator(head.hidden.dtype))
    entropy = rows.new_empty(rows.shape[0] if head.entropy else 0)
    return HeadResult(rows, entropy, torch.empty_like(rows), torch.empty_like(rows))


def _save_head(ctx: Any, head: HeadRows, result: HeadResult, *more: Tensor) -> None:
    tensors = [x for x in head if isinstance(x, Tensor)]
    ctx.layout = (
        tuple(None if isinstance(x, Tensor) else x for x in head),
        tuple(isinstance(x, Tensor) for x in head),
    )
    ctx.save_for_backward(*more, *result, *tensors)
    ctx.set_materialize_grads(False)


def _saved_head(ctx: Any, n_more: int) -> tuple[list[Tensor], HeadResult, HeadRows]:
    saved = list(ctx.saved_tensors)
    more, result = saved[:n_more], HeadResult(*saved[n_more : n_more + 4])
    tensors = iter(saved[n_more + 4 :])
    scalars, is_tensor = ctx.layout
    return more, result, HeadRows(*(next(tensors) if t else s for s, t in zip(scalars, is_tensor, strict=True)))


def _head_gradients(
    ctx: Any, head: HeadRows, result: HeadResult, d_log_probs: Tensor, d_entropy: Tensor | None, live: LiveTiles
) -> Any:
    needs = [bool(n) for n in ctx.needs_input_grad[:_N_GRADIENTS]]
    found = _head_backward(*head, *result, d_log_probs, d_entropy, *live, needs, ctx.backend)
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


def _setup_linear_log_probs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend = inputs[-1]
    result = HeadResult(*output)
    ctx.mark_non_differentiable(result.shift, result.log_total)
    _save_head(ctx, HeadRows(*inputs[:_N_HEAD]), result)


def _backward_linear_log_probs(
    ctx: Any, d_log_probs: Tensor | None, d_entropy: Tensor | None, *_unused: Any
) -> tuple[Any, ...]:
    _none, result, head = _saved_head(ctx, 0)
    if d_log_probs is None:
        d_log_probs = torch.zeros_like(result.log_probs)
    live = all_columns(head.hidden.device)
    found = _head_gradients(ctx, head, result, d_log_probs, d_entropy if head.entropy else None, live)
    return *found, *(None,) * (_N_HEAD - _N_GRADIENTS + 1)


_linear_log_probs.register_autograd(_backward_linear_log_probs, setup_context=_setup_linear_log_probs)


@_define(
    "head_backward",
    f"{_HEAD}, Tensor log_probs, Tensor entropies, Tensor shift, Tensor log_total, "
    "Tensor d_log_probs, Tensor? d_entropy, Tensor order, Tensor cells, Tensor counts, bool[] needs, str backend",
    "Tensor, Tensor, Tensor, Tensor, Tensor",
)
def _head_backward(*args: Any) -> tuple[Tensor, ...]:
    head, result = HeadRows(*args[:_N_HEAD]), HeadResult(*args[_N_HEAD : _N_HEAD + 4])
    d_log_probs, d_entropy, *live, needs, backend = args[_N_HEAD + 4 :]
    found = implementation(backend).head_backward(head, result, d_log_probs, d_entropy, tuple(needs), LiveTiles(*live))
    return tuple(head.hidden.new_empty(0) if g is None else g for g in found)


@_head_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return tuple(like(x) if need else args[0].new_empty(0) for x, need in zip(args, args[-2], strict=False))


# -- policy_loss


@_define(
    "policy_loss",
    f"Tensor log_probs, Tensor? entropy, Tensor mask, {_POLICY}, {_OBJECTIVE}, str backend",
    "Tensor, Tensor, Tensor, Tensor, Tensor",
)
def _policy_loss(*args: Any) -> PolicyResult:
    log_probs, entropy, mask, *rest = args
    policy, objective = PolicyRows(*rest[:_N_POLICY]), Objective.restored(rest[_N_POLICY:-1])
    with torch.autocast(log_probs.device.type, enabled=False):
        return implementation(args[-1]).policy_forward(log_probs, entropy, mask, policy, objective)


@_policy_loss.register_fake
def _(*args: Any) -> PolicyResult:
    log_probs, _entropy, _mask, *rest = args
    return _fake_policy(log_probs, PolicyRows(*rest[:_N_POLICY]), Objective.restored(rest[_N_POLICY:-1]))


def _fake_policy(rows: Tensor, policy: PolicyRows, objective: Objective) -> PolicyResult:
    ratios = rows.shape[0] if objective.ratio == "token" else policy.offsets.shape[0] - 1
    return PolicyResult(
        rows.new_empty(()),
        rows.new_empty(ratios),
        torch.empty_like(rows),
        rows.new_empty(rows.shape[0] if objective.entropy_coef != 0 else 0),
        rows.new_empty(len(metrics.NAMES)),
    )


def _setup_policy_loss(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    result = PolicyResult(*output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(inputs[0], result.coefficient, result.entropy_coefficient)
    ctx.set_materialize_grads(False)
    ctx.n_inputs = len(inputs)


def _backward_policy_loss(ctx: Any, d_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * ctx.n_inputs
    if d_loss is None:
        return nothing
    log_probs, coefficient, entropy_coefficient = ctx.saved_tensors
    d_log_probs, d_entropy = _scale(log_probs, coefficient, entropy_coefficient, d_loss)
    return d_log_probs, d_entropy if ctx.needs_input_grad[1] and d_entropy.numel() else None, *nothing[2:]


_policy_loss.register_autograd(_backward_policy_loss, setup_context=_setup_policy_loss)


@_define(
    "scale",
    "Tensor log_probs, Tensor coefficient, Tensor entropy_coefficient, Tensor d_loss",
    "Tensor, Tensor",
)
def _scale(
    log_probs: Tensor, coefficient: Tensor, entropy_coefficient: Tensor, d_loss: Tensor
) -> tuple[Tensor, Tensor]:
    # log_probs takes part so that a second derivative meets an operator that has none, and raises; without it the
    # second derivative would silently miss a term.
    del log_probs
    return _times(coefficient, d_loss), _times(entropy_coefficient, d_loss)


@_scale.register_fake
def _(log_probs: Tensor, coefficient: Tensor, entropy_coefficient: Tensor, d_loss: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(coefficient), torch.empty_like(entropy_coefficient)


def _times(coefficient: Tensor, d_loss: Tensor) -> Tensor:
    """The coefficient times the upstream gradient; a row without gradient keeps exactly 0, even for an inf upstream."""
    return select_times(coefficient, d_loss.to(coefficient.dtype))


# -- fused_loss


@_define(
    "fused_loss",
    f"{_HEAD}, {_POLICY}, {_OBJECTIVE}, float gradient_budget, str backend",
    ", ".join(["Tensor"] * 13),
)
def _fused_loss(*args: Any) -> tuple[Tensor, ...]:
    head, policy, objective = _split_fused(args)
    budget, kernels = args[-2], implementation(args[-1])
    result, shares = kernels.forward_with_shares(head, wanted=budget > 0)
    entropy = result.entropy if head.entropy else None
    with torch.autocast(head.hidden.device.type, enabled=False):
        loss = kernels.policy_forward(result.log_probs, entropy, head.mask, policy, objective)
    if shares is None:
        has_gradient = loss.coefficient != 0
        if objective.entropy_coef != 0:
            has_gradient |= loss.entropy_coefficient != 0
        live, work = all_columns(head.hidden.device), exact_work(head, has_gradient)
    else:
        live, work = choose(head, result, loss.coefficient, shares, budget)
    return *result, *loss, *live, torch.stack(work).to(loss.loss.dtype)


@_fused_loss.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    head, policy, objective = _split_fused(args)
    result = _fake_head(*args)
    live = all_columns(head.hidden.device)
    cell = implementation(args[-1]).cell_shape(head) if args[-2] > 0 else None
    if cell:
        (rows, columns), n = cell, head.hidden.shape[0]
        cells = live.cells.new_empty(-(-n // rows), -(-head.vocab_size // columns))
        live = LiveTiles(live.order.new_empty(n), cells, live.counts.new_empty(2))
    return *result, *_fake_policy(result.log_probs, policy, objective), *live, result.log_probs.new_empty(3)


def _split_fused(args: tuple[Any, ...]) -> tuple[HeadRows, PolicyRows, Objective]:
    policy_at, objective_at = _N_HEAD, _N_HEAD + _N_POLICY
    return (
        HeadRows(*args[:policy_at]),
        PolicyRows(*args[policy_at:objective_at]),
        Objective.restored(args[objective_at:-2]),
    )


def _setup_fused_loss(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend, ctx.n_inputs = inputs[-1], len(inputs)
    result, policy, live = HeadResult(*output[:4]), PolicyResult(*output[4:9]), output[9:12]
    ctx.mark_non_differentiable(*result, *policy[1:], *output[9:])
    _save_head(ctx, HeadRows(*inputs[:_N_HEAD]), result, policy.coefficient, policy.entropy_coefficient, *live)


def _backward_fused_loss(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    d_loss = gradients[4]
    if d_loss is None:
        return (None,) * ctx.n_inputs
    (coefficient, entropy_coefficient, *live), result, head = _saved_head(ctx, 5)
    d_entropy = _times(entropy_coefficient, d_loss) if entropy_coefficient.numel() else None
    found = _head_gradients(ctx, head, result, _times(coefficient, d_loss), d_entropy, LiveTiles(*live))
    return *found, *(None,) * (ctx.n_inputs - _N_GRADIENTS)


_fused_loss.register_autograd(_backward_fused_loss, setup_context=_setup_fused_loss)
