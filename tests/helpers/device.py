"""Call the public functions on the device under test: a GPU in a run of `pytest -m gpu`, otherwise the CPU.

Tests and the oracle compute on the CPU. The functions here move their arguments to the device and their results back.
Autograd moves gradients in the same way. If the device is the CPU, nothing is copied, so bits and strides do not
change.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gspo_kernels
from gspo_kernels import LogProbOutput, LossOutput

DEVICE = torch.device(os.environ.get("GSPO_TEST_DEVICE", "cpu"))
T = TypeVar("T")
LIBRARY: Any = gspo_kernels  # pyright does not see its lazily imported names
on_device = pytest.mark.usefixtures("device")


def obstacle() -> str:
    """Return the reason why a test for GPUs cannot run in this process, or "" if it can."""
    if DEVICE.type == "cpu":
        return "needs a GPU: python -m pytest -m gpu"
    return "" if torch.cuda.is_available() else "PyTorch sees no GPU"


def to_device(tree: T, device: torch.device | str = DEVICE) -> T:
    """Move all tensors in nested tuples, lists and dicts to the device. Modules are moved in place."""
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor | nn.Module) else x, tree)


def gspo_fused_loss(*arguments: Any, **options: Any) -> LossOutput:
    return to_device(LIBRARY.gspo_fused_loss(*to_device(arguments), **to_device(options)), "cpu")


def linear_log_probs(*arguments: Any, **options: Any) -> LogProbOutput:
    return to_device(LIBRARY.linear_log_probs(*to_device(arguments), **to_device(options)), "cpu")


def policy_loss(*arguments: Any, **options: Any) -> LossOutput:
    return to_device(LIBRARY.policy_loss(*to_device(arguments), **to_device(options)), "cpu")


def run_policy(log_probs: Tensor, advantages: Tensor, **options: Any) -> tuple[LossOutput, Tensor]:
    """Compute the loss from log-probs, and its gradient with respect to them."""
    leaf = log_probs.detach().clone().requires_grad_()
    out = policy_loss(leaf, advantages, **options)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return out, gradient
