"""Which backend computes where: Triton kernels on GPUs, torch anywhere."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..validation import Call
from . import torch as portable


def pick_backend(call: Call, backend: str, device: torch.device) -> str:
    """The backend that runs on `device`: "auto" takes the best that can, an explicit choice never falls back."""
    call.choice("backend", backend, ("auto", "torch", "triton"))
    if backend == "torch":
        return "torch"
    obstacle = triton_obstacle(device)
    if backend == "triton" and obstacle:
        call.fail("backend", f"'torch' or 'auto' on {device}, because {obstacle}", backend)
    # Interpreted kernels are for tests: nobody wants them unasked.
    return "torch" if obstacle or (backend == "auto" and device.type == "cpu") else "triton"


def triton_obstacle(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`, None if they can."""
    return _triton_obstacle(device)


# What torch.compiler.assume_constant_result does, short of importing the compiler, which takes seconds: without it the
# import of Triton would be traced.
triton_obstacle._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _triton_obstacle(device: torch.device) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return "the Triton kernels run on CUDA and ROCm devices"
    try:
        import triton  # noqa: F401

        from .triton import logit_tile, tuning
    except Exception as error:  # a broken install may raise anything; whoever asked for Triton is told
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    if device.type == "cpu":
        wish = "the Triton kernels run on a CPU only when interpreted: set TRITON_INTERPRET=1 before the first import"
        return None if logit_tile.INTERPRETED else wish
    if tuning.architecture(device) is None:
        return f"there is no table of block shapes for {torch.cuda.get_device_name(device)}"
    return None


def implementation(backend: str) -> Any:
    """(head_forward, head_backward, policy_forward) of a backend."""
    if backend == "torch":
        return portable
    from . import triton as kernels

    return kernels
