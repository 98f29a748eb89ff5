"""Precise arithmetic: fp32 matrix products without TF32, and elementwise products where 0 * inf is 0.

Importing this module also works around a bug in MKL (`_call_mkl_functions`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .workspace import workspace_bytes

# A constant, because torch 2.11's compiler cannot trace is_autocast_available.
AUTOCAST_DEVICES = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))

# Functions of torch that may call Intel's MKL on a CPU (PyTorch's source, `aten/src/ATen/cpu/vml.h`).
MKL_FUNCTIONS = "acos asin atan cos erf erfc erfinv exp expm1 log log10 log1p log2 sin sqrt tan tanh trunc".split()


def _call_mkl_functions() -> None:
    """Call each function in MKL_FUNCTIONS once, from a single thread, to work around a bug in MKL.

    MKL 2024.2, which PyTorch's x86 builds contain, chooses the implementation of a function when it is first called. If
    two threads make this first call at the same time, one of them may run a less accurate implementation, with a
    relative error of about 1e-4 (PyTorch issue 188792). Before this workaround, the first log-probs of a process were
    sometimes off by 1.5e-5 on a busy machine.
    """
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype, device="cpu")  # for a single number, PyTorch uses a single thread
        for name in MKL_FUNCTIONS:
            getattr(torch, name)(half)


_call_mkl_functions()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast inside this context, if it is enabled."""
    enabled = device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()


