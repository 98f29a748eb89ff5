"""A dry run of `python -m gspo_kernels.benchmarks gpu` without a GPU: its output; a wrong kernel makes it fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
DRY_RUN = ("--check", "--tiny", "--device", "cpu")
FAULTS = {  # (file, text, the text with the fault, a check that must see it)
    "log-probs off by a thousandth": (
        "forward.py", "tl.store(log_probs + rows, log_p,", "tl.store(log_probs + rows, log_p + 1e-3,",
        "head .* fp16 plain",
    ),
    "the target's gradient off by a percent": (
        "gradient_tile.py", "at_own = d_log_p *", "at_own = 1.01 * d_log_p *", "head .* fp32 plain",
    ),
    "clipped above instead of below": (
        "surrogates.py", "low = (advantage < 0) & (u <", "low = (advantage < 0) & (u >", "clip decisions bf16",
    ),
}  # fmt: skip


def run(root: Path, output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "gspo_kernels.benchmarks", "gpu", *arguments, "--output", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done, json.loads(output.read_text()) if output.exists() else {}


@pytest.mark.slow
def test_a_dry_run_passes_and_reports_everything(tmp_path: Path) -> None:
    done, report = run(ROOT, tmp_path / "found" / "gpu.json", *DRY_RUN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert report["passed"] and report["seconds"] > 0 and report["machine"]["device"] == "cpu, interpreted"
    assert {"date", "commit", "versions", "asked", "compilation", "tuning"} <= report.keys()
    status = {c["name"]: c["status"] for c in report["checks"]}
    kinds = {"head", "loss", "repeatable", "batch-invariant", "log-prob", "clip", "past", "peak", "vendor", "captured"}
    kinds |= {"cells", "budget", "torch.compile"}
    assert {name.split(" ")[0] for name in status} == kinds
    assert {name for name, s in status.items() if s == "skipped"} == {
        "peak memory", "peak memory with entropy", "captured graph",
    }  # fmt: skip
    for record in report["checks"]:
        assert record["seconds"] >= 0 and (record["status"] == "skipped" or record["measured"])
        assert set(record.get("limit", {})) <= set(record.get("measured", {}))
    timed = {r["what"] for t in report["times"] for r in t["results"]}
    assert {"copy", "vendor h W'", "ours forward", "ours backward", "full logits both", "kernel finish"} <= timed
    assert str(ROOT) not in json.dumps(report)  # nothing of this machine's folders is published
    assert "passed in" in done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails(fault: str, tmp_path: Path) -> None:
    file, text, wrong, check = FAULTS[fault]
    package = tmp_path / "gspo_kernels"
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(ROOT / "gspo_kernels", package, ignore=ignored)
    shutil.copytree(ROOT / "benchmarks", package / "benchmarks", ignore=ignored)
    (package / "tests").symlink_to(ROOT / "tests")  # where benchmarks.gpu looks for it
    kernel = package / "backends" / "triton" / file
    assert text in kernel.read_text()
    kernel.write_text(kernel.read_text().replace(text, wrong))
    done, report = run(tmp_path, tmp_path / "gpu.json", *DRY_RUN, "--only", f"{check}$")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert not report["passed"] and report["checks"]
    assert all(c["status"] == "failed" and c["faults"] for c in report["checks"])
    assert "FAILED" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_block_shapes_are_ranked(tmp_path: Path) -> None:
    done, report = run(ROOT, tmp_path / "gpu.json", "--tune", "--tiny", "--device", "cpu", "--widths", "64")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert {r["kernel"] for r in report["tuning"]} == {"forward_tile", "gradient_tile"}
    for record in report["tuning"]:
        assert record["fault"] is None and record["ms"] > 0 and record["config"]["block_n"]


def test_without_a_device_it_says_what_to_do(tmp_path: Path) -> None:
    done, report = run(ROOT, tmp_path / "gpu.json", "--check", "--device", "xpu")
    assert done.returncode == 2 and not report
    assert "--device" in done.stderr and "'xpu'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--check", "--only", "("), 2, "expected a regular expression, got '('"),
        (("--check", "--device", "warp"), 2, "got 'warp'"),
        (("--check", "--device", "cuda"), 2, "python -m gspo_kernels.benchmarks gpu --check --tiny --device cpu"),
        ((*DRY_RUN, "--only", "no such check"), 2, "no check's name matches 'no such check'"),
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="one case asks for a device that is not there")
def test_what_cannot_be_done_is_said_in_a_line(
    arguments: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    done, report = run(ROOT, tmp_path / "gpu.json", *arguments)
    assert done.returncode == status and not report
    assert said in done.stderr and "Traceback" not in done.stderr
