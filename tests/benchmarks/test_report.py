"""The committed tables and the figure agree with the committed results, and damaged results are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_kernels.benchmarks.report import pages, tables


def results() -> dict[str, Any]:
    """The committed results, by the stem of their file."""
    return {stem: file["results"] for stem, file in pages.load().items()}


def test_tables_and_figure_agree_with_the_results() -> None:
    assert pages.stale() == []
    assert "<!-- measured: skip on a cpu -->\n" in pages.README.read_text()
    assert [path.name for path in pages.FIGURE.parent.glob("*.png")] == [pages.FIGURE.name]


def test_every_result_is_in_a_table_and_was_measured_from_a_clean_commit() -> None:
    class Read(dict[str, Any]):
        def __getitem__(self, stem: str) -> Any:
            read.add(stem)
            return super().__getitem__(stem)

    read: set[str] = set()
    shown = "".join(path.read_text() for path in pages.texts())
    for name, table in tables.TABLES.items():
        assert f"<!-- measured: {name} -->\n" in shown
        table(Read(results()))
    files = pages.load()
    assert read == files.keys()
    for name, file in files.items():
        parts = [part["measured"] for part in file["results"].values() if isinstance(part, dict) and "measured" in part]
        assert all(head["commit"] and head["uncommitted changes"] is False for head in (file, *parts)), name


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `pages` read copies of the results. Return the path of the copy that the figure is drawn from."""
    for path in pages.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return tmp_path / f"{pages.SOURCES[0]}.json"


def test_a_changed_number_makes_page_and_figure_stale(copied: Path) -> None:
    copied.write_text(copied.read_text().replace('"update": 0.92', '"update": 0.98', 1))
    assert pages.stale() == ["index.md", "readme-step.png"]


def test_no_timed_candidate_has_wrong_gradients() -> None:
    every = results()
    for run in every["step-cpu"]["time"]["runs"] + every["vocab-cpu"]["runs"]:
        timed = {r["name"]: r for r in run["candidates"] if "seconds" in r}
        assert {tables.OURS, tables.NAIVE} <= timed.keys()
        assert all("wrong" not in r and r["runs"] >= 5 and r["error"]["worst"] > 0 for r in timed.values())
    assert tables.error_of({"error": {"worst": None}}) == "-"


def test_the_page_lists_where_others_take_less_time_or_memory() -> None:
    def run(ours: float, mib: int) -> dict[str, Any]:
        ratios = {"naive GSPO": (1.0, 100), "quick": (0.8, 100), "ours": (ours, mib)}
        on = {"scenario": "dense", "dtype": "float32", "tokens": 1024, "head": {"vocab": 5000}}
        records = [{"name": n, "over_naive": {"ratio": r}, "peak_bytes": m << 20} for n, (r, m) in ratios.items()]
        return {"on": on, "candidates": records}

    every = results()

    def rows(*runs: dict[str, Any]) -> list[str]:
        step = {"time": {"runs": list(runs)}}
        lines = tables.where_we_lose({**every, "step-cpu": step, "vocab-cpu": {"runs": []}}).splitlines()[2:]
        return [line for line in lines if "V = 5,000" in line]

    where = "CPU, dense, float32, 1,024 tokens, V = 5,000"
    assert rows(run(0.5, 50)) == []
    assert rows(run(1.0, 50), run(0.5, 50)) == [f"| {where}: time | 1.00 | 0.80 (quick) | 1.25 |"]
    assert rows(run(0.5, 101)) == [f"| {where}: MiB | 101 | 100 (full logits) | 1.01 |"]
