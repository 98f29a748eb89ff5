"""Combinations of settings that contain every allowed pair of values, and every triple of some factors."""

from __future__ import annotations

import datetime
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CANDIDATES, TRIES = 12, 200  # rows from which the best is chosen, and attempts to draw them


def seed_of_the_week() -> int:
    """The seed of the rows that tests draw: GSPO_ARRAY_SEED, or year and ISO week, such as 202648.

    Every week has other rows, so that a year sees fifty arrays.
    """
    year, week, _ = datetime.date.today().isocalendar()
    return int(os.environ.get("GSPO_ARRAY_SEED", 100 * year + week))


class Ban(NamedTuple):
    """Values of two or three factors that must not occur together."""

    factors: tuple[str, ...]
    is_banned: Callable[..., bool]
    reason: str
    error: str | None = None  # of the message that a user gets; None: the combination has no meaning


class Rows:
    """Draws rows, with one value per factor, that contain no banned combination.

    A value that a factor lists several times is drawn more often. Values are hashable.
    """

    def __init__(self, factors: Mapping[str, Sequence[Any]], bans: Sequence[Ban] = ()) -> None:
        self.factors = factors
        levels = [(name, value) for name, values in factors.items() for value in dict.fromkeys(values)]
        self.bit = {level: 1 << i for i, level in enumerate(levels)}
        self.conflicts = dict.fromkeys(levels, 0)  # bits of the values that exclude a value
        self.banned_triples: dict[Any, list[int]] = {level: [] for level in levels}
        for ban in bans:
            for values in banned_values(ban, factors):
                combination = list(zip(ban.factors, values, strict=True))
                for level in combination:
                    others = sum(self.bit[x] for x in combination if x != level)
                    if len(combination) == 2:
                        self.conflicts[level] |= others
                    else:
                        self.banned_triples[level].append(others)
        self.missing = {a: sum(self.bit[b] for b in levels if b[0] != a[0]) & ~self.conflicts[a] for a in levels}

    def allows(self, level: Any, chosen: int) -> bool:
        """Say whether a value may join the values of the bits `chosen`."""
        return not self.conflicts[level] & chosen and all(x & ~chosen for x in self.banned_triples[level])

    def draw(self, rng: random.Random, start: Mapping[str, Any], greedy: bool = True) -> dict[str, Any] | None:
        """Complete a row. `greedy` prefers values whose pairs occur in no row yet. None if the row cannot go on."""
        row, chosen = {}, 0
        names = [name for name in self.factors if name not in start]
        for name in (*start, *rng.sample(names, len(names))):
            values = [start[name]] if name in start else rng.sample(self.factors[name], len(self.factors[name]))
            values = [value for value in values if self.allows((name, value), chosen)]
            if not values:
                return None
            gains = [(self.missing[name, value] & chosen).bit_count() if greedy else 0 for value in values]
            row[name] = values[gains.index(max(gains))]
            chosen |= self.bit[name, row[name]]
        return {name: row[name] for name in self.factors}

    def any(self, rng: random.Random, start: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Draw an allowed row that has the values of `start`."""
        while (row := self.draw(rng, start or {}, greedy=False)) is None:
            pass
        return row

    def gain(self, row: Mapping[str, Any]) -> int:
        """Count the pairs of a row that occur in no row yet."""
        chosen = sum(self.bit[level] for level in row.items())
        return sum((self.missing[level] & chosen).bit_count() for level in row.items()) // 2

    def add(self, row: Mapping[str, Any]) -> None:
        chosen = sum(self.bit[level] for level in row.items())
        for level in row.items():
            self.missing[level] &= ~chosen

    def next_pair(self) -> dict[str, Any] | None:
        """Return a pair that occurs in no row yet."""
        for level, missing in self.missing.items():
            if missing:
                return dict((level, next(x for x, bit in self.bit.items() if bit & missing)))
        return None

    def leave_out(self, pair: Mapping[str, Any]) -> None:
        a, b = pair.items()
        self.missing[a] &= ~self.bit[b]
        self.missing[b] &= ~self.bit[a]


def banned_values(ban: Ban, factors: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    values = [dict.fromkeys(factors[name]) for name in ban.factors]
    return [x for x in itertools.product(*values) if ban.is_banned(*x)]


def pair_cover(
    factors: Mapping[str, Sequence[Any]],
    is_allowed: Callable[[dict[str, Any]], bool] = lambda row: True,
    seed: int = 0,
    *,
    bans: Sequence[Ban] = (),
    triples_of: Sequence[str] = (),
    independent: Sequence[tuple[str, str]] = (),
) -> list[dict[str, Any]]:
    """Choose rows, with one value per factor, so that every allowed pair of values occurs in at least one row.

    Args:
        factors: names and their values.
        is_allowed: False for rows that must not occur. Pairs that no random row contains are left out.
        seed: of the random choices.
        bans: combinations that must not occur. Unlike `is_allowed`, they are avoided while a row is drawn.
        triples_of: factors of which every allowed triple of values occurs.
        independent: pairs of factors whose values need not meet.
    """
    rng = random.Random(seed)
    drawn = Rows(factors, bans)
    for a, b in independent:
        for values in itertools.product(factors[a], factors[b]):
            drawn.leave_out(dict(zip((a, b), values, strict=True)))
    left = dict.fromkeys(_triples(factors, triples_of))
    rows: list[dict[str, Any]] = []

    def gain(row: Mapping[str, Any]) -> int:
        return drawn.gain(row) + 5 * sum(triple in left for triple in _triples_in(row, triples_of))

    while start := dict(next(iter(left), ())) or drawn.next_pair():
        candidates: list[dict[str, Any]] = []
        for attempt in range(TRIES):
            row = drawn.draw(rng, start, greedy=attempt < TRIES // 4)
            if row is not None and is_allowed(row):
                candidates.append(row)
            if len(candidates) == CANDIDATES:
                break
        if len(start) == 3:
            left.pop(tuple(start.items()))
        if candidates:
            best = max(candidates, key=gain)
            rows.append(best)
            drawn.add(best)
            for triple in _triples_in(best, triples_of):
                left.pop(triple, None)
        elif len(start) == 2:
            drawn.leave_out(start)
    return rows


def value_cover(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Choose a few rows in which every value of every factor occurs at least once."""
    missing, chosen = {item for row in rows for item in row.items()}, []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing & row.items())))
        missing -= chosen[-1].items()
    return chosen


def _triples(factors: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Iterator[Any]:
    for chosen in itertools.combinations(names, 3):
        for values in itertools.product(*(dict.fromkeys(factors[name]) for name in chosen)):
            yield tuple(zip(chosen, values, strict=True))


def _triples_in(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[Any]:
    return itertools.combinations([(name, row[name]) for name in names], 3)
