"""The pages in docs/ speak of things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gspo_kernels.objective import _PRESETS

ROOT = Path(__file__).parent.parent.parent
PARITY = (ROOT / "docs" / "parity.md").read_text()
ROWS = "R1 R2 R8 R9 R10 R11 R12 R13 R14 R15 R16 R17 R18 B1 B2 B4 B5 B10 B12 T1 T11 T14 T18 T25 P1 P5 P6 P7".split()


def test_every_row_of_the_checklist_is_there_and_names_a_test() -> None:
    rows = re.findall(r"^\| ([RBTP]\d+) \|.*\| (.+?) \|$", PARITY, re.MULTILINE)
    assert [row for row, _ in rows] == ROWS
    assert all("::test_" in tests for _, tests in rows)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_tests_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for file, test in re.findall(r"`(test_\w+\.py)::(test_\w+)`", text):
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(), f"{file}::{test}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link


def test_every_preset_has_its_row() -> None:
    table = PARITY.partition("| `Objective.preset` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE) == list(_PRESETS)
