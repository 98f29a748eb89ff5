"""Model the sums of tensor cores, which truncate, and compare the error of log-probs with its limit."""

from __future__ import annotations

import pytest
import torch
from tolerance import truncation
from torch import Tensor

GPU = torch.device("cuda")


def truncated(x: Tensor, bits: int, of: Tensor) -> Tensor:
    """Truncate `x` toward zero to the last of the `bits` bits of the numbers `of`."""
    unit = torch.exp2(torch.frexp(of).exponent.double() - bits)
    return (x / unit).trunc_() * unit


def product(hidden: Tensor, weight: Tensor, at_once: int) -> Tensor:
    """Return hidden weight^T as tensor cores are believed to add it, `at_once` products at a time.

    The old sum and the new products are truncated to the larger one's exponent and 25 bits, one more than fp32 has.
    Their sum is truncated to fp32.
    """
    total = hidden.new_zeros(hidden.shape[0], weight.shape[0])
    for h, w in zip(hidden.split(at_once, 1), weight.split(at_once, 1), strict=True):
        terms = h @ w.T
        larger = torch.maximum(total.abs(), terms.abs())
        total = truncated(total, 25, of=larger) + truncated(terms, 25, of=larger)
        total = truncated(total, 24, of=total)
    return total


@pytest.mark.parametrize("at_once", [8, 16], ids=["Ampere", "Hopper"])
@pytest.mark.parametrize("width", [896, 2560])
def test_the_modelled_error_of_tensor_cores_is_within_the_limit(width: int, at_once: int) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(48, width, generator=rng)
    weight = torch.randn(2000, width, generator=rng) * 3 / width**0.5
    hidden, weight = hidden.bfloat16().double(), weight.bfloat16().double()
    exact = hidden @ weight.T
    error = product(hidden, weight, at_once).log_softmax(1) - exact.log_softmax(1)
    rms = error.square().mean().sqrt()
    mean = error.mean()
    limit = truncation(GPU, torch.bfloat16, width, exact.abs().max().item())
    print(f"H = {width}, {at_once} products at once: RMS {rms:.1e}, mean {mean:.1e}, limit {limit:.1e}")
    assert limit / 8 < rms < limit / 1.5 and mean > 0.9 * rms  # an unlikely token gains log-prob
