"""Our functions for verl's Megatron engine, also in verl's own forward of a GPTModel, on two gloo processes (TP 2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.verl_worker import run_ranks

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from helpers.verl_megatron import DEADLINE, main


def test_log_probs_of_a_sharded_model_equal_those_of_complete_logits(tmp_path: Path) -> None:
    run_ranks(main, 2, tmp_path, deadline=DEADLINE)  # raises the exception of a rank
