"""Imports run only from later to earlier entries of HOUSE and BACKENDS, without cycles.

A "room" is a module or a folder directly inside a package. A "floor" is one entry of HOUSE or BACKENDS.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("gspo_kernels", "integrations", "benchmarks")
# From the lowest floor to the highest. A room imports only from floors below its own.
HOUSE = (
    {"extras", "layout", "reference", "tolerance", "validation"},
    {"groups", "kept_sets", "ranks", "sampler_mismatch"},
    {"advantages", "metrics", "objective"},
    {"backends"},
    {"memory"},
    {"ops"},
    {"inputs"},
    {"outputs"},
    {"distillation", "fused_loss", "log_probs", "policy"},
    {""},  # the package's __init__.py, which exports the public names
    {"integrations"},
    {"benchmarks"},
    {"tools"},
)
BACKENDS = (
    {"workspace"},
    {"precision", "rows"},
    {"live_tiles", "pairs"},
    {"torch", "triton"},
    {"self_check"},
    {"dispatch"},
)


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
        if here is not None:
            graph.setdefault(here, set()).update({x for x in map(room, others) if x is not None} - {here})
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


@pytest.mark.parametrize("inside", [name for name, path in FILES.items() if path.name == "__init__.py"])
def test_imports_between_folders_have_no_cycle(inside: str) -> None:
    graph = rooms(inside)
    graph.pop("", None)
    TopologicalSorter(graph).prepare()
