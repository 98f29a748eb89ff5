"""The studies run at small sizes, and their statistics detect known errors and differences."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.logging import enable_progress_bar

from gspo_kernels import Objective, gspo_fused_loss
from gspo_kernels.benchmarks import peaked
from gspo_kernels.benchmarks.report import figures, tables
from gspo_kernels.benchmarks.studies import budgets, fidelity, policy, precision
from gspo_kernels.benchmarks.workloads import BUDGETS, Head

CPU = torch.device("cpu")
NAIVE = fidelity.NAIVE
OURS = fidelity.OURS


def run_tiny(study: Any, output: Path, *arguments: object) -> dict[str, Any]:
    """Run a study with small sizes (--tiny) and return its results."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["study", "--tiny", "--output", *map(str, (output, *arguments))])
        study.main()
    torch.set_num_threads(threads)
    enable_progress_bar()
    return json.loads(output.read_text())["results"]


def wrong(errors: dict[str, Tensor], length: int, sequence: Tensor | None = None) -> dict[str, Any]:
    """Return the record of wrong decisions of each implementation, for sequences of `length` tokens."""
    alone = torch.arange(len(next(iter(errors.values()))))
    records = fidelity.decisions(errors, (length,), 20_000, alone if sequence is None else sequence)
    return {name: {key: values[0] for key, values in record.items()} for name, record in records.items()}


def test_coarser_logits_and_log_probs_flip_more_decisions() -> None:
    runs, _ = fidelity.implementations(Head(128, 4096), CPU)
    runs = {name: runs[name] for name in (NAIVE, "fp16 logits", "fp32 logits", OURS)}
    runs["rounded"] = lambda *arguments: runs[OURS](*arguments).bfloat16()
    errors, _ = fidelity.measured(fidelity.updated(*peaked.make(256, 128, 4096)[:3]), runs)
    share = {name: record["wrong"] for name, record in wrong(fidelity.of_log_ratios(errors), 64).items()}
    assert share[NAIVE] > 0.2 > share["fp16 logits"] > 0.02 < share["rounded"] and share[fidelity.OTHER_ENGINE] > 0.2
    assert share[OURS] < 2e-3 and share["fp32 logits"] < 2e-3


def test_known_errors_flip_the_expected_share_of_decisions() -> None:
    rng = torch.Generator().manual_seed(3)
    noise, u = torch.randn(2, 200_000, generator=rng, dtype=torch.float64)
    noise = noise[:4096] - noise[:4096].mean()
    shares = wrong({"none": 0 * noise, "shift": 0 * noise + 1, "noise": 1e-3 * noise}, 64)
    assert shares["none"]["wrong"] == shares["none"]["wrong with the mean error"] == shares["shift"]["wrong"] == 0
    assert shares["shift"]["wrong with the mean error"] > 0.4
    flips = []
    for positive in map(torch.tensor, (True, False)):  # the mean error of 64 tokens is nearly normal
        error = 1e-3 / 8 * torch.randn(u.shape, generator=rng, dtype=torch.float64)
        true = fidelity.passes_clip(fidelity.SPREAD * u, positive)
        flips.append((fidelity.passes_clip(fidelity.SPREAD * u + error, positive) != true).double().mean())
    low, high = shares["noise"]["95 %"]
    assert low < sum(flips) / 2 < high < low + 0.03
    signs = [fidelity.passes_clip(torch.tensor([-3.1e-4, 0, 4.1e-4]), torch.tensor(sign)) for sign in (True, False)]
    assert [x.tolist() for x in signs] == [[True, True, False], [False, True, True]]


