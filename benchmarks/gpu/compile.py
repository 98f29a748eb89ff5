"""Compile kernels before they are needed, on all cores: those that the host code would launch."""

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

# Gradients of hidden states and of the weight take the same kernels, and products that are none of ours.
NEEDS = NeedsGradient(hidden=False, weight=False, bias=False, adapter_hidden=False, adapter_weight=False)


def needed(device: torch.device, head: HeadRows) -> list[Launch]:
    """Return what `device` would launch in a forward and a backward of a head of meta tensors; nothing runs."""
    with assume(architecture(device) or ""), launches() as seen:
        result = head_forward(head)
        head_backward(head, result, torch.empty_like(result.log_probs), None, NEEDS)
    return seen


def compile_all(seen: Iterable[Launch]) -> list[tuple[Launch, str]]:
    """Compile what these launches need, as the JIT would; return those that fail, and why."""
    distinct = {(x.kernel.__name__, x.config, str(specialise(x))): x for x in seen}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = zip(distinct.values(), pool.map(_failure, distinct.values()), strict=True)
        return [(x, failure) for x, failure in outcomes if failure]


def _failure(x: Launch) -> str:
    try:
        options = {"num_warps": x.config.warps, "num_stages": x.config.stages}
        x.kernel.warmup(**x.arguments, grid=(x.programs,), **options)
    except Exception as error:  # of any kind: too much shared memory, a compiler pass that gives up
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return ""
