"""Sharded vocabularies and sequences on gloo processes: pairs and triples of all settings, and the cases of helpers/.

All selected cases run in one start of the processes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.features import BANS, BANS_OF_RANKS, FACTORS, OF_RANKS, TRIPLES_OF, row_of
from helpers.marks import slow
from helpers.pair_cover import pair_cover, seed_of_the_week
from helpers.ranks import run_ranks
from helpers.sharded_cases import CASES, add_row
from helpers.sharded_ranks import DEADLINE, main

SEED = seed_of_the_week()
ARRAY = pair_cover(FACTORS | OF_RANKS, seed=SEED, bans=[*BANS, *BANS_OF_RANKS], triples_of=(*TRIPLES_OF, "tp", "cp"))
# These rows always run, because each detects a fault that few of the week's rows detect.
PINNED = [
    "tp=2",
    "tp=2 vocab_size=padded",
    "tp=2 kept_sets=offsets",
    "tp=2 tiles=many policy=peaked gradient_budget=0.3",
    "cp=2",
    "cp=2 ratio=token tokens=masked_sequences",
    "cp=2 kept_sets=offsets compile=True",
    "cp=2 tiles=many logit_softcap=5.0 gradient_budget=0.3",
]
ROWS: dict[str, Any] = {f"row {i}": (row, SEED) for i, row in enumerate(ARRAY)}
ROWS |= {f"row {settings}": (row_of(settings), 1) for settings in PINNED}
for _name, (_row, _seed) in ROWS.items():
    add_row(_name, _row, _seed)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tests = [item for item in request.session.items if "reports" in getattr(item, "fixturenames", ())]
    names = [test.callspec.params["name"] for test in tests]  # pyright: ignore[reportAttributeAccessIssue]
    folder = tmp_path_factory.mktemp("ranks")
    ranks = max(CASES[name].ranks for name in names)
    rows = {name: row for name, row in ROWS.items() if name in names}
    run_ranks(main, ranks, folder, names, rows, deadline=DEADLINE)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def is_long(name: str) -> bool:
    """Say whether `make test` leaves a case out."""
    row = ROWS[name][0] if name in ROWS and ROWS[name][1] == SEED else {}
    return CASES[name].ranks > 2 or row.get("compile", False) or row.get("backend") == "triton"


@pytest.mark.parametrize("name", [slow(x) if is_long(x) else x for x in CASES])
def test_case(name: str, reports: list[dict[str, Any]]) -> None:
    ranks = range(CASES[name].ranks)
    assert all(name in reports[rank]["seconds"] for rank in ranks), "the case did not run"
    errors = {rank: reports[rank]["errors"][name] for rank in ranks if name in reports[rank]["errors"]}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
