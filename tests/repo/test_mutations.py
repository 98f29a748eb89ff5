"""The tests detect seeded faults. Each fault is an edit of a copy of the library, and a named test must fail on it.

If the test passes in spite of the fault, the library makes a promise that no test checks.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.faults import FAULTS
from helpers.faults.run import is_killed, source_of
from stub.driver import COMPILER


def test_every_fault_is_an_edit_of_the_library() -> None:
    sources = {module: source_of(module).read_text() for module, *_ in FAULTS.values()}
    assert [name for name, (module, text, *_) in FAULTS.items() if text not in sources[module]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_killed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    if fault[3].startswith("trainers/trl"):
        pytest.importorskip("trl", minversion="1.15")
    if fault[3].startswith("trainers/verl") and importlib.util.find_spec("verl") is None:
        pytest.skip("needs verl, which is installed in another environment: make test-trainers")
    if fault[3].startswith("stub/") and not COMPILER:
        pytest.skip("needs a C compiler")
    assert is_killed(fault, tmp_path), f"{name}: test passed or did not run\n{(tmp_path / 'log').read_text()[-2000:]}"
