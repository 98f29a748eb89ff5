"""The README's code runs, its links work, and its versions are installed."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from helpers.readme import CONSTRAINTS, QUICK_START, README, ROOT
from packaging.requirements import Requirement

from gspo_kernels import LossOutput
from gspo_kernels.metrics import NAMES


def test_the_quick_start_prints_the_output_in_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, comment = QUICK_START.rpartition("\n# ")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert comment.startswith(capsys.readouterr().out.strip())
    assert scope["hidden"].grad[2].count_nonzero() == 0


def test_the_docstring_explains_every_metric() -> None:
    assert LossOutput.__doc__ is not None
    for name in (*NAMES, "invalid"):
        stem = name.removesuffix("_low").removesuffix("_high")
        assert stem in LossOutput.__doc__, name


def test_files_in_the_readme_exist_and_links_work_on_a_package_index() -> None:
    """`setup.py` makes relative links absolute, once pyproject.toml has the public address."""
    mentioned = re.findall(r"`((?:docs|examples)/[\w./]+|[A-Z]+\.md)`", README)
    linked = [link for link in re.findall(r"\[[^]]*\]\(([^)]+)\)", README) if not link.startswith("https://")]
    for path in mentioned + linked:
        assert (ROOT / path.partition("#")[0]).exists(), path


@pytest.mark.skipif(Path(sys.prefix).name != ".venv", reason="only the Makefile's .venv has the tested versions")
def test_the_versions_in_the_readme_are_installed() -> None:
    pins = [Requirement(line) for line in CONSTRAINTS.splitlines() if not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert pins
    for pin in pins:
        assert pin.specifier.contains(version(pin.name).split("+")[0]), pin
