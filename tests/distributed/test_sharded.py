"""Sharded vocabularies and sequences on gloo processes, compared with one process. The cases: helpers/sharded_cases.py.

All selected cases run in one start of the processes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.marks import slow
from helpers.ranks import run_ranks
from helpers.sharded_cases import CASES
from helpers.sharded_ranks import DEADLINE, main


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tests = [item for item in request.session.items if "reports" in getattr(item, "fixturenames", ())]
    names = [test.callspec.params["name"] for test in tests]  # pyright: ignore[reportAttributeAccessIssue]
    folder = tmp_path_factory.mktemp("ranks")
    ranks = max(CASES[name].ranks for name in names)
    run_ranks(main, ranks, folder, names, deadline=DEADLINE)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


# `make test` leaves out these cases, and every case with more than two processes.
LONG = ("tp 2 triton cache_mib", "tp 2 triton cache_mib gradient_budget", "tp 2 triton gradient_budget")


@pytest.mark.parametrize("name", [slow(x) if CASES[x].ranks > 2 or x in LONG else x for x in CASES])
def test_case(name: str, reports: list[dict[str, Any]]) -> None:
    ranks = range(CASES[name].ranks)
    assert all(name in reports[rank]["seconds"] for rank in ranks), "the case did not run"
    errors = {rank: reports[rank]["errors"][name] for rank in ranks if name in reports[rank]["errors"]}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
