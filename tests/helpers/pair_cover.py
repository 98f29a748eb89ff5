"""Combinations of settings that contain every allowed pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pair_cover(
    factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[dict[str, Any]], bool] = lambda row: True, seed: int = 0
) -> list[dict[str, Any]]:
    """Choose rows, with one value per factor, so that every allowed pair of values occurs in at least one row.

    Args:
        factors: names and their values.
        is_allowed: False for rows that must not occur. Pairs that no random row contains are left out.
    """
    generator = random.Random(seed)
    names = list(factors)
    sizes = {name: range(len(values)) for name, values in factors.items()}

    def pairs_of(row: Mapping[str, int]) -> set[Any]:
        return set(itertools.combinations(row.items(), 2))

    values_of = {name: [(name, i) for i in sizes[name]] for name in names}
    pairs = itertools.combinations(names, 2)
    left = {pair for a, b in pairs for pair in itertools.product(values_of[a], values_of[b])}
    rows: list[dict[str, Any]] = []
    while left:
        pair = min(left)
        drawn = []
        for _ in range(200):
            row = {name: generator.choice(sizes[name]) for name in names} | dict(pair)
            values = {name: factors[name][i] for name, i in row.items()}
            if is_allowed(values):
                drawn.append((len(pairs_of(row) & left), values, row))
        left.discard(pair)
        if drawn:
            _, values, row = max(drawn, key=lambda x: x[0])
            rows.append(values)
            left -= pairs_of(row)
    return rows
