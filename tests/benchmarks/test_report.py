"""The committed pages and figures agree with the committed results, and damaged results are refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_kernels.benchmarks import measure
from gspo_kernels.benchmarks.report import outdated, pages, summary, tables

BLOCK = "<!-- measured: step on a gpu -->\n"


def results_of(suite: str) -> dict[str, Any]:
    """Return the committed results of a suite on a CPU."""
    return pages.load(pages.RESULTS / f"{suite}-cpu.json")["results"]


def test_pages_and_figures_agree_with_the_results() -> None:
    assert pages.stale() == [] and pages.README.read_text().count(BLOCK) == 1
    assert {path.stem for path in pages.FIGURES.glob("*.png")} == pages.figures_by_name().keys()


def test_every_result_has_a_section_and_was_measured_from_a_clean_commit() -> None:
    known = [path for suite in tables.SECTIONS for path in pages.files(suite)]
    assert set(known) == set(pages.RESULTS.glob("*.json")) and len(known) >= len(tables.SECTIONS)
    for path in known:
        measured = pages.load(path)
        for head in (measured, *(part["measured"] for part in pages.parts(measured["results"]).values())):
            assert head["commit"] and head["uncommitted changes"] is False, path.name


def test_results_older_than_statements_of_their_files_are_listed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    source, result = tmp_path / "gspo_kernels" / "policy.py", tmp_path / "benchmarks" / "results" / "step-cpu.json"
    for path in (source, result):
        path.parent.mkdir(parents=True)
    source.write_text('"""Loss."""\nx = 1\n')
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    result.write_text(json.dumps({"commit": git("rev-parse", "HEAD").strip()}))
    source.write_text('"""The loss."""\n\nx = 1  # one\n')
    assert outdated.outdated(tmp_path) == []
    source.write_text("x = 2\n")
    (line,) = outdated.outdated(tmp_path)
    assert line.startswith("step-cpu.json: measured at ") and line.endswith("before changes of gspo_kernels/policy.py")
    assert outdated.MOVED_BY.keys() == tables.SECTIONS.keys()


def test_result_files_have_one_record_per_line(tmp_path: Path) -> None:
    records = [{"x": 1 / 3, "y": [1, 2], "z": {"nan": float("nan")}}, {"x": 1e-9 / 3}]
    text = measure.save("step", torch.device("cpu"), {"records": records}, tmp_path / "a.json").read_text()
    assert '\n   {"x": 0.333333, "y": [1, 2], "z": {"nan": null}},\n   {"x": 3.33333e-10}\n' in text
    assert json.loads(text)["suite"] == "step"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `pages` read copies of the results, and return the copy of step-cpu.json."""
    for path in pages.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return tmp_path / "step-cpu.json"


def test_a_changed_number_makes_page_and_figure_stale(copied: Path) -> None:
    copied.write_text(copied.read_text().replace('"ratio": 1.0,', '"ratio": 1.5,', 1))
    assert pages.stale() == ["benchmarks.md", "docs/figures/step-cpu.png"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"results": {}}', '{"machine": {}, "results": {"runs": [{}]}}'])
def test_a_damaged_or_partial_file_is_refused_with_a_one_line_message(text: str, copied: Path) -> None:
    copied.write_text(text)
    with pytest.raises(SystemExit, match=r"^\S+step-cpu\.json: expected the complete results of a suite: .+\Z"):
        pages.texts()


def test_no_timed_candidate_has_wrong_gradients() -> None:
    for run in results_of("step")["time"]["runs"] + results_of("vocab")["runs"]:
        timed = {r["name"]: r for r in run["candidates"] if "seconds" in r}
        assert {tables.OURS, tables.NAIVE} <= timed.keys()
        assert all("wrong" not in r and r["runs"] >= 5 and r["error"]["worst"] > 0 for r in timed.values())
    assert tables.error_of({"error": {"worst": None}}) == "-"


def test_the_page_lists_where_others_take_less_time_or_memory() -> None:
    def run(ours: float, mib: int) -> dict[str, Any]:
        ratios = {"naive GSPO": (1.0, 100), "naive GRPO": (0.1, 1), "quick": (0.8, 100), "ours": (ours, mib)}
        on = {"scenario": "dense", "dtype": "float32", "tokens": 1024, "head": {"vocab": 5000}}
        records = [{"name": n, "over_naive": {"ratio": r}, "peak_bytes": m << 20} for n, (r, m) in ratios.items()]
        return {"on": on, "candidates": records}

    steps = [{"name": n, "over_naive": {"ratio": 1.0}, "peak_bytes": 1} for n in ("naive GSPO", "ours")]

    def rows(*runs: dict[str, Any]) -> list[str]:
        first = {
            "step": {"time": {"runs": list(runs)}},
            "vocab": {"runs": []},
            "trainer": {"float32": {"steps": steps}},
        }
        return summary.loses(first).splitlines()[2:]

    where = "dense, float32, 1,024 tokens, V = 5,000"
    assert rows(run(0.5, 50)) == []
    assert rows(run(1.0, 50), run(0.5, 50)) == [f"| time / naive GSPO's: {where} | 1.00 | 0.80 (quick) | 1.25 |"]
    assert rows(run(0.5, 101)) == [f"| peak MiB: {where} | 101 | 100 (naive GSPO) | 1.01 |"]
