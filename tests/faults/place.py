"""Find the place of a fault by the name of a function and an expression, whatever its file, line and formatting."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from faults.table import Fault

ROOT = Path(__file__).parent.parent.parent
LIBRARY = ("gspo_kernels", "integrations", "benchmarks")


def faulty_source(fault: Fault) -> tuple[Path, str]:
    """Return the fault's file and the file's text with the fault.

    Raise:
        ValueError: if the library has no such place or several.
    """
    places = find(fault)
    if len(places) != 1:
        raise ValueError(f"expected one place in the library, got {len(places)}: {fault[0]!r} with {fault[1]!r}")
    path, begin, end = places.pop()
    source = path.read_bytes()
    if _is_expression(fault):
        wrong = f"({fault[2]})"
    else:
        column = begin - (source.rfind(b"\n", 0, begin) + 1)
        wrong = textwrap.indent(fault[2], " " * column).lstrip()
    return path, (source[:begin] + wrong.encode() + source[end:]).decode()


def find(fault: Fault) -> set[tuple[Path, int, int]]:
    """Return the file, first byte and end of every equal expression in functions of this name."""
    module, _, name = fault[0].rpartition(":")
    if _is_expression(fault):
        wanted = [ast.parse(fault[1], mode="eval").body]
    else:
        wanted = ast.parse(fault[1]).body
    dumps = [ast.dump(node) for node in wanted]
    places = set()
    for path, qualified_name, code in _named_code():
        in_module = not module or f"/{path.with_suffix('')}".endswith(f"/{module}")
        has_name = f".{qualified_name}".endswith(f".{name}") if name else not qualified_name
        if in_module and has_name:
            for nodes in _runs(code, type(wanted[0]), len(wanted)):
                if [_dump(node) for node in nodes] == dumps:
                    places.add((path, _offset(path, nodes[0]), _end(path, nodes[-1])))
    return places


def _is_expression(fault: Fault) -> bool:
    """Return whether an expression is replaced by an expression. Otherwise statements are replaced by statements."""
    return all([type(x) for x in ast.parse(source).body] == [ast.Expr] for source in fault[1:3])


def _runs(code: ast.AST, kind: type[ast.AST], length: int) -> Iterator[list[ast.expr] | list[ast.stmt]]:
    """Yield the nodes of this type in `code`. Statements come in runs of `length` neighbors."""
    for node in ast.walk(code):
        if isinstance(node, ast.expr) and type(node) is kind:
            yield [node]
        for _, block in ast.iter_fields(node):
            if isinstance(block, list):
                for i, statement in enumerate(block[: len(block) - length + 1]):
                    if isinstance(statement, ast.stmt) and type(statement) is kind:
                        yield block[i : i + length]


@functools.cache
def _named_code() -> list[tuple[Path, str, ast.AST]]:
    """Return (file, qualified name, syntax tree) of every module (named ""), class, function and assigned variable."""
    code = []
    for folder in LIBRARY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ast.parse(path.read_bytes())
            code += [(path, name, node) for name, node in [("", module), *_definitions(module, "")]]
    return code


def _definitions(parent: ast.AST, prefix: str, in_function: bool = False) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield f"{prefix}{node.name}", node
            yield from _definitions(node, f"{prefix}{node.name}.", isinstance(node, ast.FunctionDef))
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and not in_function:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield f"{prefix}{target.id}", node
        yield from _definitions(node, prefix, in_function)


@functools.cache
def _dump(node: ast.AST) -> str:
    return ast.dump(node)


def _offset(path: Path, node: ast.expr | ast.stmt) -> int:
    return _line_offsets(path)[node.lineno - 1] + node.col_offset


def _end(path: Path, node: ast.expr | ast.stmt) -> int:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return _line_offsets(path)[node.end_lineno - 1] + node.end_col_offset


@functools.cache
def _line_offsets(path: Path) -> list[int]:
    offsets = [0]
    for line in path.read_bytes().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets
