"""What was measured and committed: it is there, the report is what it says, and it says what the texts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, report_claims, report_costs

SUITES = report_costs.SECTIONS | report_claims.SECTIONS


def measured(suite: str) -> dict[str, Any]:
    """Results of a suite on a CPU."""
    return report.load(report.RESULTS / f"{suite}-cpu.json")["results"]


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
        found = json.loads(path.read_text())
        assert found["commit"] and found["uncommitted changes"] is False, path.name


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
    for run in measured("step")["time"]["runs"] + measured("vocab")["runs"]:
        timed = {r["name"]: r for r in run["candidates"] if "seconds" in r}
        assert {"ours", "naive GSPO"} <= timed.keys(), run["on"]
        assert not any("wrong" in r for r in timed.values())
        assert all(r["runs"] >= 5 and r["error"]["worst"] > 0 for r in timed.values())
