"""Marks of test cases."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*parameters: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that only `make test-all` runs."""
    return pytest.param(*parameters, marks=pytest.mark.slow)