def test_fidelity_reports_a_missing_trained_policy_and_measures_the_rest(tmp_path: Path) -> None:
    results = run_tiny(fidelity, tmp_path / "results.json", "--policy", tmp_path / "none")
    assert list(results["sets"]) == ["synthetic"]
    assert "run `python -m gspo_kernels.benchmarks policy` first" in results["not measured"]["trained policy"]
    figures.draw_fidelity(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("length", precision.LENGTHS)
def test_errors_of_answers_flip_the_share_of_decisions_that_the_normal_distribution_gives(length: int) -> None:
    rng = torch.Generator().manual_seed(0)
    of_answers = 2e-4 * torch.randn(400, 1, generator=rng, dtype=torch.float64)  # the error of each token of an answer
    share = precision.wrong(of_answers.expand(-1, 512), length, rng).item()
    chained = of_answers.view(-1) / max(1, length / 512) ** 0.5  # standard deviation of the mean of several answers
    assert share == pytest.approx(fidelity.flip_chance(chained).mean().item(), rel=0.1)
    assert precision.wrong(torch.zeros(4, 512, dtype=torch.float64), length, rng) == 0


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
    assert bodies["fp32"][OURS]["wrong"] == pytest.approx([0, 0, 0], abs=1e-4)
    rows = tables.precision(results)["table"].splitlines()  # heads with equal numbers share a row
    assert any(row.startswith("| bf16 weights |") and "**gspo_kernels**" in row for row in rows)


def test_a_policy_is_trained_and_other_studies_use_it(tmp_path: Path) -> None:
    results = run_tiny(policy, tmp_path / "policy.json", "--folder", tmp_path)
    hidden, _ = policy.load(tmp_path).rows()
    assert results["sampled"]["tokens"] == len(hidden) > 0
    for kind in ("trained", "formula"):
        exact, *others = results[kind]["budgets"]
        assert exact["d_weight error"] == exact["d_hidden error"] == 0
        assert [r["budget"] for r in (exact, *others)] == list(BUDGETS)
        assert all(r["dropped_gradient_mass"] <= r["budget"] and r["passes"] <= exact["passes"] for r in others)
    lengths = policy.load(tmp_path).mask.sum(1)
    assert torch.equal(fidelity.trained(tmp_path, 10_000, CPU).sequence.bincount(minlength=len(lengths)), lengths)


def test_budgets_are_compared_at_a_tiny_size(tmp_path: Path) -> None:
    results = run_tiny(budgets, tmp_path / "budgets.json")
    for records in results["runs"].values():
        assert [r["seed"] for r in records] == list(budgets.TINY_SEEDS)
    figures.draw_budgets(results, tmp_path / "figure.png")
    # all rewards of this policy are 0
    assert tables.budgets(results)["verdict"] == "We see no drift of entropy or reward"


def test_the_loss_at_the_seam_is_the_fused_loss_and_its_backward_is_measured() -> None:
    torch.manual_seed(0)
    x, ids = torch.randn(4, 40, 64), torch.randint(2048, (4, 40))
    x[..., 0] = 5.0
    head = torch.nn.Linear(64, 4096, bias=False)
    head.weight.data[2048:, 0] = -2.0  # ids from 2048 on are unlikely, so a budget can leave them out
    fixed: dict[str, Any] = dict(ref_log_probs=None, rollout_log_probs=None, kl_normalizer=None, normalizer=4.0)
    fixed |= dict(old_log_probs=torch.full((4, 40), -7.6), mask=torch.ones(4, 40), entropy=True, temperature=1.0)
    fixed |= dict(objective=Objective(ratio="token", clip_low=0.9, clip_high=9.0), cache_mib=None, backend="torch")
    seam = budgets.Seam()
    found = []
    for loss, budget in ((gspo_fused_loss, 0.0), (seam.loss, 0.0), (seam.loss, 0.05)):
        hidden = x.clone().requires_grad_()
        out = loss(hidden, head, ids, torch.tensor([1.0, -1.0, 0.0, 2.0]), gradient_budget=budget, **fixed)
        out.loss.backward()
        found.append((out.loss, hidden.grad, None if loss is gspo_fused_loss else seam.metrics()))
    (fused, gradient, _), (loss, at_seam, exact), (_, _, dropped) = found
    torch.testing.assert_close(loss, fused)
    torch.testing.assert_close(at_seam, gradient)
    assert exact["dropped_gradient_mass"] == 0 < dropped["dropped_gradient_mass"] <= 0.05
    assert dropped["passes"] < exact["passes"] < 4


def test_differences_between_budgets_are_means_over_pairs_with_the_same_seed() -> None:
    ends = {budgets.EXACT: [5.0, 15.0, 0.0], "budget 1e-3": [7.0, 17.0, 2.0], "budget 1e-2": [5.0, 15.0, 0.0]}
    runs = {arm: [{"at the end": {"x": value}} for value in values] for arm, values in ends.items()}
    differences = budgets.differences(runs, "x")
    assert differences["budget 1e-3"] == {"mean": 2, "95 %": [2, 2]} and differences["budget 1e-2"]["mean"] == 0
    low, high = budgets.about([1.0, 2.0, 3.0])["95 %"]
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert budgets.at_the_end(list(range(10))) == 8.5
