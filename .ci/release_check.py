"""Check what must be true before a version is published. Print what is missing, one line each, and exit with 1."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gspo_kernels.benchmarks.report.outdated import outdated

ROOT = Path(__file__).parent.parent


def missing(root: Path) -> list[str]:
    """Return one line for each thing that a release of the repository in `root` lacks."""
    project, package, changelog = (
        (root / name).read_text() for name in ("pyproject.toml", "gspo_kernels/__init__.py", "CHANGELOG.md")
    )
    (version,) = re.findall(r'^version = "(.+)"', project, re.MULTILINE)
    lines = []
    if not re.search(r'^\[project\.urls\]\nRepository = "https://[^"]+[^"/.]"', project, re.MULTILINE):
        lines.append('pyproject.toml: expected [project.urls] with Repository = "https://...", the public address')
    if f'\n__version__ = "{version}"\n' not in package:
        lines.append(f'gspo_kernels/__init__.py: expected __version__ = "{version}", the version in pyproject.toml')
    heading = re.search(r"^## .*", changelog, re.MULTILINE)
    if not heading or not re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading[0]):
        got = heading[0] if heading else "no heading"
        lines.append(f"CHANGELOG.md: expected the first heading ## {version} (YYYY-MM-DD), got {got}")
    return lines + [f"benchmarks/results/{line}" for line in outdated(root)]


if __name__ == "__main__":
    sys.exit("\n".join(missing(ROOT)) or None)
