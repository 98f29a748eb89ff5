"""The study of whole models runs at a small size, and its statistics detect known errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from gspo_kernels.benchmarks.report import tables
from gspo_kernels.benchmarks.studies import precision
from gspo_kernels.benchmarks.studies.precision import NAIVE, OURS, SPREAD, flip_chance, passes_clip


def run_tiny(study: Any, output: Path) -> dict[str, Any]:
    """Run a study with small sizes (--tiny) and return its results."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["study", "--tiny", "--output", str(output)])
        study.main()
    torch.set_num_threads(threads)
    enable_progress_bar()
    return json.loads(output.read_text())["results"]


def test_known_errors_flip_the_expected_share_of_decisions() -> None:
    rng = torch.Generator().manual_seed(3)
    u, noise = torch.randn(2, 200_000, generator=rng, dtype=torch.float64)
    for error in (torch.zeros_like(noise), 1e-4 * noise):
        flips = []
        for positive in map(torch.tensor, (True, False)):
            changed = passes_clip(SPREAD * u + error, positive) != passes_clip(SPREAD * u, positive)
            flips.append(changed.double().mean().item())
        # five standard deviations of a share among 400,000 decisions
        assert sum(flips) / 2 == pytest.approx(flip_chance(error).mean().item(), abs=5 * 0.5 / 400_000**0.5)
    signs = [passes_clip(torch.tensor([-3.1e-4, 0, 4.1e-4]), torch.tensor(sign)) for sign in (True, False)]
    assert [x.tolist() for x in signs] == [[True, True, False], [False, True, True]]
    for end in precision.interval(3, 48):  # Wilson: the measured share is 1.96 standard deviations from either end
        assert abs(3 / 48 - end) == pytest.approx(1.959964 * (end * (1 - end) / 48) ** 0.5)


def test_whole_models_round_less_in_fp16_than_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "HEADS", (NAIVE, OURS))
    results = run_tiny(precision, tmp_path / "results.json")
    bodies = {body: tables.by_name(records) for body, records in results["runs"][0]["bodies"].items()}
    error = {
        body: {name: r["log-ratio"]["std of tokens"] for name, r in heads.items()} for body, heads in bodies.items()
    }
    for head in (NAIVE, OURS, precision.FP32_LOGITS):
        assert error["fp32"][head] < 1e-6 < error["fp16 autocast"][head] < error["bf16 autocast"][head] / 4
    assert all(error[body][OURS] < error[body][NAIVE] for body in bodies if body != "fp32")
    for body in bodies.keys() - {"fp32"}:  # fp32 operands are not rounded, and operands in 16 bits are exact
        for head in (precision.OURS_FP32, precision.EMULATED):
            assert error[body][head] == pytest.approx(error[body][precision.FP32_LOGITS], rel=2e-3)
    assert bodies["fp32"][OURS]["wrong"] == pytest.approx([0, 0, 0], abs=1e-4)
    mismatch = {(x["sampler"], *x["trainer"].values()): x["std of tokens"] for x in results["sampler"]}
    assert mismatch["fp32 head", "bf16 weights", OURS] < 1e-6 < mismatch["bf16 logits", "bf16 weights", OURS] / 100
    table = tables.wrong_clip_decisions_by_length({"precision-cpu": results})
    assert any(row.startswith("| full logits") for row in table.splitlines())