_lock = threading.Lock()
_calls = 0  # number of open `exact_products` contexts
_requested: set[str] = set()  # device types whose products these contexts keep in fp32
_restore: list[Callable[[], None]] = []  # called when the last context closes


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Disable autocast and reduced-precision matrix products inside this context.

    fp32 products do not use TF32 or bf16, and bf16 products on CUDA are never summed in bf16. These are process-wide
    settings. The first context to open saves them and the last one to close restores them, so that contexts in several
    threads do not interfere.
    """
    global _calls
    with _lock:
        _request_ieee("cuda" if device.type == "cuda" else "cpu")
        _calls += 1
    try:
        with without_autocast(device):
            yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls:
                _restore_requests()


def _request_ieee(kind: str) -> None:
    """Set products on "cuda" or "cpu" to fp32, and record in `_restore` how to restore the settings.

    PyTorch has a setting for all backends (`set_float32_matmul_precision`) and one per backend (`fp32_precision`). If
    they disagree, reading `allow_tf32` raises, and PyTorch's CUDA code reads it.
    """
    torch_backends: Any = torch.backends
    backends = {"cuda": torch_backends.cuda.matmul, "cpu": torch_backends.mkldnn.matmul}
    kinds = {kind} - _requested
    saved = [partial(setattr, x, "fp32_precision", x.fp32_precision) for name, x in backends.items() if name in kinds]
    if not _requested:
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:  # only per-backend settings were changed, so the common setting has its default
            precision = "highest"
        if precision != "highest":  # the common setting was changed
            kinds = set(backends)
            saved = [partial(setattr, x, "fp32_precision", x.fp32_precision) for x in backends.values()]
            torch.set_float32_matmul_precision("highest")
            saved.insert(0, partial(torch.set_float32_matmul_precision, precision))
    if kind == "cuda" and kind not in _requested:  # do not sum the parts of split-K products in bf16
        matmul = torch_backends.cuda.matmul
        # Set a pair: a single bool would also allow split-K products, which the user may have disabled.
        split_k = matmul.allow_bf16_reduced_precision_reduction_split_k
        pair = (matmul.allow_bf16_reduced_precision_reduction, split_k)
        saved.append(partial(setattr, matmul, "allow_bf16_reduced_precision_reduction", pair))
        matmul.allow_bf16_reduced_precision_reduction = (False, split_k)
    for name in kinds:
        backends[name].fp32_precision = "ieee"
    _requested.update(kinds)
    _restore.extend(saved)


def _restore_requests() -> None:
    """Restore the saved settings."""
    for restore in _restore:
        restore()
    _restore.clear()
    _requested.clear()


def _leave_calls_of_the_parent() -> None:
    """Restore the settings in a forked process, which lacks the threads with open contexts."""
    global _lock, _calls
    _lock, _calls = threading.Lock(), 0
    _restore_requests()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_calls_of_the_parent)


def multiplies_bf16(device: torch.device) -> bool:
    """True for a CPU with native bf16 matmul that accumulates in fp32."""
    return device.type == "cpu" and _cpu_multiplies_bf16()


@functools.cache
def _cpu_multiplies_bf16() -> bool:
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # absent in some versions of torch
    return any(getattr(torch.cpu, name, bool)() for name in names)


COLUMN_MULTIPLE = 24  # columns of a matrix product on a CPU, see `pad_columns`


def pad_columns(weight: Tensor) -> Tensor:
    """On a CPU, pad W = `weight` [C, H] with zero rows to a multiple of COLUMN_MULTIPLE, for the product h W^T.

    In the last C % 24 columns of the product, MKL's order of additions depends on the row's position in h. (Seen on
    Zen 4: in fp32 if there are fewer than 12 such columns, in fp64 with any number.) With padding, a row has the same
    bits at any position.
    """
    padding = -weight.shape[0] % COLUMN_MULTIPLE if weight.device.type == "cpu" else 0
    return F.pad(weight, (0, 0, 0, padding)) if padding else weight


def add_product(out: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """Add a @ b to `out`, or overwrite `out` if `first`. The product accumulates in the dtype of `out`.

    On CUDA, half-precision operands are multiplied without a cast, unless `refuses_mixed_products`.
    """
    if out.is_meta and torch.version.hip is None:  # not every version of torch supports the product below on meta
        return
    beta = 0 if first else 1  # with 0, `out` is not read
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=beta)
    elif a.is_cuda and not refuses_mixed_products():
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, out=out)
    else:
        _add_product_of_copies(out, a, b, beta)


def refuses_mixed_products() -> bool:
    """True if PyTorch may refuse an fp32 product of half-precision operands on a GPU.

    Some ROCm versions refuse it, and with TunableOp (PYTORCH_TUNABLEOP_ENABLED=1) every version does.
    """
    if torch.version.hip is not None:
        return True
    return torch.version.cuda is not None and torch.cuda.tunable.is_enabled()


def bytes_of_copies() -> int:
    """Memory limit, in bytes, for copies of operands that are cast to the dtype of their product."""
    return workspace_bytes() // 8


def _add_product_of_copies(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """Compute beta * out + a @ b in place, from copies of `a` [n, k] and `b` [k, m] in the dtype of `out`.

    The products are split along k so that the copies fit into `bytes_of_copies`.
    """
    size = max(bytes_of_copies() // ((a.shape[0] + b.shape[1]) * out.itemsize), 1)
    for start in range(0, a.shape[1], size):
        part = slice(start, start + size)
        out.addmm_(a[:, part].to(out.dtype), b[part].to(out.dtype), beta=beta if start == 0 else 1)


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a @ b to `out` in half precision, accumulated in fp32 and rounded once."""
    if out.is_meta:
        return
    if out.device.type == "cpu":
        out.copy_(a.float() @ b.float())
    else:
        torch.mm(a, b, out=out)


def power_of_two(gradients: Tensor, entropy_gradients: Tensor | None, valid: Tensor, slope: Tensor | float) -> Tensor:
    """The power of two, [], that scales the largest gradient times `slope` to near 1.

    d_logits are multiplied by it before they are rounded to fp16, because fp16 flushes values below 2^-25 to 0. If the
    largest value is 0 or not finite, the result is 1.

    Args:
        gradients: [N].
        entropy_gradients: [N], or None.
        valid: [N] bool; other rows are ignored.
        slope: logit_scale / temperature, a factor of d_logits; [N] or a number.
    """
    size = gradients.abs() if entropy_gradients is None else torch.maximum(gradients.abs(), entropy_gradients.abs())
    size = size * abs(slope)
    largest = torch.cat([torch.where(valid, size, 0), size.new_zeros(1)]).amax()
    exponent = -largest.log2().ceil().clamp(-126, 126)
    return torch.where((largest > 0) & largest.isfinite(), exponent.exp2(), 1.0)


def multiply_no_nan(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x by y. Where one is 0, the result is 0 even if the other is NaN or inf (a ratio that overflowed)."""
    return torch.where(torch.logical_and(x, y), x * y, 0)
