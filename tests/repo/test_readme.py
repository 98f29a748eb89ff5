"""The README's code runs, and its links work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.readme import QUICK_START, README, ROOT


def test_the_quick_start_prints_the_output_in_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, comment = QUICK_START.rpartition("\n# ")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert comment.startswith(capsys.readouterr().out.strip())
    assert scope["hidden"].grad[2].count_nonzero() == 0


def test_files_in_the_readme_exist_and_links_work_on_a_package_index() -> None:
    """`setup.py` makes relative links absolute, once pyproject.toml has the public address."""
    mentioned = re.findall(r"`((?:docs|examples)/[\w./]+|[A-Z]+\.md)`", README)
    linked = [link for link in re.findall(r"\[[^]]*\]\(([^)]+)\)", README) if not link.startswith("https://")]
    for path in mentioned + linked:
        assert (ROOT / path.partition("#")[0]).exists(), path
