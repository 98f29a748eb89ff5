"""What an import costs and needs, and the contents of a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo_kernels import validation
from gspo_kernels.tools.cli import app

PACKAGE = Path(validation.__file__).parent
ROOT = PACKAGE.parent


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_log_probs_are_computed_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # makes `import triton` fail
import torch, gspo_kernels
out = gspo_kernels.linear_log_probs(torch.randn(1, 2, 4), torch.zeros(5, 4), torch.zeros(1, 2, dtype=torch.long))
print(out.log_probs.exp().round(decimals=4).tolist())
"""
    assert run_python(code).startswith("[[0.2")


def test_help_imports_no_package_that_takes_long() -> None:
    """Besides what every typer command imports, it takes modules of ours and of the standard library: 47 of them."""
    code = """
import sys, typer
app = typer.Typer()
app.command("train")(lambda: None)
app.command()(lambda: None)
%s
try:
    app(["--help"])
except SystemExit:
    pass
print(*sys.modules)
"""
    (*_, needed), (*text, imported) = (
        run_python(code % line).splitlines() for line in ("", "from gspo_kernels.tools.cli import app")
    )
    more = set(imported.split()) - set(needed.split())
    packages = {name.partition(".")[0] for name in more} - sys.stdlib_module_names
    assert "train" in " ".join(text) and packages == {"gspo_kernels"} and len(more) < 80, sorted(more)


@pytest.mark.parametrize("command", ["train", "eval", "export", "doctor", "bench", "compare"])
def test_help_names_no_file_of_the_repository(command: str) -> None:
    """A wheel has none of these folders."""
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0 and not re.findall(
        r"\b(?:docs|examples|tests|integrations|benchmarks)/\S*", result.output
    )


# Loads a second copy as the `kernels` package does, and compares results and gradients of both copies.
SECOND_COPY = """
import importlib.util, sys
import torch
import gspo_kernels
spec = importlib.util.spec_from_file_location("_gspo_kernels_cpu_1", gspo_kernels.__file__)
copy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copy)
rng = torch.Generator().manual_seed(0)
hidden, weight, old = (torch.randn(size, generator=rng) for size in ((2, 5, 16), (40, 16), (2, 5)))
old = -old.abs()
head = torch.nn.Linear(16, 40, bias=False)
head.weight.data = weight
results = []
for package in (gspo_kernels, copy):
    h = hidden.clone().requires_grad_()
    ids = torch.arange(10).view(2, 5)
    out = package.gspo_fused_loss(h, head, ids, torch.tensor([1.0, -1.0]), old_log_probs=old)
    log_probs = package.linear_log_probs(h, head, ids).log_probs
    (out.loss + package.policy_loss(log_probs, torch.tensor([1.0, -1.0]), old_log_probs=old).loss).backward()
    results.append((out.loss.detach(), h.grad))
    op = sys.modules[f"{package.__name__}.ops.loss"].fused_loss_op.op
    assert op._qualname == f"{package.__name__}::fused_loss", op._qualname
assert all(torch.equal(a, b) for a, b in zip(*results)), results
assert copy.Objective is not gspo_kernels.Objective
"""


def test_a_copy_under_another_name_works_next_to_the_package() -> None:
    """The kernels hub gives each version of a package its own name. Operators of the same name would clash."""
    run_python(SECOND_COPY)


@pytest.mark.slow
def test_a_wheel_holds_the_integrations_and_the_type_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gspo_kernels", "integrations", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    assert (site / "gspo_kernels" / "py.typed").exists()
    for name in ("gspo_kernels", "integrations", "benchmarks"):  # pyproject.toml lists every folder
        inside = site if name == "gspo_kernels" else site / "gspo_kernels"
        files = [x.relative_to(ROOT) for x in (ROOT / name).rglob("*.py")]
        absent = {str(x.parent) for x in files if not (inside / x).exists()}
        assert absent == ({"benchmarks/report"} if name == "benchmarks" else set())
    # The import of arithmetic.py fails if the wheel lacks words.json.
    code = "import gspo_kernels.integrations.tasks.arithmetic as r, gspo_kernels.benchmarks.studies.compare_command"
    code += "; print(r.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert str(site) in run.stdout, run.stderr
    report = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
sys.argv[1:] = ["report"]
from gspo_kernels.benchmarks.__main__ import main
print(main())
"""
    run = subprocess.run(
        [sys.executable, "-c", report], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "report: expected a clone of the repository, got an installed package\n", run.stderr
