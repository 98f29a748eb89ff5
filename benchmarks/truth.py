"""The same loss in float64 by plain autograd, some rows at a time, and how far a candidate is from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .candidates import full_log_probs, loss_of
from .workloads import Old, Workload

ROWS = 256  # at a time: V x 256 logits in float64
# Gradients count as wrong, and no speed is told, where their error (norm over norm) is over so many times that of naive
# PyTorch in the same dtype and over the floor, or where their size is off by so much: an error of a few percent is what
# bf16 logits cost, but it has no direction.
TIMES_NAIVE, FLOOR, SCALE = 3.0, 1e-4, 5e-3
LOSS = 1e-4  # most that a loss may be off; advantages are about 1


class Truth(NamedTuple):
    loss: float
    d_hidden: Tensor  # [S, L, H] float64
    d_weight: Tensor  # [V, H] float64


def truth(w: Workload, per_token: bool = False) -> Truth:
    """Loss and gradients of the inputs as they are, with old log-probs from the same float64 forward."""
    hidden, weight, ids = w.hidden.flatten(0, 1), w.weight.double(), w.target_ids.flatten()
    parts = torch.arange(w.rows, device=ids.device).split(ROWS)
    with torch.no_grad():
        outputs = [_full(hidden[rows].double(), weight, ids[rows], w.softcap) for rows in parts]
    log_probs = torch.cat(outputs).view_as(ids.view(w.target_ids.shape)).requires_grad_()
    detached = log_probs.detach()
    old = Old(
        None if w.log_ratio is None else detached - w.log_ratio.double()[:, None],
        None if w.kl_drift is None else detached + w.kl_drift.double(),
    )
    loss = loss_of(log_probs, w, old, per_token)
    (coefficient,) = torch.autograd.grad(loss, log_probs)
    d_hidden, d_weight = torch.zeros_like(hidden, dtype=torch.float64), torch.zeros_like(weight)
    for rows in parts:
        upstream = coefficient.flatten()[rows]
        if not upstream.any():
            continue
        leaves = hidden[rows].double().requires_grad_(), weight.detach().requires_grad_()
        chunk = _full(*leaves, ids[rows], w.softcap)
        d_hidden[rows], more = torch.autograd.grad(chunk, leaves, upstream)
        d_weight += more
    return Truth(loss.item(), d_hidden.view(w.hidden.shape), d_weight)


def _full(hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None) -> Tensor:
    return full_log_probs(hidden, weight, ids, softcap, torch.float64)


class Errors(NamedTuple):
    loss: float  # absolute
    d_hidden: float  # relative, norm over norm
    d_weight: float
    scale: float  # the worse gradient's component along the true one, less 1

    @property
    def worst(self) -> float:
        return max(self.d_hidden, self.d_weight)


def errors(result: tuple[Tensor, Tensor, Tensor], true: Truth) -> Errors:
    apart, scales = [], []
    for a, b in ((result[1], true.d_hidden), (result[2], true.d_weight)):
        if a.shape != b.shape:
            raise ValueError(f"a gradient has the shape {tuple(a.shape)}, not {tuple(b.shape)}")
        square, along = _products(a, b)
        size = max(b.square().sum().item(), 1e-300)
        apart.append(math.sqrt(square / size))
        scales.append(along / size - 1)
    return Errors(abs(result[0].item() - true.loss), apart[0], apart[1], max(scales, key=abs))


Sizes = tuple[float, float, float]


def sizes(result: tuple[Tensor, Tensor, Tensor]) -> Sizes:
    """Loss, and norms of both gradients: what is kept of a result to know it again."""
    loss, d_hidden, d_weight = result
    norms = (torch.linalg.vector_norm(x, dtype=torch.float32).item() for x in (d_hidden, d_weight))
    return loss.item(), *norms


def differ(a: Sizes, b: Sizes) -> bool:
    """By more than a rounding here or there changes."""
    return not all(abs(x - y) <= most for x, y, most in zip(a, b, (LOSS, SCALE * b[1], SCALE * b[2]), strict=True))


def _products(a: Tensor, b: Tensor) -> tuple[float, float]:
    """|a - b|^2 and a b. Some rows at a time: a head in float64 is large enough without its difference."""
    square = along = 0.0
    for x, y in zip(a.flatten(0, -2).split(8192), b.flatten(0, -2).split(8192), strict=True):
        x = x.double()
        square += (x - y).square().sum().item()
        along += (x * y).sum().item()
    return square, along


def verdict(ours: Errors, naive: Errors, budget: float) -> str | None:
    """What is wrong with a candidate; None if nothing is.

    A gradient budget bounds the dropped share of the L1 mass of d_logits, not the error: ten times as much is allowed.
    """
    limit = max(TIMES_NAIVE * naive.worst, FLOOR) + 10 * budget
    checks = {
        "d_hidden": (ours.d_hidden, limit),
        "d_weight": (ours.d_weight, limit),
        "the size of a gradient": (abs(ours.scale), SCALE + 10 * budget),
        "the loss": (ours.loss, LOSS),
    }
    over = {name: pair for name, pair in checks.items() if not pair[0] <= pair[1]}  # NaN is over
    return ", ".join(f"{name} is off by {off:.1e} (limit {most:.1e})" for name, (off, most) in over.items()) or None


def product_operations(run: Callable[[], object]) -> float:
    """Operations of the matrix products of a run, 2 m n k each, as the profiler sees them: inside custom operators and
    compiled graphs too, but not inside Triton kernels. Runs with one thread: it sees the caller's only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            run()
    finally:
        torch.set_num_threads(threads)
    total = 0.0
    for event in profile.events() or ():
        if event.name in FIRST_FACTOR:
            left, right = event.input_shapes[FIRST_FACTOR[event.name] :][:2]
            total += 2.0 * math.prod(left) * right[-1]
    return total


# Which argument of an operator is the left factor; what an add-product adds to comes before it.
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0} | {
    f"aten::{name}": 1 for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")
}
