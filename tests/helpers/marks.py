"""Marks of test cases."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*parameters: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that only `make test-all` runs."""
    return pytest.param(*parameters, marks=pytest.mark.slow)


# For tests that compare formulas, which `tests/math/test_parity.py` does for both backends in every objective.
triton_is_slow = pytest.mark.parametrize("backend", ["torch", slow("triton")])
