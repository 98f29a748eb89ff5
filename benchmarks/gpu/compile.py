"""Kernels compiled before they are needed, on all cores; what is compiled is what the host code asks for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from gspo_kernels.backends.rows import HeadRows, NeedsGradient
from gspo_kernels.backends.triton import head_backward, head_forward
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.backends.triton.tuning import architecture, assume
from gspo_kernels.tools.compile_gate import specialise

META = torch.device("meta")


def needed(device: torch.device, meta: HeadRows) -> list[Launch]:
    """What `device` would launch in a forward and a backward with a head on the meta device; nothing runs."""
    with assume(architecture(device) or ""), launches() as seen:
        result = head_forward(meta)
        d_entropy = torch.empty_like(result.entropy) if meta.entropy else None
        # Gradients of hidden states and weight take the same kernels, and products that are none of ours.
        needs = NeedsGradient(
            False, False, meta.bias is not None, meta.adapter_hidden is not None, meta.adapter_weight is not None
        )
        head_backward(meta, result, torch.empty_like(result.log_probs), d_entropy, needs)
    return seen


def compile_all(some: Iterable[Launch]) -> list[tuple[Launch, str]]:
    """Compile what these launches need, as the JIT would when they come; returns those that failed, and how."""
    distinct = {(x.kernel.__name__, x.config, str(specialise(x))): x for x in some}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = zip(distinct.values(), pool.map(_failure, distinct.values()), strict=True)
        return [(one, failure) for one, failure in outcomes if failure]


def _failure(one: Launch) -> str:
    try:
        options = {"num_warps": one.config.warps, "num_stages": one.config.stages}
        one.kernel.warmup(**one.arguments, grid=(one.programs,), **options)
    except Exception as error:  # whatever the compiler throws; who launches the kernel will meet it again
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return ""
