"""The same loss in float64 by plain autograd, some rows at a time, and how far a candidate is from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .candidates import Old, full_log_probs, loss_of
from .workloads import Workload

ROWS = 256  # at a time: V x 256 logits in float64
# Relative error of a gradient from which it counts as wrong, and no speed is told. A rounded logit of 20 is off by 0.06
# in bf16, so that a likely token's gradient may be off by as much; no rounding explains a tenth of the whole.
WRONG = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 1e-1}


class Truth(NamedTuple):
    loss: float
    d_hidden: Tensor  # [S, L, H] float64
    d_weight: Tensor  # [V, H] float64


def truth(w: Workload, per_token: bool = False) -> Truth:
    """Loss and gradients of the inputs as they are, with old log-probs from the same float64 forward."""
    hidden, weight, ids = w.hidden.flatten(0, 1), w.weight.double(), w.target_ids.flatten()
    parts = torch.arange(w.rows, device=ids.device).split(ROWS)
    with torch.no_grad():
        made = [_full(hidden[rows].double(), weight, ids[rows], w.softcap) for rows in parts]
    log_probs = torch.cat(made).view_as(ids.view(w.target_ids.shape)).requires_grad_()
    own = log_probs.detach()
    old = Old(
        None if w.log_ratio is None else own - w.log_ratio.double()[:, None],
        None if w.kl_drift is None else own + w.kl_drift.double(),
    )
    loss = loss_of(log_probs, w, old, per_token)
    (coefficient,) = torch.autograd.grad(loss, log_probs)
    d_hidden, d_weight = torch.zeros_like(hidden, dtype=torch.float64), torch.zeros_like(weight)
    for rows in parts:
        upstream = coefficient.flatten()[rows]
        if not upstream.any():
            continue
        leaves = hidden[rows].double().requires_grad_(), weight.detach().requires_grad_()
        some = _full(*leaves, ids[rows], w.softcap)
        d_hidden[rows], more = torch.autograd.grad(some, leaves, upstream)
        d_weight += more
    return Truth(loss.item(), d_hidden.view(w.hidden.shape), d_weight)


def _full(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    return full_log_probs(hidden, weight, ids, softcap, torch.float64)


def errors(found: tuple[Tensor, Tensor, Tensor], true: Truth) -> dict[str, float]:
    """Relative error (norm over norm) of each gradient."""
    pairs = {"d_hidden": (found[1], true.d_hidden), "d_weight": (found[2], true.d_weight)}
    return {name: _distance(a, b) for name, (a, b) in pairs.items()}


def _distance(a: Tensor, b: Tensor) -> float:
    """Some rows at a time: a head in float64 is large enough without its difference."""
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    square = sum((x.double() - y).square().sum().item() for x, y in zip(a.split(8192), b.split(8192), strict=True))
    return math.sqrt(square / max(b.square().sum().item(), 1e-300))


def verdict(error: dict[str, float], dtype: torch.dtype, budget: float) -> str | None:
    """What is wrong with a candidate's gradients; None if nothing is.

    A gradient budget bounds the dropped share of the L1 mass of d_logits, not the error: ten times as much is allowed.
    """
    limit = WRONG[dtype] + 10 * budget
    over = {name: value for name, value in error.items() if not value <= limit}  # NaN is over
    if not over:
        return None
    return ", ".join(f"{name} is off by {value:.1%}" for name, value in over.items()) + f" (limit {limit:.1%})"


def product_operations(run: Callable[[], object]) -> float:
    """Operations of the matrix products of a run, 2 m n k each, as the profiler sees them: inside custom operators and
    compiled graphs too, but not inside Triton kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    found = 0.0
    for event in profile.events() or ():
        if event.name in FIRST_FACTOR:
            left, right = event.input_shapes[FIRST_FACTOR[event.name] :][:2]
            found += 2.0 * math.prod(left) * right[-1]
    return found


# Which argument of an operator is the left factor; what an add-product adds to comes before it.
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0} | {
    f"aten::{name}": 1 for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")
}
