"""Imports run only from later to earlier entries of HOUSE and BACKENDS, without cycles. Each file has one import name.

A "room" is a module or a folder directly inside a package. A "floor" is one entry of HOUSE or BACKENDS.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("gspo_kernels", "integrations", "benchmarks")
# From the lowest floor to the highest. A room imports only from floors below its own.
HOUSE = (
    {"extras", "layout", "reference", "tolerance", "validation"},
    {"groups", "ranks", "sampler_mismatch"},
    {"advantages", "metrics", "objective"},
    {"backends"},
    {"inputs", "ops"},
    {"outputs"},
    {"fused_loss", "log_probs", "policy"},
    {"", "tools"},  # "" is the package's __init__.py, which exports the public names
)
BACKENDS = (
    {"workspace"},
    {"precision", "rows"},
    {"check_samples", "live_tiles"},
    {"torch", "triton"},
    {"adapter", "kernel_check"},
    {"self_check"},
    {"dispatch"},
)
MOST_FLOORS = 8


def import_name(path: Path) -> str:
    """Return the name under which a file is imported. For integrations/ and benchmarks/ it begins with gspo_kernels."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "gspo_kernels" else ("gspo_kernels", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {import_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def imported(name: str) -> set[str]:
    """Return the names of our files that the file `name` imports, at its top or inside functions."""
    path = FILES[name]
    names = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [above, node.module]))
            names |= {f"{module}.{alias.name}" if f"{module}.{alias.name}" in FILES else module for alias in node.names}
    # `name` itself is in the list if an __init__.py imports from its own package.
    return {x for x in names if x in FILES and x != name}


IMPORTS = {name: imported(name) for name in FILES}


def rooms(inside: str) -> dict[str, set[str]]:
    """Return which other rooms each room of the package `inside` imports: "ops" -> {"backends", ...}."""

    def room(name: str) -> str | None:
        if name == inside:
            return ""
        return name.removeprefix(f"{inside}.").split(".")[0] if name.startswith(f"{inside}.") else None

    graph: dict[str, set[str]] = {}
    for name, others in IMPORTS.items():
        here = room(name)
        if here is not None and not (inside == "gspo_kernels" and here in PACKAGES):
            there = {x for x in map(room, others) if x is not None and x not in PACKAGES}
            graph.setdefault(here, set()).update(there - {here})
    return graph


@pytest.mark.parametrize(("inside", "floors"), [("gspo_kernels", HOUSE), ("gspo_kernels.backends", BACKENDS)])
def test_every_room_imports_only_from_lower_floors(inside: str, floors: tuple[set[str], ...]) -> None:
    level = {room: i for i, floor in enumerate(floors) for room in floor}
    graph = rooms(inside)
    graph.pop("", None) if inside != "gspo_kernels" else None
    assert graph.keys() == level.keys(), "every room is on a floor"
    upward = [(a, b) for a, others in graph.items() for b in others if level[b] >= level[a]]
    assert upward == []


def test_imports_between_files_have_no_cycle() -> None:
    try:
        TopologicalSorter({name: others for name, others in IMPORTS.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("inside", ["gspo_kernels", *(f"gspo_kernels.{x}" for x in ("integrations", "benchmarks"))])
def test_imports_between_folders_have_no_cycle(inside: str) -> None:
    for package in [inside, *(name for name in FILES if name.startswith(f"{inside}.") and is_package(name))]:
        graph = rooms(package)
        graph.pop("", None)
        TopologicalSorter(graph).prepare()


def is_package(name: str) -> bool:
    return FILES[name].name == "__init__.py"


@pytest.mark.parametrize("inside", [name for name in FILES if is_package(name)])
def test_no_package_has_more_than_eight_floors(inside: str) -> None:
    floor: dict[str, int] = {}
    graph = rooms(inside)
    for room in TopologicalSorter(graph).static_order():
        floor[room] = 1 + max((floor[x] for x in graph.get(room, ())), default=0)
    assert max(floor.values()) <= MOST_FLOORS


def test_the_backends_do_not_import_each_other() -> None:
    for a, b in (("torch", "triton"), ("triton", "torch")):
        inside = [name for name in FILES if name.startswith(f"gspo_kernels.backends.{a}")]
        assert not [x for name in inside for x in IMPORTS[name] if x.startswith(f"gspo_kernels.backends.{b}")]


def test_in_the_library_only_the_command_line_imports_integrations_and_benchmarks() -> None:
    around = {"gspo_kernels.integrations", "gspo_kernels.benchmarks"}
    for name, others in IMPORTS.items():
        outside = {".".join(x.split(".")[:2]) for x in others} & around
        allowed = {".".join(name.split(".")[:2])} if name.split(".")[1:2] != ["benchmarks"] else around
        commands = {f"gspo_kernels.tools.{x}" for x in ("cli", "bench_command")}
        assert outside <= (around if name in commands else allowed), name


@pytest.mark.parametrize("folder", ["integrations", "benchmarks"])
def test_a_file_has_one_import_name(folder: str) -> None:
    """A file imported as `benchmarks.x` and as `gspo_kernels.benchmarks.x` would run twice and define classes twice."""
    for path in [*FILES.values(), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] == folder], path


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
    op = sys.modules[f"{package.__name__}.ops.loss"].fused_loss.op
    assert op._qualname == f"{package.__name__}::fused_loss", op._qualname
assert all(torch.equal(a, b) for a, b in zip(*results)), results
assert copy.Objective is not gspo_kernels.Objective
"""


def test_a_copy_under_another_name_works_next_to_the_package() -> None:
    """The kernels hub gives each version of a package its own name. Operators of the same name would clash."""
    run = subprocess.run([sys.executable, "-c", SECOND_COPY], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
