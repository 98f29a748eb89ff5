"""Sharded vocabularies and sequences on gloo processes, compared with one process. The cases: helpers/sharded_cases.py.

All cases run in one start of the processes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_cases import CASES
from helpers.sharded_ranks import DEADLINE, WORLD, main


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(main, WORLD, folder, deadline=DEADLINE)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, reports: list[dict[str, Any]]) -> None:
    ranks = range(CASES[name].ranks)
    assert all(name in reports[rank]["seconds"] for rank in ranks), "the case did not run"
    errors = {rank: reports[rank]["errors"][name] for rank in ranks if name in reports[rank]["errors"]}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
