"""Log-probs at the output layer of Megatron Core's GPTModel, on gloo processes. The cases: helpers/megatron_cases.py
and megatron_seam_cases.py.

`make test-trainers` runs these tests in an environment with megatron-core. Without it they are skipped. All cases run
in one start of the processes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.ranks import run_ranks

pytest.importorskip("megatron.core")

from helpers.megatron_cases import CASES, DEADLINE, WORLD
from helpers.megatron_seam_cases import main


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(main, WORLD, folder, deadline=DEADLINE)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, reports: list[dict[str, Any]]) -> None:
    assert all(name in report["cases"] for report in reports), "the case did not run"
    errors = {rank: report["errors"][name] for rank, report in enumerate(reports) if name in report["errors"]}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
