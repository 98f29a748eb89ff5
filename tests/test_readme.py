"""The README does what it says."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def test_the_quick_start_runs_as_it_stands() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    statements = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) == 6
    scope: dict[str, torch.Tensor] = {}
    exec(code, scope)
    assert scope["hidden"].grad is not None and scope["hidden"].grad.isfinite().all()
    assert scope["out"].log_ratio.eq(0).all()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 200


def test_the_commands_it_names_exist() -> None:
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert len(makefile.splitlines()) < 30
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_tested_versions_are_the_installed_ones() -> None:
    pins = [Requirement(line) for line in CONSTRAINTS.splitlines() if not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert len(pins) == 7
    for pin in pins:
        assert pin.specifier.contains(version(pin.name).split("+")[0]), pin


def test_the_number_of_faults_is_that_of_the_tests() -> None:
    from test_mutations import FAULTS

    assert f"{len(FAULTS)} seeded faults" in README
