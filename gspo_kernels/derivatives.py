"""Errors for derivatives that the operators do not have: second derivatives, and those of `torch.func`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_gradtrackingtensor

# Functions of `gspo_kernels.reference` that autograd differentiates any number of times.
REPLACEMENTS = {
    "gspo_fused_loss": "gspo_reference_loss",
    "linear_log_probs": "token_log_probs",
    "policy_loss": "log_ratios_of_sequence and surrogate",
}


def refuse_second_derivative(function: str) -> NoReturn:
    """Raise the error of a backward through the backward of a public function."""
    raise RuntimeError(
        f"{function}: the gradient is not differentiable, got a second backward through it (gradient penalty, hvp, "
        f"hessian, jvp). Use gspo_kernels.reference.{REPLACEMENTS[function]}, which autograd differentiates twice"
    )


def refuse_torch_func(function: str, values: Iterable[object]) -> None:
    """Raise an error if `torch.func` differentiates one of `values`. PyTorch's error would name no function of ours."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if any(isinstance(x, Tensor) and _is_tracked(x) for x in values):
        raise RuntimeError(
            f"{function}: torch.func.grad, vjp, jacrev and hessian are not supported. Use .backward() or "
            "torch.autograd.grad, also with torch.func.functional_call"
        )


def _is_tracked(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = get_unwrapped(x)
    return False
