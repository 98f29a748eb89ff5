"""`make hub-kernel` writes a folder that the `kernels` package loads, next to the installed library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.readme import ROOT

pytest.importorskip("kernels", reason="make test-release")

LOAD = """
import sys
from pathlib import Path
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata
import torch, gspo_kernels

root = Path(sys.argv[1])
kernel = get_local_kernel(root)
assert kernel.__name__.startswith("_gspo_kernels_cpu_") and Path(kernel.__file__).is_relative_to(root)
for backend in ("cpu", "cuda", "rocm"):
    variant = root / "build" / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert metadata.version == int(gspo_kernels.__version__.split(".")[0])
assert set(gspo_kernels.__all__) == set(kernel.__all__)
torch.manual_seed(0)
hidden, weight = torch.randn(20, 32), torch.randn(300, 32)
ids = torch.arange(20)
ours, theirs = (x.linear_log_probs(hidden, weight, ids).log_probs for x in (gspo_kernels, kernel))
assert torch.equal(ours, theirs)
assert kernel.advantages and kernel.sampler_mismatch
loaded = [name for name in sys.modules if name.startswith(kernel.__name__)]
assert f"{kernel.__name__}.ops.head" in loaded
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    run(ROOT / ".ci" / "hub_kernel.py", folder)
    return folder


def run(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Run Python, which must succeed, without a network. Return its output."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_the_kernels_package_loads_it_next_to_the_installed_library(kernel: Path) -> None:
    run("-c", LOAD, kernel)


def test_its_own_tests_pass(kernel: Path) -> None:
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=kernel)


def test_its_benchmark_runs(kernel: Path) -> None:
    command = ["-c", "from kernels.cli import main; main()", "benchmark", ".", "--iterations", "2", "--warmup", "1"]
    assert "FusedLossBenchmark" in run(*command, cwd=kernel)


def test_the_example_of_the_card_runs(kernel: Path) -> None:
    (code,) = (block.partition("```")[0] for block in (kernel / "README.md").read_text().split("```python\n")[1:])
    run("-c", code, cwd=kernel)
