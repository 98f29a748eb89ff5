"""CI and the commit hooks agree with the Makefile and pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
JOBS, WEEKLY = (
    yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"] for name in ("ci.yml", "versions.yml")
)


def test_the_commit_hooks_run_the_pinned_linter() -> None:
    (pin,) = re.findall(r'"(ruff==[\d.]+)"', PROJECT)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pins = {hook["id"]: hook["additional_dependencies"] for hook in local["hooks"] if hook["id"].startswith("ruff")}
    assert pins == {"ruff-check": [pin], "ruff-format": [pin]}


def test_ci_runs_targets_of_the_makefile() -> None:
    commands = [
        re.sub(r"\$\{\{.*?\}\}", "%", step["run"]) for job in JOBS.values() for step in job["steps"] if "run" in step
    ]
    targets = [target for command in commands if command.startswith("make ") for target in command.split()[1:]]
    assert {"test", "test-slow", "test-benchmarks", "test-stub", "test-trainers"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target
    assert [command for command in commands if not command.startswith("make ")] == [".venv/bin/python -m pytest -m gpu"]
    assert "inputs.gpu" in JOBS["gpu"]["if"]


def test_ci_runs_every_pair_of_torch_and_triton_in_the_makefile_every_week() -> None:
    (pairs,) = re.findall(r"^PAIRS := (.*)$", MAKEFILE, re.MULTILINE)
    assert WEEKLY["pairs"]["strategy"]["matrix"]["pair"] == pairs.split()
    assert [job["steps"][-1]["run"] for job in WEEKLY.values()] == ["make pair-${{ matrix.pair }}", "make test-newest"]
    pinned = re.findall(r"^(?:torch|triton)==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "-".join(pinned) in pairs.split()
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+) \|.* weekly", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE
    )
    assert ["-".join(row) for row in rows] == pairs.split()


def test_ci_runs_every_python_version_of_the_classifiers() -> None:
    promised = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert JOBS["full"]["strategy"]["matrix"]["python"] == promised
