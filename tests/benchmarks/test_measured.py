"""What was measured and committed: it is there, the report is what it says, and it says what the texts say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_kernels.benchmarks.report import claims as report_claims
from gspo_kernels.benchmarks.report import costs as report_costs
from gspo_kernels.benchmarks.report import pages as report
from gspo_kernels.benchmarks.suites import busy, sparsity
from gspo_kernels.benchmarks.workloads import BUDGETS

SUITES = report.SECTIONS


def measured(suite: str) -> dict[str, Any]:
    """Results of a suite on a CPU."""
    return report.load(report.RESULTS / f"{suite}-cpu.json")["results"]


def _runs(suite: str) -> list[dict[str, Any]]:
    found = measured(suite)
    return found["time"]["runs"] if suite == "step" else found["runs"]


def test_no_file_is_of_nothing() -> None:
    known = {path for suite in SUITES for path in report.files(suite)}
    assert set(report.RESULTS.glob("*.json")) == known


def test_readme_page_and_plots_are_what_the_json_says() -> None:
    assert report.stale() == []


def test_a_changed_number_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = report.README.read_text()
    block = text.split("<!-- measured: budgets -->")[1].split("<!-- end -->")[0]
    digit = next(c for c in block if c.isdigit())
    changed = tmp_path / "README.md"
    changed.write_text(text.replace(block, block.replace(digit, str((int(digit) + 1) % 10), 1)))
    expected = report.texts()[report.README]
    monkeypatch.setattr(report, "README", changed)
    assert report.texts()[changed] == expected != changed.read_text()


def test_a_block_that_is_gone_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "README.md"
    changed.write_text(report.README.read_text().replace("<!-- measured: step -->", ""))
    monkeypatch.setattr(report, "README", changed)
    with pytest.raises(ValueError, match="expected one block <!-- measured: step -->"):
        report.texts()


def test_what_was_measured_was_measured_on_committed_sources() -> None:
    for path in report.RESULTS.glob("*.json"):
        found = report.load(path)
        # Parts that are measured on their own have a head of their own.
        parts = found["results"].values() if path.stem.startswith(("step-", "sparsity-")) else ()
        for head in (found, *(part["measured"] for part in parts)):
            assert head["commit"] and head["uncommitted changes"] is False, path.name


def test_a_drift_is_called_one_and_chance_is_not() -> None:
    def end(low: float, high: float) -> dict[str, Any]:
        return {"at the end": {"mean": (low + high) / 2, "95 %": [low, high]}}

    found = {
        "control": end(-0.01, 0.03),
        "up": end(0.02, 0.04),
        "none": end(-0.02, 0.05),
        "as the control": end(0.005, 0.02),
    }
    assert [name for name in found if name != "control" and report_claims.drifts(found, name, "control")] == ["up"]


def test_budgets_were_trained_from_the_policy_that_is_reported() -> None:
    assert measured("budgets")["policy"] == measured("policy")["digest"]


def test_nobody_timed_has_wrong_gradients_and_ours_is_always_timed() -> None:
    for run in _runs("step") + _runs("vocab"):
        timed = {r["name"]: r for r in run["candidates"] if "seconds" in r}
        assert {"ours", "naive GSPO"} <= timed.keys(), run["on"]
        assert not any("wrong" in r for r in timed.values())
        assert all(r["runs"] >= 5 and r["error"]["worst"] > 0 for r in timed.values())


def test_every_suite_was_measured_here() -> None:
    for suite in SUITES:
        found = report.load(report.RESULTS / f"{suite}-cpu.json")
        assert found["suite"] == suite and found["machine"]["threads"] and found["versions"]["torch"], suite


def test_zero_rows_and_a_budget_save_what_the_texts_say() -> None:
    found = measured("sparsity")["passes"]
    cases = {(r["case"], r["budget"]): r for r in found["cases"]}
    assert set(cases) == {(case, budget) for case in sparsity.CASES for budget in BUDGETS}
    policy = cases["rl-like", 0.0]
    assert 0.45 < policy["share under 0.01 nats"] < 0.55 and 0.18 < policy["share above 0.67 nats"] < 0.24
    assert policy["passes"] <= 2.8 and policy["d_hidden error"] == policy["d_weight error"] == 0
    budget = cases["rl-like", 1e-3]
    assert budget["passes"] <= 1.8 and max(budget["d_hidden error"], budget["d_weight error"]) < 1e-3
    assert all(r["dropped_gradient_mass"] <= r["budget"] for r in cases.values())


def test_a_budget_is_faster_and_choosing_is_cheap() -> None:
    found = measured("sparsity")["time"]
    exact, budget = (found["by budget"][name]["over_naive"]["p80"] for name in ("exact", "budget 0.001"))
    assert budget < exact
    assert found["choosing cells over budget 1e-3"] <= 0.03
    assert found["peak bytes"]["exact"] <= 0.4 * found["peak bytes"]["naive"]


def test_where_we_lose_is_said() -> None:
    def one(ours: float, peak: int) -> dict[str, Any]:
        ratios = {"naive GSPO": (1.0, 100), "naive GRPO": (0.1, 100), "quick": (0.9, 100), "ours": (ours, peak)}
        candidates = [
            {"name": n, "against": n, "over_naive": {"ratio": ratio}, "peak_bytes": mib << 20}
            for n, (ratio, mib) in ratios.items()
        ]
        on = {"scenario": "dense", "dtype": "float32", "tokens": 1024, "head": {"vocab": 5000}}
        return {"on": on, "candidates": candidates}

    at = "dense, float32, 1,024 tokens, V = 5,000"
    slower = f"**Where we lose** (to whom). Time over naive GSPO's: {at}: 1.25 (quick 0.90, naive GSPO 1.00)."
    slower += " Memory: nowhere."
    assert report_costs._losses([one(1.25, 50), one(0.5, 50)]) == slower
    larger = f"**Where we lose** (to whom). Time over naive GSPO's: nowhere. Memory: {at}: 101 MiB (naive GSPO 100, "
    larger += "quick 100)."
    assert report_costs._losses([one(0.5, 101)]) == larger
    for suite in ("step", "vocab"):
        assert report.PAGE.read_text().count(report_costs._losses(_runs(suite))) == 1, suite


def test_time_and_memory_run_up_to_where_it_runs_out() -> None:
    points = measured("step")["memory"]["points"]
    most = max(points, key=lambda point: point["tokens"])["candidates"]
    fits = {r["name"] for r in most if "peak_bytes" in r}
    assert {"ours", "ours, budget 1e-3"} <= fits and "naive GSPO" in {r["name"] for r in most} - fits


def test_a_busy_process_costs_us_no_more_than_naive_pytorch() -> None:
    alone, beside = (record["candidates"] for record in measured("busy")["records"])
    for name in ("ours", "ours, budget 1e-3"):
        ratios = [timed[name]["over_naive"]["ratio"] for timed in (alone, beside)]
        assert ratios[1] <= busy.MOST * ratios[0]
