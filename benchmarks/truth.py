"""Compute the loss and its gradients in float64 by plain autograd, and a candidate's errors relative to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .candidates import full_log_probs, loss_of
from .workloads import Workload

ROWS = 256  # rows per chunk, so that float64 logits are [256, V]
# A candidate is wrong, and is not timed, in three cases: the relative error of a gradient (norm of the error divided by
# the exact norm) exceeds both FLOOR and TIMES_NAIVE times the error of naive PyTorch in the same dtype; the size of a
# gradient is off by more than SCALE; the loss is off by more than LOSS. SCALE can be tight: bf16 logits change a
# gradient by a few percent, but in random directions, which hardly changes its component along the true gradient.
TIMES_NAIVE = 3.0
FLOOR = 1e-4
SCALE = 5e-3
LOSS = 1e-4  # allowed error of the loss; advantages are about 1
Result = tuple[Tensor, Tensor, Tensor]  # loss, d_hidden, d_weight
Sizes = tuple[float, float, float]  # loss, norm of d_hidden, norm of d_weight


class Truth(NamedTuple):
    loss: float
    d_hidden: Tensor  # [S, L, H] float64
    d_weight: Tensor  # [V, H] float64


class Errors(NamedTuple):
    loss: float  # absolute
    d_hidden: float  # norm of the error divided by the norm of the exact gradient
    d_weight: float  # likewise
    scale: float  # (gradient . exact) / |exact|^2 - 1, for the gradient where this is further from 0

    @property
    def worst(self) -> float:
        return max(self.d_hidden, self.d_weight)


def truth(w: Workload) -> Truth:
    """Compute loss and gradients in float64. Old log-probs are computed from the float64 log-probs."""
    hidden = w.hidden.flatten(0, 1)
    weight = w.weight.double()
    ids = w.target_ids.flatten()
    chunks = torch.arange(w.rows, device=ids.device).split(ROWS)

    def log_probs_of(states: Tensor, head: Tensor, rows: Tensor) -> Tensor:
        return full_log_probs(states, head, ids[rows], w.softcap, torch.float64)

    with torch.no_grad():
        outputs = [log_probs_of(hidden[rows].double(), weight, rows) for rows in chunks]
    log_probs = torch.cat(outputs).view(w.target_ids.shape).requires_grad_()
    loss = loss_of(log_probs, w, log_probs.detach() - w.log_ratio.double()[:, None])
    (d_log_probs,) = torch.autograd.grad(loss, log_probs)
    d_hidden, d_weight = torch.zeros_like(hidden, dtype=torch.float64), torch.zeros_like(weight)
    for rows in chunks:
        upstream = d_log_probs.flatten()[rows]
        if upstream.any():
            leaves = hidden[rows].double().requires_grad_(), weight.detach().requires_grad_()
            d_hidden[rows], d_chunk = torch.autograd.grad(log_probs_of(*leaves, rows), leaves, upstream)
            d_weight += d_chunk
    return Truth(loss.item(), d_hidden.view(w.hidden.shape), d_weight)


def errors(result: Result, true: Truth) -> Errors:
    """Compare a candidate's loss and gradients with the true ones."""
    relative, scales = [], []
    for gradient, exact in ((result[1], true.d_hidden), (result[2], true.d_weight)):
        if gradient.shape != exact.shape:
            raise ValueError(f"a gradient has the shape {tuple(gradient.shape)}, expected {tuple(exact.shape)}")
        square, along = _products(gradient, exact)
        size = max(exact.square().sum().item(), 1e-300)
        relative.append(math.sqrt(square / size))
        scales.append(along / size - 1)
    return Errors(abs(result[0].item() - true.loss), relative[0], relative[1], max(scales, key=abs))


def _products(gradient: Tensor, exact: Tensor) -> tuple[float, float]:
    """Compute |gradient - exact|^2 and gradient . exact, in chunks of rows to save float64 memory."""
    square = along = 0.0
    for x, y in zip(gradient.flatten(0, -2).split(8192), exact.flatten(0, -2).split(8192), strict=True):
        x = x.double()
        square += (x - y).square().sum().item()
        along += (x * y).sum().item()
    return square, along


def sizes(result: Result) -> Sizes:
    """The loss and the norms of both gradients, for `differ` to compare with another result."""
    loss, d_hidden, d_weight = result
    norms = (torch.linalg.vector_norm(x, dtype=torch.float32).item() for x in (d_hidden, d_weight))
    return loss.item(), *norms


def differ(a: Sizes, b: Sizes) -> bool:
    """True if the sizes of two results differ by more than rounding explains."""
    return not all(abs(x - y) <= most for x, y, most in zip(a, b, (LOSS, SCALE * b[1], SCALE * b[2]), strict=True))


def verdict(error: Errors, naive: Errors, budget: float) -> str | None:
    """The fault of a candidate, or None if it is right.

    A gradient budget bounds the share of the L1 mass of d_logits that is left out. It does not bound the error of the
    gradients, which can be several times larger. So ten times the budget is added to the limits for gradients.
    """
    limit = max(TIMES_NAIVE * naive.worst, FLOOR) + 10 * budget
    checks = {
        "d_hidden": (error.d_hidden, limit),
        "d_weight": (error.d_weight, limit),
        "the size of a gradient": (abs(error.scale), SCALE + 10 * budget),
        "the loss": (error.loss, LOSS),
    }
    faults = {name: pair for name, pair in checks.items() if not pair[0] <= pair[1]}  # NaN is a fault
    return ", ".join(f"{name} is off by {off:.1e} (limit {most:.1e})" for name, (off, most) in faults.items()) or None


def product_operations(run: Callable[[], object], compiles: bool = False) -> float:
    """Count the operations of the matrix products in `run` that PyTorch's profiler sees: 2 m n k per product.

    The profiler sees products inside custom operators and compiled graphs, but not inside Triton kernels. It sees only
    the calling thread, so `run` is executed with one thread.

    Args:
        run: is called once, or twice if `compiles`.
        compiles: whether `run` uses torch.compile, which compiles again when the number of threads changes. The
            profiler would also see the products that are traced, so the first call is not profiled.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if compiles:
            run()
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


# Index of the left factor among an operator's arguments. The first argument of addmm and baddbmm is a summand.
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0} | {
    f"aten::{name}": 1 for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")
}
