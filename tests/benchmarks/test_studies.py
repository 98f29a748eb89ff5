"""The studies measure what they say, on small sizes, and their verdicts can be negative."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils.logging import enable_progress_bar

from gspo_kernels.benchmarks import candidates, workloads
from gspo_kernels.benchmarks.report import figures
from gspo_kernels.benchmarks.studies import arithmetic, budgets, fidelity, policy, ratio_range
from gspo_kernels.benchmarks.workloads import Head
from gspo_kernels.integrations.reference_trainer.policy import load_policy
from gspo_kernels.integrations.reference_trainer.tasks import answer_found

CPU, HEAD = torch.device("cpu"), Head(128, 4096)
NAIVE, OURS = fidelity.NAIVE, fidelity.OURS


def run_tiny(study: Any, *arguments: object) -> None:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["study", "--tiny", *map(str, arguments)])
        study.main()
    torch.set_num_threads(threads)
    enable_progress_bar()


# Fidelity


def wrong(errors: dict[str, Tensor], length: int, sequence: Tensor | None = None) -> dict[str, Any]:
    """Return the record of each implementation for one length."""
    alone = torch.arange(len(next(iter(errors.values()))))
    records = fidelity.decisions(errors, (length,), 20_000, alone if sequence is None else sequence)
    return {name: {key: values[0] for key, values in record.items()} for name, record in records.items()}


def test_coarser_logits_and_log_probs_flip_more_decisions() -> None:
    runs, _ = fidelity.implementations(HEAD, CPU)
    runs = {name: runs[name] for name in (NAIVE, "fp16 logits", "fp32 logits", OURS)}
    runs["rounded"] = lambda *given: runs[OURS](*given).bfloat16()
    errors = fidelity.measured(fidelity.synthetic(256, HEAD, CPU), runs)
    assert errors.dtypes[OURS] == "float32" and errors.dtypes["rounded"] == "bfloat16"
    share = {name: record["wrong"] for name, record in wrong(errors.of_log_ratios(), 64).items()}
    assert share[NAIVE] > 0.2 > share["fp16 logits"] > 0.02 < share["rounded"] and share[fidelity.OTHER_ENGINE] > 0.2
    assert share[OURS] < 2e-3 and share["fp32 logits"] < 2e-3


def test_wrong_decisions_of_a_known_error() -> None:
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise -= noise.mean()
    found = wrong({"none": 0 * noise, "shift": 0 * noise + 1, "noise": 1e-3 * noise}, 64)
    assert found["none"]["wrong"] == found["none"]["wrong with the mean error"] == found["shift"]["wrong"] == 0
    assert found["shift"]["wrong with the mean error"] > 0.4
    # The error of a mean of 64 tokens is normal: integrate the chance of a flip over it.
    grid = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid**2) / torch.exp(-0.5 * grid**2).sum()
    expected = (fidelity.flip_chance(1e-3 / 8 * grid) * density).sum().item()
    low, high = found["noise"]["95 %"]
    assert low < expected < high < low + 0.03


def test_flip_chance_is_the_share_of_flipped_decisions() -> None:
    u = fidelity.SPREAD * torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for error in (-2e-4, 3e-4, 1e-3):
        signs = [torch.tensor(positive) for positive in (True, False)]
        flips = [fidelity.passes_clip(u + error, sign) != fidelity.passes_clip(u, sign) for sign in signs]
        chance = fidelity.flip_chance(torch.tensor([error], dtype=torch.float64)).item()
        assert chance == pytest.approx(torch.stack(flips).double().mean().item(), abs=0.003)


def test_intervals_cover_the_choice_of_whole_answers() -> None:
    """16 tokens of an answer with equal errors are worth one token, so the interval is about 4 times as wide."""
    rng = torch.Generator().manual_seed(0)
    errors = 1e-2 * torch.randn(64, generator=rng, dtype=torch.float64).repeat_interleave(16)
    answers = torch.arange(64).repeat_interleave(16)
    ends = [wrong({"equal": errors}, 1024, x)["equal"]["95 %"] for x in (torch.arange(1024), answers)]
    assert ends[1][1] - ends[1][0] > 1.3 * (ends[0][1] - ends[0][0])
    assert fidelity.correlation(errors, answers) == pytest.approx(4)
    assert fidelity.correlation(errors, torch.arange(1024)) is None
    for share in (0.003, 0.15, 0.5):
        hits = (torch.rand(400, 1000, generator=rng) < share).sum(1).tolist()
        covered = [low <= share <= high for low, high in (fidelity.interval(h, 1000) for h in hits)]
        assert 0.9 < sum(covered) / len(covered) < 0.99


def test_fidelity_runs_without_a_trained_policy_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny(fidelity, "--policy", tmp_path / "none", "--output", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert list(results["sets"]) == ["synthetic"] and "trained policy" in results["not measured"]
    assert "python -m gspo_kernels.benchmarks policy" in capsys.readouterr().out
    for draw in (figures.draw_fidelity, figures.draw_readme):
        draw(results, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_candidates_that_cannot_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates.Candidate, "absent", lambda self, *_: "odd width" if self.name == NAIVE else None)
    runs, absent = fidelity.implementations(HEAD, CPU)
    assert absent == {NAIVE: "odd width"} and NAIVE not in runs and OURS in runs


# The trained policy, and training with budgets


def test_problems_are_solved_correctly_and_differ() -> None:
    kept = arithmetic.problems(200, seed=1)
    made = arithmetic.problems(500, seed=3, without=frozenset(p.prompt for p in kept))
    assert len({p.prompt for p in made + kept}) == 700 and arithmetic.problems(200, seed=1) == kept
    for one in made:
        sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", one.solution)
        assert all(int(a) + int(sign + b) == int(c) >= 0 for a, sign, b, c in sums)
        assert sums[-1][3] == one.answer and answer_found(one.solution, one.answer) == 1
        assert re.findall(r"\d+", one.prompt) == [sums[0][0], *(b for _, _, b, _ in sums)]
    with pytest.raises(ValueError, match="expected enough for a vocabulary of 5000, got one of"):
        arithmetic.bpe(list(arithmetic.stories(3, seed=0)), vocab=5000)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `python -m gspo_kernels.benchmarks policy --tiny`."""
    folder = tmp_path_factory.mktemp("policy")
    run_tiny(policy, "--folder", folder, "--output", folder / "policy.json")
    return folder


