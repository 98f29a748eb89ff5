"""Gradients and log-probs of the kernel agree with float64, on a GPU if there is one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel = get_local_kernel(ROOT)
Benchmark = runpy.run_path(str(ROOT / "benchmarks" / "benchmark_loss.py"))["FusedLossBenchmark"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_within_our_error_bound(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = Benchmark()
    case.kernel = kernel
    case.device = DEVICE
    case.dtype = dtype
    case.setup()  # checks the gradients


def test_log_probs_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(40, 64, device=DEVICE)
    weight = torch.randn(1000, 64, device=DEVICE)
    target_ids = torch.randint(1000, (40,), device=DEVICE)
    rows = kernel.linear_log_probs(hidden, weight, target_ids).log_probs
    assert torch.equal(kernel.linear_log_probs(hidden[7:9], weight, target_ids[7:9]).log_probs, rows[7:9])


def test_the_operators_have_the_namespace_of_this_build() -> None:
    kernel.linear_log_probs(torch.randn(2, 8), torch.randn(30, 8), torch.tensor([3, 4]))
    assert hasattr(getattr(torch.ops, kernel.__name__), "linear_log_probs")
