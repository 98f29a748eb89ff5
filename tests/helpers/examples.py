"""The scripts in examples/."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def imported(name: str) -> Any:
    """Import a script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)
