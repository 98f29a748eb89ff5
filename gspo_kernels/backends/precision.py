"""Products that keep their precision: fp32 matrix products in fp32, and elementwise ones without NaN from 0 * inf."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Asked once: torch 2.11's compiler cannot trace the question.
AUTOCAST_DEVICES = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))

_lock = threading.Lock()
_calls = 0  # how many are inside `exact_products`
_requested: set[str] = set()  # device types whose products they keep fp32
_restore: list[Callable[[], None]] = []  # what the last of them calls


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Keep autocast and a global request for TF32 or bf16 products from the products inside.

    That request is a setting of the process: the first call in saves it, the last one out restores it, so that calls in
    several threads do not restore each other's.
    """
    global _calls
    with _lock:
        _request_ieee("cuda" if device.type == "cuda" else "cpu")
        _calls += 1
    try:
        with torch.autocast(device.type, enabled=False) if device.type in AUTOCAST_DEVICES else nullcontext():
            yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls:
                _restore_requests()


def _request_ieee(kind: str) -> None:
    """Request fp32 products, and note in `_restore` how to restore the request.

    PyTorch holds it twice: for all products (`set_float32_matmul_precision`) and per backend (`fp32_precision`). Where
    the two disagree, reading `allow_tf32`, as PyTorch's own CUDA code does, raises.
    """
    torch_backends: Any = torch.backends
    backends = {"cuda": torch_backends.cuda.matmul, "cpu": torch_backends.mkldnn.matmul}
    kinds = {kind} - _requested
    saved = [partial(setattr, x, "fp32_precision", x.fp32_precision) for name, x in backends.items() if name in kinds]
    if not _requested:
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:  # the user set only the backends', so that the other is at its default
            precision = "highest"
        if precision != "highest":  # was set for every backend
            kinds = set(backends)
            saved = [partial(setattr, x, "fp32_precision", x.fp32_precision) for x in backends.values()]
            torch.set_float32_matmul_precision("highest")
            saved.insert(0, partial(torch.set_float32_matmul_precision, precision))
    for name in kinds:
        backends[name].fp32_precision = "ieee"
    _requested.update(kinds)
    _restore.extend(saved)


def _restore_requests() -> None:
    for restore in _restore:
        restore()
    _restore.clear()
    _requested.clear()


def _leave_calls_of_the_parent() -> None:
    """Restore the requests in a forked process, which has none of the threads that would."""
    global _lock, _calls
    _lock, _calls = threading.Lock(), 0
    _restore_requests()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_calls_of_the_parent)


COLUMN_MULTIPLE = 24


def whole_columns(weight: Tensor) -> Tensor:
    """`weight` [C, H] as right factor of h W', on a CPU with rows of zeros up to a multiple of 24.

    What is left over of the columns beyond such a multiple, MKL adds up in an order that depends on where among the
    rows of h a row stands (seen on Zen 4: in fp32 below 12 columns, in fp64 at any rest). Its bits would depend on it.
    """
    more = -weight.shape[0] % COLUMN_MULTIPLE if weight.device.type == "cpu" else 0
    return F.pad(weight, (0, 0, 0, more)) if more else weight


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, accumulated in the dtype of `into`: fp32 for half operands, which CUDA multiplies as they are."""
    if into.is_meta:  # nothing to compute, and not every torch knows the product below without numbers
        return
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.ops.aten.addmm.dtype_out(into, a, b, into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def power_of_two(gradients: Tensor, more: Tensor | None, counts: Tensor) -> Tensor:
    """Brings the largest gradient near 1 before it is rounded to fp16, which has no exponents below 2^-24.

    Args: two sets of gradients [N], of the second there may be none, and which rows of them count.
    """
    size = gradients.abs() if more is None else torch.maximum(gradients.abs(), more.abs())
    largest = torch.cat([torch.where(counts, size, 0), size.new_zeros(1)]).amax()
    exponent = -largest.log2().ceil().clamp(-126, 126)
    return torch.where((largest > 0) & largest.isfinite(), exponent.exp2(), 1.0)


def multiply_no_nan(x: Tensor, y: Tensor) -> Tensor:
    """Multiply, with exactly 0 where one factor is 0: the other may be the inf of an exploded ratio, or NaN."""
    return torch.where((x == 0) | (y == 0), 0, x * y)
