"""Find the place of a fault by the name of a function and an expression, whatever its file, line and formatting."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from faults.table import Fault

ROOT = Path(__file__).parent.parent.parent
LIBRARY = ("gspo_kernels", "integrations", "benchmarks")
DELETED, ADDED = re.compile(r"\[-(.*?)-\]", re.DOTALL), re.compile(r"\{\+(.*?)\+\}", re.DOTALL)


def before_and_after(edit: str) -> tuple[str, str]:
    """Return the two versions of an edit in the notation of `git diff --word-diff`."""
    return DELETED.sub(r"\1", ADDED.sub("", edit)), ADDED.sub(r"\1", DELETED.sub("", edit))


def faulty_source(fault: Fault) -> tuple[Path, str]:
    """Return the fault's file and the file's text with the fault.

    Raise:
        ValueError: if the library has no such place or several.
    """
    places = find(fault)
    right, wrong = before_and_after(fault[1])
    if len(places) != 1:
        raise ValueError(f"expected one place in the library, got {len(places)}: {fault[0]!r} with {right!r}")
    path, begin, end = places.pop()
    source = path.read_bytes()
    if _is_expression(fault):
        wrong = f"({wrong})"
    else:
        column = begin - (source.rfind(b"\n", 0, begin) + 1)
        wrong = textwrap.indent(wrong, " " * column).lstrip()
    return path, (source[:begin] + wrong.encode() + source[end:]).decode()


def find(fault: Fault) -> set[tuple[Path, int, int]]:
    """Return the file, first byte and end of every equal expression or statement in functions of this name."""
    module, _, name = fault[0].rpartition(":")
    (wanted,) = ast.parse(before_and_after(fault[1])[0]).body
    dump = ast.dump(wanted.value if _is_expression(fault) and isinstance(wanted, ast.Expr) else wanted)
    places = set()
    for path, qualified_name, definition in _definitions_of_library():
        if f".{qualified_name}".endswith(f".{name}") and f"/{path.with_suffix('')}".endswith(module):
            for node in ast.walk(definition):
                if ast.dump(node) == dump:
                    places.add((path, *_range(path, node)))
    return places


def _is_expression(fault: Fault) -> bool:
    """Return whether an expression is replaced by an expression. Otherwise a statement is replaced by statements."""
    return all([type(x) for x in ast.parse(code).body] == [ast.Expr] for code in before_and_after(fault[1]))


@functools.cache
def _definitions_of_library() -> list[tuple[Path, str, ast.AST]]:
    """Return (file, qualified name, syntax tree) of every class and function."""
    paths = [path for folder in LIBRARY for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path, *named) for path in paths for named in _definitions(ast.parse(path.read_bytes()), "")]


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield f"{prefix}{node.name}", node
            yield from _definitions(node, f"{prefix}{node.name}.")
        else:
            yield from _definitions(node, prefix)


def _range(path: Path, node: ast.AST) -> tuple[int, int]:
    """Return the first byte and the end of an expression or a statement."""
    assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None and node.end_col_offset is not None
    lines = path.read_bytes().splitlines(keepends=True)
    begin, end = (sum(map(len, lines[: number - 1])) for number in (node.lineno, node.end_lineno))
    return begin + node.col_offset, end + node.end_col_offset
