"""The few pieces of Markdown that the report is made of."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def conditions(measured: dict[str, Any], command: str) -> str:
    """Where a file comes from: command, machine, versions, commit."""
    machine, versions = measured["machine"], measured["versions"]
    count = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    where = f"{machine.get('gpu') or machine['cpu']}, {count}, {machine['memory GiB']} GiB"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "gspo-kernels")
    changed = " with uncommitted changes" if measured["uncommitted changes"] else ""
    return f"`{command}`, {measured['date']}, commit {measured['commit'][:7]}{changed}; {where}; {packages}."


def figure(name: str, caption: str) -> str:
    return f"![{caption}](figures/{name}.png)"


def mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def fill(text: str) -> str:
    """In lines as long as those around it."""
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)
