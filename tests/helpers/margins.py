"""Record the margin of every numeric comparison: error / allowed error. `make test-processors` lists the large ones.

`python -m helpers.margins FILE...` prints the largest margin of each test that uses more than half of a limit. The
files are those that the variable GSPO_TEST_MARGINS named in runs of pytest.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tolerance
import torch

LIMITS = re.compile(r"\b(?:allowed|limit|" + "|".join(name for name in dir(tolerance) if name.isupper()) + r")\b")


def record_comparisons() -> None:
    """Make `torch.testing.assert_close` and `pytest.approx` record their margins."""
    close, scalar = torch.testing.assert_close, type(pytest.approx(0.0))
    equal = scalar.__eq__

    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        close(actual, expected, **options)
        if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
            return
        defaults = torch.testing._comparison.default_tolerances(actual, expected)  # pyright: ignore
        rtol, atol = (options.get(name, x) for name, x in zip(("rtol", "atol"), defaults, strict=True))
        allowed = atol + rtol * expected.double().abs()
        margins = ((actual.double() - expected.double()).abs() / allowed).nan_to_num(0, 0, 0)
        tolerance.record("assert_close", margins.max().item() if margins.numel() else 0.0, 1.0)

    def approximately(self: Any, actual: Any) -> bool:
        result = equal(self, actual)
        if result and isinstance(actual, float) and isinstance(self.expected, float) and actual != self.expected:
            tolerance.record("approx", abs(actual - self.expected), self.tolerance)
        return result

    torch.testing.assert_close, scalar.__eq__ = assert_close, approximately


def record_assertion(source: str, values: str) -> None:
    """Record `error <= limit` in an assertion that names a limit. `values` is pytest's text: "1e-9 <= (2 * 1e-8)"."""
    values = re.sub(r"tensor\(([-+.e\d]+)[^()]*(?:\(\)[^()]*)?\)", r"\1", values.splitlines()[0])
    try:
        nodes = list(ast.walk(ast.parse(values, mode="eval"))) if LIMITS.search(source) else []
    except SyntaxError:  # a side is no number
        return
    for node in nodes:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Lt | ast.LtE):
            sides = [ast.unparse(x) for x in (node.left, *node.comparators)]
            if all(re.fullmatch(r"[-+*/.e\d() ]+", x) for x in sides):
                error, allowed = (float(eval(x)) for x in sides)
                tolerance.record(source, error, allowed)


def main(files: list[str]) -> None:
    largest: dict[str, tuple[float, str, str]] = {}
    for path in map(Path, files):
        for line in path.read_text().splitlines():
            margin, test, what = line.split("\t")
            largest[test] = max(largest.get(test, (0.0, "", "")), (float(margin), path.name, what))
    for test, (margin, setting, what) in sorted(largest.items(), key=lambda item: -item[1][0]):
        if 0.5 < margin <= 1:  # above 1, a test plants a fault, or it has failed
            print(f"{margin:7.2f}  {test}  [{what}]  {setting}")


if __name__ == "__main__":
    main(sys.argv[1:])
