"""The pages in docs/ name only tests and files that exist, and scale.md has the lines and numbers that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.pages import MEGATRON_LINES, SCALE, TRL_LINES, VERL_LINES, code_blocks
from typer.testing import CliRunner

from gspo_kernels.benchmarks.report import scale
from gspo_kernels.tools.cli import app

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


@pytest.mark.parametrize(
    ("language", "name", "run"),
    [("python", "trl", TRL_LINES), ("python", "megatron", MEGATRON_LINES), ("bash", "verl", VERL_LINES)],
)
def test_the_trainers_lines_of_the_scale_page_are_those_that_run(language: str, name: str, run: str) -> None:
    """Other tests run the lines of the trainers' pages."""
    (block,) = code_blocks(SCALE, language, f"gspo_kernels.integrations.{name}")
    assert {line.strip() for line in block.splitlines()} <= {line.strip() for line in run.splitlines()}


def test_the_command_of_the_scale_page_runs() -> None:
    (command,) = code_blocks(SCALE, "bash", "gspo doctor")
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0 and "a rank of TP 8 x CP 2" in result.output


def test_the_tables_of_the_scale_page_are_those_of_the_formulas() -> None:
    assert scale.page() == SCALE, "run python -m gspo_kernels.benchmarks report"
