"""Marks of test cases."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*parameters: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that only `make test-all` runs."""
    return pytest.param(*parameters, marks=pytest.mark.slow)


by_dtype = pytest.mark.parametrize("dtype", [slow("fp64"), slow("fp32"), "bf16", slow("fp16")])

# Runs the Triton backend in `make test-all` only. `make test` compares a part of the rows of tests/math/test_array.py
# with float64. Place it next to the function, so that the backend comes first in a test's name.
triton_is_slow = pytest.mark.parametrize("backend", ["torch", slow("triton")])
