"""Results as JSON text: on one line, or as a file with one record per line."""

from __future__ import annotations

import json
import math
from typing import Any

DIGITS = 6  # significant digits of floats in a file
LONGEST_RECORD = 800  # characters


def dumps(value: Any) -> str:
    """Format on one line. NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_finite(value), allow_nan=False)


def pretty(value: Any) -> str:
    """Format as the text of a file: one record per line, floats rounded to `DIGITS` significant digits."""
    return _lines(_finite(value, DIGITS)) + "\n"


def _finite(x: Any, digits: int = 17) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value, digits) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value, digits) for value in x]
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x


def _lines(value: Any, indent: str = "") -> str:
    """Break lists of records, and containers longer than `LONGEST_RECORD` that hold others, into one entry per line."""
    flat = json.dumps(value, allow_nan=False)
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    nested = any(isinstance(x, dict | list) for x in inside)
    if not nested or ("[{" not in flat and len(flat) <= LONGEST_RECORD):
        return flat
    names = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(inside)
    entries = [f"{indent} {name}{_lines(x, indent + ' ')}" for name, x in zip(names, inside, strict=True)]
    return "\n".join([flat[0], ",\n".join(entries), indent + flat[-1]])
