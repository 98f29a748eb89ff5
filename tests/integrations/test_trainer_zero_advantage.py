"""Answers with advantage 0 do not run. That no update changes: test_trainer_array.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.reference_runs import moe_checkpoint, small
from torch import nn

from gspo_kernels.integrations.reference_trainer import zero_advantage
from gspo_kernels.integrations.reference_trainer.config import TrainConfig
from gspo_kernels.integrations.reference_trainer.loading import initial_policy
from gspo_kernels.integrations.reference_trainer.policy import demo_policy
from gspo_kernels.integrations.reference_trainer.zero_advantage import live_rows, rows_to_run, skipping


def test_rows_are_live_by_mask_and_advantage() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]]).bool()
    advantages = torch.tensor([1e-30, 1.0, 1.0, 0.0, torch.nan])
    assert live_rows(advantages, mask).tolist() == [True, True, False, False, True]
    of_tokens = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    assert live_rows(of_tokens, mask).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(("processes", "expected"), [(1, [7, 1, 4]), (2, [7, 3, 1, 4]), (3, [7, 3, 1, 4, 5, 2])])
def test_all_processes_run_equally_many_rows(
    processes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_advantage, "world", lambda: processes)
    live = torch.zeros(8, dtype=torch.bool)
    rows = torch.tensor([7, 3, 1, 4, 5, 2])
    assert len(rows_to_run(live, rows)) == processes  # without live rows, every process runs one
    live[[1, 4, 7]] = True
    if processes == 3:
        live[0] = live[5] = True  # four live rows among `rows`
    assert rows_to_run(live, rows).tolist() == expected
    assert torch.equal(rows_to_run(None, rows), rows)


def test_a_part_of_the_model_that_makes_skipping_inexact_is_named(tmp_path: Path) -> None:
    policy = demo_policy()
    assert skipping(TrainConfig(), policy)[:2] == (True, True) and not demo_policy().keeps_padding
    policy.model.model.rotary_emb.rope_type = {"full_attention": "dynamic"}
    assert "(rope_type='dynamic')" in skipping(TrainConfig(), policy).description and policy.keeps_padding
    policy.model.model.layers[0].experts = nn.ModuleList([nn.Linear(2, 2)])
    assert "(experts that are separate modules in model.layers.0)" in skipping(TrainConfig(), policy).description
    config = small(tmp_path, model=str(moe_checkpoint(tmp_path / "experts")))
    assert "router_aux_loss_coef=0.5" in skipping(config, initial_policy(config)).description
