"""The core needs only torch and Triton. All other parts name a missing package and the extra that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, requires
from pathlib import Path

import pytest
from helpers.marks import slow
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gspo_kernels import layout

CORE = {"torch", "triton"}
FOLDER = Path(layout.__file__).parent
MODULES = sorted(
    ".".join(("gspo_kernels", *path.relative_to(FOLDER).with_suffix("").parts)).removesuffix(".__init__")
    for path in FOLDER.rglob("*.py")
    # They need the extra "cli".
    if path.relative_to(FOLDER).as_posix() not in ("tools/cli.py", "tools/doctor/report.py")
)
TRAINERS = [f"trainers.{name}" for name in ("slime", "prime_rl", "skyrl", "ms_swift", "openrlhf")]
INTEGRATIONS = [f"gspo_kernels.integrations.{name}" for name in ("huggingface", *TRAINERS)]
GSPO = "from gspo_kernels.tools.entry_point import main; main()"
BENCHMARKS = "from gspo_kernels.benchmarks.__main__ import main; sys.exit(main())"

HIDE = """
import sys
class Hiding:
    def __init__(self, finder, absent):
        self.finder, self.absent = finder, absent
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *place):
        return None if name.partition(".")[0] in self.absent else self.finder.find_spec(name, *place)
"""


def needed(package: str, names: set[str]) -> set[str]:
    """Add to `names` a package and all packages that it requires, directly or indirectly, without an extra."""
    name = canonicalize_name(package)
    if name not in names:
        names.add(name)
        try:
            lines = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # a requirement on another platform
            lines = []
        for line in lines:
            if line.marker is None or line.marker.evaluate({"extra": ""}):
                needed(line.name, names)
    return names


def run_without(modules: list[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which importing `modules` fails, as if they were not installed."""
    code = f"{HIDE}sys.meta_path[:] = [Hiding(finder, {modules!r}) for finder in sys.meta_path]\n{code}"
    # Triton's interpreter needs NumPy, which the core does not require.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def test_the_core_requires_and_imports_only_torch_and_triton() -> None:
    lines = [Requirement(line) for line in distribution("gspo-kernels").requires or ()]
    assert {line.name for line in lines if "extra" not in str(line.marker)} == CORE
    present: set[str] = {"gspo-kernels", "pip"}
    for package in CORE:
        needed(package, present)
    absent = [
        name
        for name, packages in packages_distributions().items()
        if name.isidentifier() and not present & {canonicalize_name(package) for package in packages}
    ]
    assert {"typer", "rich", "yaml", "transformers", "peft", "matplotlib", "pytest"} <= set(absent)
    done = run_without(absent, "\n".join(f"import {name}" for name in [*MODULES, *INTEGRATIONS]))
    assert done.returncode == 0, done.stderr[-2000:]


def test_log_probs_are_computed_without_triton() -> None:
    code = """
import torch, gspo_kernels
out = gspo_kernels.linear_log_probs(torch.randn(1, 2, 4), torch.zeros(5, 4), torch.zeros(1, 2, dtype=torch.long))
print(out.log_probs.exp().round(decimals=4).tolist())
"""
    done = run_without(["triton"], code)
    assert done.stdout == "[[0.20000000298023224, 0.20000000298023224]]\n", done.stderr[-2000:]


def test_the_help_of_the_commands_imports_no_package_that_takes_long() -> None:
    code = """
import atexit
atexit.register(lambda: print(sorted({"torch", "triton", "transformers", "matplotlib", "numpy"} & sys.modules.keys())))
"""
    lines = run_without([], code + GSPO, "--help").stdout.splitlines()
    assert "train" in " ".join(lines) and lines[-1] == "[]"


@pytest.mark.parametrize(
    ("absent", "code", "argument", "extra"),
    [
        ("typer", GSPO, "", "cli"),
        slow("transformers", GSPO, "train", "train"),
        slow("transformers", BENCHMARKS, "precision", "bench"),
    ],
)
def test_a_command_without_its_extra_prints_the_extra(absent: str, code: str, argument: str, extra: str) -> None:
    done = run_without([absent], code, argument)
    assert (done.returncode, done.stdout) == (1, "")
    assert f" needs {absent}, which is not installed: pip install 'gspo-kernels[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
