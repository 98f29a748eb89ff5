"""Capture the arguments of a function that is called inside another call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch


class _Reached(Exception):
    """Ends the outer call."""


def arguments_of(module: Any, name: str, call: Callable[[], object]) -> tuple[Any, ...]:
    """Run `call` up to its call of `module.name`, and return the positional arguments of that call."""
    with patch.object(module, name, side_effect=_Reached) as function:
        try:
            call()
        except _Reached:
            return function.call_args.args
    raise AssertionError(f"{name} was not called")
