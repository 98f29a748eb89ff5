"""The `Backend` interface, and the choice between Triton kernels (on GPUs) and torch (on any device)."""

from __future__ import annotations

import functools
import os
from typing import Protocol

import torch
from torch import Tensor

from ..objective import Objective
from ..validation import TensorChecks
from . import torch as torch_backend
from .live_tiles import Work
from .pairs import PairKernels
from .rows import (
    Cache,
    Cached,
    HeadGradients,
    HeadResult,
    HeadRows,
    LiveTiles,
    NeedsGradient,
    PolicyResult,
    PolicyRows,
)
from .self_check import verdict

BACKENDS = ("auto", "torch", "triton")  # the values of `backend`


class Backend(PairKernels, Protocol):
    """The functions of a backend. A backend is a module: `backends.torch` or `backends.triton`."""

    def head_forward(self, head: HeadRows) -> HeadResult:
        """Run `forward_and_cache` without a cache or tile masses."""
        ...

    def forward_and_cache(
        self, head: HeadRows, tile_mass: bool = False, cache: Cache | None = None
    ) -> tuple[HeadResult, Cached]:
        """Compute log-probs and entropies, and return what the backward can reuse.

        Cache the probability of each vocabulary tile if `tile_mass`, and exponentials if `cache`. No probabilities are
        cached
        if `cell_shape(head)` is None.
        """
        ...

    def empty_cached(self, head: HeadRows, tile_mass: bool, cache_rows: int) -> Cached:
        """Allocate tensors with the shapes that `forward_and_cache` returns, uninitialized."""
        ...

    def cache_rows(self, head: HeadRows, cache_bytes: int) -> int:
        """Number of rows whose exponentials fit into `cache_bytes`."""
        ...

    def head_backward(
        self,
        head: HeadRows,
        result: HeadResult,
        d_log_probs: Tensor,
        d_entropy: Tensor | None,
        needs: NeedsGradient,
        live_tiles: LiveTiles | None = None,
        cached: Cached | None = None,
    ) -> HeadGradients:
        """Compute the gradients of the head's operands from the gradients of log-probs [N] and entropies [N].

        The gradients of masked rows must be 0. Without `live_tiles`, all columns of every row with a gradient are
        computed. Logits with exponentials in `cached` are not recomputed.
        """
        ...

    def choose(
        self,
        head: HeadRows,
        result: HeadResult,
        coefficient: Tensor,
        cached: Cached,
        cell: tuple[int, int],
        budget: float,
    ) -> tuple[LiveTiles, Work]:
        """Choose the cells to compute, so that at most a share `budget` of the L1 mass of d_logits is dropped.

        `cell` is `cell_shape(head)`.
        """
        ...

    def policy_forward(
        self, log_probs: Tensor, entropy: Tensor | None, mask: Tensor, policy: PolicyRows, objective: Objective
    ) -> PolicyResult:
        """Compute the loss and its derivatives with respect to log-probs and entropies, from tensors [N]."""
        ...

    def cell_shape(self, head: HeadRows) -> tuple[int, int] | None:
        """Shape (rows, columns) of a cell, the unit that the backward may leave out.

        None if no cell of this head can be left out.
        """
        ...


def implementation(backend: str) -> Backend:
    """Import the backend named "torch" or "triton"."""
    if backend == "torch":
        return torch_backend
    from . import triton as triton_backend  # imported only when it runs, because Triton may be absent

    return triton_backend


def pick_backend(
    check: TensorChecks, backend: str, device: torch.device, dtype: torch.dtype | None = None, subject: str = "head"
) -> str:
    """Choose "torch" or "triton" for `device`. Raise an error if `backend` names one that cannot run there.

    Args:
        check: names the public function in error messages.
        backend: "torch", "triton", or "auto", which the environment variable GSPO_BACKEND may replace.
        device: of the arguments.
        dtype: of hidden states and head or, for "loss", of log-probs. The first use of the Triton kernels on an
            accelerator checks them in this dtype. None: skip the check and assume that the kernels are right.
        subject: which kernels to check, "head" or "loss".
    """
    if backend == "auto":
        backend = backend_variable()
    check.choice("backend", backend, BACKENDS)
    # On a CPU the kernels are interpreted, which is for tests only.
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        return "torch"
    obstacle = triton_obstacle(device)
    if obstacle is None and device.type != "cpu" and dtype is not None:
        obstacle = verdict.obstacle(backend, device, dtype, subject, torch.compiler.is_compiling())
    if backend == "triton" and obstacle:
        check.fail("backend", f"'torch' or 'auto' on {device}, because {obstacle}", backend)
    return "torch" if obstacle else "triton"


def backend_variable() -> str:
    """GSPO_BACKEND, or "auto" if it is not set."""
    name = os.environ.get("GSPO_BACKEND") or "auto"
    if name not in BACKENDS:
        raise ValueError(f"environment variable GSPO_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def triton_obstacle(device: torch.device) -> str | None:
    """The reason why the Triton kernels cannot run on `device`, or None if they can."""
    return _triton_obstacle(device)


# Without this attribute, torch.compile would trace the import of Triton. torch.compiler.assume_constant_result sets it
# too, but imports the compiler, which takes seconds.
triton_obstacle._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _triton_obstacle(device: torch.device) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return "the Triton kernels run on CUDA and ROCm devices"
    try:
        import triton  # noqa: F401

        from .triton import logit_tile, tuning
    except Exception as error:  # a broken installation may raise any exception
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    if device.type == "cpu":
        hint = "the Triton kernels run on a CPU only when interpreted: set TRITON_INTERPRET=1 before the first import"
        return None if logit_tile.INTERPRETED else hint
    if tuning.architecture(device) is None:
        return f"there is no table of block shapes for {torch.cuda.get_device_name(device)}"
    return None