def test_the_policy_is_saved_measured_and_read_by_fidelity(tiny: Path) -> None:
    hidden, ids = policy.load(tiny).rows()
    results = json.loads((tiny / "policy.json").read_text())["results"]
    assert results["sampled"]["tokens"] == len(hidden) == len(ids) > 0 and results["digest"] == policy.digest(tiny)
    for kind in ("trained", "formula"):
        exact, *others = results[kind]["budgets"]
        assert exact["d_weight error"] == exact["d_hidden error"] == 0
        assert [r["budget"] for r in (exact, *others)] == list(workloads.BUDGETS)
        assert all(r["dropped_gradient_mass"] <= r["budget"] and r["passes"] <= exact["passes"] for r in others)
    tokens = fidelity.trained(tiny, 10_000, CPU)
    lengths = policy.load(tiny).mask.sum(1)
    assert torch.equal(tokens.sequence.bincount(minlength=len(lengths)), lengths)


@pytest.mark.slow
def test_budgets_are_trained_and_compared(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.measure, "fresh", lambda *_, **job: budgets.run(**job))  # not in processes of their own
    folders = ("--policy", tiny, "--folder", tmp_path / "runs")
    run_tiny(budgets, *folders, "--workers", 1, "--output", tmp_path / "budgets.json")
    results = json.loads((tmp_path / "budgets.json").read_text())["results"]
    for records in results["runs"].values():
        assert [r["seed"] for r in records] == list(budgets.TINY_SEEDS)
        assert all(len(r[key]) == budgets.TINY["steps"] for r in records for key in budgets.CURVES)
    figures.draw_budgets(results, tmp_path / "budgets.png")
    assert not list((tmp_path / "runs").iterdir())


def test_the_control_starts_a_millionth_away(tiny: Path, tmp_path: Path) -> None:
    start = load_policy(str(tiny / "model"))
    moved = [load_policy(str(budgets.moved(tiny / "model", seed, tmp_path))) for seed in (0, 1)]
    norm = sum(weight.detach().double().square().sum().item() for weight in start.model.parameters()) ** 0.5
    assert budgets.distance(moved[0], start) == pytest.approx(budgets.NOISE * norm, rel=0.1)
    assert budgets.distance(*moved) == pytest.approx(2**0.5 * budgets.NOISE * norm, rel=0.1)


def test_differences_are_taken_seed_by_seed() -> None:
    ends = {budgets.EXACT: [5.0, 15.0, 0.0], "budget 1e-3": [7.0, 17.0, 2.0], budgets.CONTROL: [5.0, 15.0, 0.0]}
    runs = {arm: [{"at the end": {"x": value}} for value in values] for arm, values in ends.items()}
    found = budgets.differences(runs, "x")
    assert found["budget 1e-3"] == {"mean": 2, "95 %": [2, 2]} and found[budgets.CONTROL]["mean"] == 0
    low, high = budgets.about([1.0, 2.0, 3.0])["95 %"]
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert budgets.thinned(list(range(75)))[:2] == [2, 7] and budgets.at_the_end(list(range(10))) == 8.5


# The range of the ratio


def test_the_range_of_the_ratio_scales_with_the_root_of_the_length(tmp_path: Path) -> None:
    run_tiny(ratio_range, "--output", tmp_path / "range.json")
    points = json.loads((tmp_path / "range.json").read_text())["results"]["points"]
    free = [p for p in points if p["drift"] == 0]
    assert ratio_range.power(free) == pytest.approx(-0.5, abs=0.1)
    assert ratio_range.power(free, product=True) == pytest.approx(0.5, abs=0.1)
    assert ratio_range.verdict(points).startswith("does not hold as stated")


@pytest.mark.parametrize(("power", "said"), [(0.0, "holds: "), (-0.5, "does not hold as stated"), (0.5, "does not")])
def test_the_verdict_on_the_range_follows_the_points(power: float, said: str) -> None:
    widths = [{"length": length, "1 %": -(length**power), "99 %": length**power} for length in (10, 100, 1000)]
    points = [{**width, "drift": drift} for width in widths for drift in (0.0, 3e-4)]
    assert ratio_range.verdict(points).startswith(said)
