"""Write the measured tables and the figure of the documentation from the committed JSON.

    python -m gspo_kernels.benchmarks report            writes tables and figure
    python -m gspo_kernels.benchmarks report --check    lists stale pages and figures, and exits with 1 if there are any

Both also list results that are older than the code that they measure (`outdated.py`).

In README.md and docs/, the text between a line `<!-- measured: NAME -->` and `<!-- end -->` is a table of `tables.py`.
All other text is written by hand. The figure contains the digest of its JSON files, so it need not be drawn for
`--check`. A table below `<!-- counted: NAME -->` is computed, not measured (`scale.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..measure import RESULTS, ROOT
from . import outdated
from .tables import H200, TABLES, Results, conditions

README, DOCS = ROOT / "README.md", ROOT / "docs"
FIGURE, SOURCES = DOCS / "figures" / "readme-step.png", (f"skip-{H200}", "precision-cpu")
BLOCK = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Turn an error caused by the contents of results into an exit with a line that names them."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        sys.exit(f"{what}: expected the complete results of a suite: {error!r}")


def load() -> dict[str, Results]:
    """All result files, by stem."""
    files = {}
    for path in sorted(RESULTS.glob("*.json")):
        with naming(path):
            files[path.stem] = json.loads(path.read_text())
            if not files[path.stem]["results"]:
                raise ValueError("no results")
    return files


def texts() -> dict[Path, str]:
    """The new texts of the pages with tables, by path."""
    files = load()
    every = {stem: file["results"] for stem, file in files.items()}
    tables = TABLES | {"conditions": lambda _: conditions(files)}

    def filled(path: Path, block: re.Match[str]) -> str:
        start, name, end = block.groups()
        if name not in tables:
            sys.exit(f"{path}: expected a table that is one of {', '.join(tables)}, got {name}")
        with naming(f"table {name!r}"):
            return f"{start}{tables[name](every)}\n{end}"

    pages = {path: path.read_text() for path in (README, *sorted(DOCS.rglob("*.md")))}
    return {path: BLOCK.sub(partial(filled, path), text) for path, text in pages.items() if BLOCK.search(text)}


def digest() -> str:
    return hashlib.sha256(b"".join((RESULTS / f"{stem}.json").read_bytes() for stem in SOURCES)).hexdigest()


def figure_is_stale() -> bool:
    """True if the figure is absent, or was drawn before its JSON files changed."""
    from PIL import Image

    return not FIGURE.exists() or Image.open(FIGURE).info.get("Source") != digest()


def stale() -> list[str]:
    """The pages and figures that do not agree with the JSON files."""
    pages = [path.name for path, text in texts().items() if path.read_text() != text]
    return pages + [FIGURE.name] * figure_is_stale()


def draw() -> None:
    """Draw the figure and store the digest of its JSON files in it."""
    from PIL import Image, PngImagePlugin

    from .figures import draw_step

    with naming(SOURCES):
        step, precision = (load()[stem]["results"] for stem in SOURCES)
        draw_step(step, precision, FIGURE)
    text = PngImagePlugin.PngInfo()
    text.add_text("Source", digest())
    with Image.open(FIGURE) as image:
        image.load()
        image.convert("RGB").quantize(128).save(FIGURE, pnginfo=text, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gspo_kernels.benchmarks report")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page or figure is stale")
    if parser.parse_args().check:
        differing = stale()
        lines = [f"{name} is stale: run python -m gspo_kernels.benchmarks report" for name in differing]
        print("\n".join(lines or ["every table and figure is up to date"]))
        print_outdated()
        return 1 if differing else 0
    written = texts()  # make all texts before writing the first file
    if figure_is_stale():
        draw()
    for path, text in written.items():
        path.write_text(text)
    print_outdated()
    return 0


def print_outdated() -> None:
    """Print the results that are older than the code that they measure."""
    lines = outdated.outdated(ROOT)
    print("\n  ".join(["Measured with older code, which is not an error:", *lines] if lines else []))
