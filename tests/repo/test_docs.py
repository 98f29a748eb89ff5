"""The pages in docs/ name only tests and files that exist, and numerics.md has the limits of the tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tolerance

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("gspo_kernels", "integrations", "benchmarks", "examples", "tests")
SOURCES = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_tests_and_linked_files_exist(page: Path) -> None:
    text = page.read_text()
    for file, test in re.findall(r"`(test_\w+\.py)::(test_\w+)`", text):
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(), f"{file}::{test}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert any(path.endswith(f"/{file}") for path in SOURCES), file


def test_the_limits_of_the_numerics_page_are_those_of_the_tests() -> None:
    named = []
    for line in (ROOT / "docs" / "concepts" / "numerics.md").read_text().splitlines():
        numbers = [float(x) for x in re.findall(r"[\d.]+(?:e-\d+)?", line) if x.strip(".")]
        for name in re.findall(r"`([A-Z\d_]+)`", line):
            limit = getattr(tolerance, name)
            assert set(limit.values() if isinstance(limit, dict) else [limit]) <= set(numbers), name
            named.append(name)
    assert len(named) == 12
