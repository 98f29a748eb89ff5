"""The tests detect seeded faults. Each fault is an edit of a copy of the library, and a named test must fail on it.

If the test passes in spite of the fault, the library makes a promise that no test checks.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults import FAULTS
from faults.place import before_and_after, faulty_source, find
from faults.run import is_killed, run_with_fault

pytestmark = pytest.mark.slow  # also because faults quote the source: a refactoring mends them once, before it lands
# One fault of each kind of test: formulas, interpreted kernels, sharded tensors.
CONTROLS = ("gradient x 1.01", "last ragged tile dropped", "d_hidden not summed over ranks")


def test_every_fault_is_an_edit_of_the_library() -> None:
    places = {name: len(find(fault)) for name, fault in FAULTS.items()}
    assert {name: n for name, n in places.items() if n != 1} == {}
    for fault in FAULTS.values():
        _, source = faulty_source(fault)
        ast.parse(source)


@pytest.mark.parametrize("name", CONTROLS)
def test_without_its_fault_the_test_passes(name: str, tmp_path: Path) -> None:
    function, edit, test = FAULTS[name]
    path, source = faulty_source((function, before_and_after(edit)[0], test))
    assert run_with_fault(path, source, test, tmp_path) == 0


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_killed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    if fault[2].startswith("trainers/trl"):
        pytest.importorskip("trl", minversion="1.15")
    assert is_killed(fault, tmp_path), f"{name}: test passed or did not run\n{(tmp_path / 'log').read_text()[-2000:]}"
