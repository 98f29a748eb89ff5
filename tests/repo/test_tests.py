"""No file in tests/ imports from a test file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_nothing_is_imported_from_a_test_file(path: Path) -> None:
    """Code that several test files use belongs in tests/helpers/."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module or ''}.{alias.name}" for alias in node.names}
    assert not [module for module in modules if any(part.startswith("test_") for part in module.split("."))]
