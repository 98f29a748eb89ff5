"""The core needs only torch and Triton. All other parts name a missing package and the extra that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path

import pytest
from helpers.marks import slow
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gspo_kernels

if sys.version_info >= (3, 11):
    import tomllib
else:  # before Python 3.11, pytest installs tomli
    import tomli as tomllib

CORE = ("torch", "triton")
FOLDER = Path(gspo_kernels.__file__).parent
ROOT = FOLDER.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted(
    ".".join(("gspo_kernels", *path.relative_to(FOLDER).with_suffix("").parts)).removesuffix(".__init__")
    for path in FOLDER.rglob("*.py")
    # They need the extra "cli".
    if path.relative_to(FOLDER).as_posix() not in ("tools/cli.py", "tools/doctor/report.py")
)
TRAINERS = [f"trainers.{name}" for name in ("slime", "prime_rl", "skyrl", "ms_swift", "openrlhf")]
INTEGRATIONS = [f"gspo_kernels.integrations.{name}" for name in ("huggingface", "settings", *TRAINERS)]
# (the absent module, a command, the line that the command prints)
COMMANDS = [
    ("typer", "gspo", "gspo needs typer, which is not installed: pip install 'gspo-kernels[cli]'"),
    (
        "transformers",
        "gspo train",
        "error: gspo_kernels.integrations.reference_trainer needs transformers, which is not installed: "
        "pip install 'gspo-kernels[train]'",
    ),
    (
        "matplotlib",
        "benchmarks report --check",
        "gspo_kernels.benchmarks report needs matplotlib, which is not installed: pip install 'gspo-kernels[bench]'",
    ),
]
RUN = {
    "gspo": "from gspo_kernels.tools.entry_point import main; main()",
    "benchmarks": "from gspo_kernels.benchmarks.__main__ import main; sys.exit(main())",
}

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


def needed(package: str) -> set[str]:
    """Return the names of a package and of all packages that it requires, directly or indirectly, without an extra."""
    names = set()
    ahead = [package]
    while ahead:
        name = canonicalize_name(ahead.pop())
        if name not in names:
            names.add(name)
            try:
                lines = [Requirement(line) for line in requires(name) or ()]
            except PackageNotFoundError:  # a requirement on another platform
                continue
            ahead += [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return names


def absent_from_a_core_installation() -> list[str]:
    """Return the modules of this environment that `pip install gspo-kernels` would not install."""
    present = {"gspo-kernels", "pip"}.union(*map(needed, CORE))
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for package in distributions():
        firsts = {path.parts[0].removesuffix(".py") for path in package.files or () if path.suffix == ".py"}
        names[canonicalize_name(package.name) in present] |= firsts
    return sorted(name for name in names[False] - names[True] if name.isidentifier())


def run_without(modules: list[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which importing `modules` fails, as if they were not installed."""
    code = f"{HIDE}sys.meta_path[:] = [Hiding(finder, {modules!r}) for finder in sys.meta_path]\n{code}"
    # Triton's interpreter needs NumPy, which the core does not require.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def test_the_core_requires_only_torch_and_triton() -> None:
    assert [Requirement(line).name for line in PROJECT["dependencies"]] == list(CORE)


def test_the_core_imports_only_torch_and_triton() -> None:
    absent = absent_from_a_core_installation()
    assert {"typer", "rich", "yaml", "transformers", "trl", "matplotlib", "pytest"} <= set(absent)
    assert not {"torch", "triton", "sympy", "gspo_kernels"} & set(absent)
    done = run_without(absent, "\n".join(f"import {name}" for name in [*MODULES, *INTEGRATIONS]))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("absent", "command", "line"),
    [COMMANDS[0], *(slow(*x) for x in COMMANDS[1:])],
    ids=[f"{command} without {absent}" for absent, command, _ in COMMANDS],
)
def test_a_command_without_its_extra_prints_the_extra(absent: str, command: str, line: str) -> None:
    program, *arguments = command.split()
    done = run_without([absent], RUN[program], *arguments)
    extra = line[line.index("[") : -1]
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{line}, or '.{extra}' in a clone\n")
