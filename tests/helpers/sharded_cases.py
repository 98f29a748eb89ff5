"""Cases of tests/distributed: functions that every rank of a group runs, and rows of `helpers.features`.

A case communicates the same number of times on all ranks whether or not its comparisons fail: the rank reports failures
at the end. A case may return a function that compares its results without the other ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from helpers.array import assert_results
from helpers.features import build, repeatable
from helpers.sharded_runs import Groups, owners, put_together, run_rank, size_of
from torch import Tensor


class Case(NamedTuple):
    ranks: int  # ranks 0 to ranks - 1 run it
    run: Callable[[Context], Callable[[], None] | None]


CASES: dict[str, Case] = {}


class Context(NamedTuple):
    """What a rank knows about its place."""

    rank: int
    groups: dict[str, Any]

    def group(self, ranks: int) -> Any:
        """Return the group of ranks 0 to ranks - 1."""
        return self.groups[str(ranks)]

    def square(self) -> Groups:
        """Return the groups of a 2 x 2 mesh: TP over adjacent ranks, CP over the others."""
        return Groups(tp=self.groups[f"row {self.rank // 2}"], cp=self.groups[f"column {self.rank % 2}"])


def case(name: str, ranks: int) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    def add(run: Callable[[Context], None]) -> Callable[[Context], None]:
        assert name not in CASES, name
        CASES[name] = Case(ranks, run)
        return run

    return add


def relative(x: Tensor, truth: Tensor) -> float:
    return ((x - truth).double().norm() / truth.double().norm().clamp(min=1e-30)).item()


# -- rows


def add_row(name: str, row: dict[str, Any], seed: int) -> None:
    """Add a case that compares a row with float64, on one of its ranks."""
    ranks = row["tp"] * row["cp"]
    judge = len(CASES) % ranks

    def run(context: Context) -> Callable[[], None] | None:
        group = context.group(ranks)
        groups = Groups(group if row["cp"] == 1 else None, group if row["tp"] == 1 else None)
        groups = context.square() if row["tp"] == row["cp"] == 2 else groups
        case = build(row, seed)
        try:
            mine: Any = run_rank(case, groups, owners(case, size_of(groups.cp), seed))
        except Exception:
            mine = traceback.format_exc()
        parts: list[Any] = [None] * ranks
        dist.gather_object(mine, parts if context.rank == judge else None, judge, group)
        return (lambda: assert_row(case, parts, seed)) if context.rank == judge else None

    CASES[name] = Case(ranks, run)


def assert_row(case: Any, parts: list[Any], seed: int) -> None:
    tp = case.row["tp"]
    errors = [part for part in parts if isinstance(part, str)]
    with repeatable(case.row, seed):
        assert not errors, "\n".join(errors)
        assert_results(case, put_together(case, [parts[i : i + tp] for i in range(0, len(parts), tp)]))
