"""Write every number and figure of README.md and docs/benchmarks.md from the committed JSON.

    python -m gspo_kernels.benchmarks report            writes them
    python -m gspo_kernels.benchmarks report --check    lists what differs, and exits with 1 if anything does

`page.md` holds the prose of docs/benchmarks.md and placeholders: {r[...]} is a value of a suite's results, and the
others are the texts of `tables.py`. README.md has the block `<!-- measured: results -->` ... `<!-- end -->`. A figure
carries the digest of the JSON file that it was drawn from, so that a stale one is found without drawing it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..measure import RESULTS, ROOT
from . import summary
from .tables import SECTIONS, Results, conditions

README, PAGE, FIGURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
TEMPLATE = Path(__file__).with_name("page.md")
BLOCK = re.compile(r"(<!-- measured: results -->\n).*?(<!-- end -->)", re.DOTALL)
NO_GPU = "**Nothing here was measured on a GPU.** "


class Figure(NamedTuple):
    source: Path  # JSON
    draw: Callable[[Results, Path], None]


def figures_by_name() -> dict[str, Figure]:
    from . import figures  # matplotlib takes a second to import

    every = {path.stem: Figure(path, draw) for suite, draw in figures.DRAW.items() for path in files(suite)}
    if paths := files("fidelity"):
        every["readme"] = Figure(paths[0], figures.draw_readme)
    return every


def files(suite: str) -> list[Path]:
    """Return the committed files of a suite, that of a CPU first."""
    return sorted(RESULTS.glob(f"{suite}-*.json"), key=lambda path: (not path.stem.endswith("-cpu"), path))


def load(path: Path) -> Results:
    with naming(path):
        measured = json.loads(path.read_text())
        return {**measured, "machine": measured["machine"], "results": measured["results"]}


@contextmanager
def naming(*paths: Path) -> Iterator[None]:
    """Turn an error about the contents of files into one line that names them."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise SystemExit(
            f"{', '.join(map(str, paths))}: expected the complete results of a suite: {error!r}"
        ) from error


def texts() -> dict[Path, str]:
    """Return what README.md and docs/benchmarks.md should hold."""
    introduction, *sections = TEMPLATE.read_text().split("\n<!-- suite: ")
    first = {suite: load(paths[0])["results"] for suite in SECTIONS if (paths := files(suite))}
    on_gpu = any(len(files(suite)) > 1 for suite in SECTIONS)
    common = summaries(first)
    page = [unwrapped(introduction).format(gpu="" if on_gpu else NO_GPU, **common)]
    for section in sections:
        suite, _, prose = section.partition(" -->\n")
        page += [section_of(suite, unwrapped(prose), path, common) for path in files(suite)]
    readme = README.read_text()
    if {"step", "fidelity"} <= first.keys():
        block = summary.readme(first["step"], first["fidelity"]) + "\n"
        readme = BLOCK.sub(lambda match: f"{match[1]}{block}{match[2]}", readme)
    return {README: readme, PAGE: "\n".join(page)}


def summaries(first: dict[str, Results]) -> dict[str, str]:
    """Return the texts that are about several suites."""
    needs = {
        "helps": ("step", "trainer", "fidelity"),
        "loses": ("step", "vocab", "trainer"),
        "tolerance": ("fidelity",),
    }
    tables = {}
    for name, suites in needs.items():
        complete = all(suite in first for suite in suites)
        with naming(*(path for suite in suites for path in files(suite)[:1])):
            tables[name] = getattr(summary, name)(*(first[suite] for suite in suites)) if complete else "Not measured."
    return tables


def unwrapped(prose: str) -> str:
    """Put every paragraph and list item on one line."""
    return re.sub(r"(?<![\n|])\n *(?=[\w`({*\[])", " ", prose)


def section_of(suite: str, prose: str, path: Path, common: dict[str, str]) -> str:
    """Fill a section of the template with the results of one file."""
    measured = load(path)
    with naming(path):
        results = measured["results"]
        heads = {f"{part}_conditions": conditions(x["measured"]) for part, x in parts(results).items()}
        placed = {"r": results, "figure": f"figures/{path.stem}.png", "conditions": conditions(measured), **heads}
        text = prose.format(**placed, **common, **SECTIONS[suite](results))
    gpu = measured["machine"].get("gpu")
    return re.sub(r"^(## .*)$", rf"\1 ({gpu})", text, count=1, flags=re.MULTILINE) if gpu else text


def parts(results: Results) -> dict[str, Results]:
    """Return the parts of a suite that were measured separately."""
    return {name: part for name, part in results.items() if isinstance(part, dict) and "measured" in part}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stale() -> list[str]:
    """Return the files that are not what the JSON says."""
    pages = [path.name for path, text in texts().items() if not path.exists() or path.read_text() != text]
    return pages + [f"docs/figures/{name}.png" for name, figure in figures_by_name().items() if not drawn(name, figure)]


def drawn(name: str, figure: Figure) -> bool:
    """Return whether a figure was drawn from its JSON file as it is now."""
    from PIL import Image

    path = FIGURES / f"{name}.png"
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get("Source") == digest(figure.source)


def draw(name: str, figure: Figure) -> None:
    """Draw a figure and store the digest of its source in it."""
    from matplotlib import rc_context
    from PIL import Image, PngImagePlugin

    from .figures import STYLE

    path = FIGURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(figure.source), rc_context(STYLE):
        figure.draw(load(figure.source)["results"], path)
    source = PngImagePlugin.PngInfo()
    source.add_text("Source", digest(figure.source))
    with Image.open(path) as image:
        image.load()
        image.convert("RGB").quantize(128).save(path, pnginfo=source, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gspo_kernels.benchmarks report", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    if parser.parse_args().check:
        differing = stale()
        lines = [f"{name} is not what the JSON says: python -m gspo_kernels.benchmarks report" for name in differing]
        print("\n".join(lines or [f"{README.name}, {PAGE.name} and every figure are what the JSON says"]))
        return 1 if differing else 0
    written = texts()  # all of it before anything is changed
    if absent := [suite for suite in SECTIONS if not files(suite)]:
        print(f"no results of: {', '.join(absent)}")
    for name, figure in figures_by_name().items():
        if not drawn(name, figure):
            draw(name, figure)
            print(f"docs/figures/{name}.png")
    for path, text in written.items():
        path.write_text(text)
    return 0
