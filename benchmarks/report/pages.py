"""Write docs/benchmarks.md, measured tables in other pages and all figures from the committed JSON.

    python -m gspo_kernels.benchmarks report            writes pages and figures
    python -m gspo_kernels.benchmarks report --check    lists stale pages and figures, and exits with 1 if there are any

Both also list results that are older than the code that they measure (`outdated.py`).

`page.md` holds the prose of docs/benchmarks.md and placeholders: {r[...]} is a value of a JSON file, and the others are
texts from `tables.py` and `summary.py`. In README.md, only the texts between a line such as `<!-- measured: gpu -->`
and `<!-- end -->` are written. A figure contains the digest of its JSON files, so it need
not be drawn for `--check`. The table of docs/concepts/sharding.md is computed, not measured (`scale.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..measure import RESULTS, ROOT
from ..studies.compare_report import verdicts
from . import outdated, scale, summary
from .tables import SECTIONS, Results, conditions

README, PAGE, FIGURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
COMPARISON = ROOT / "docs" / "comparison.md"  # written like README.md
TRL = ROOT / "docs" / "trainers" / "trl.md"  # written like README.md
PRECISION = ROOT / "docs" / "guides" / "precision.md"  # written like README.md
TEMPLATE = Path(__file__).with_name("page.md")
PRECISION_BLOCK = """{bodies}

- **{for_bf16}.**
- **{for_fp16}.**
- {larger}. [How](../benchmarks.md#clip-decisions-of-whole-models-nvidia-h200).
- {alone}."""
Draw = Callable[..., None]  # of the results of each source, and the path of the figure


def files(suite: str) -> list[Path]:
    """Find the JSON files of a suite, CPU results first. Exit with a message if the suite has no results."""
    paths = sorted(RESULTS.glob(f"{suite}-*.json"), key=lambda path: (not path.stem.endswith("-cpu"), path))
    return paths or sys.exit(f"{RESULTS}: expected {suite}-cpu.json, found no results of {suite}")


def load(path: Path) -> Results:
    return json.loads(path.read_text())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error caused by a file's contents into an exit with a line that names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        sys.exit(f"{path}: expected the complete results of a suite: {error!r}")


def texts() -> dict[Path, str]:
    """The new texts of the pages that this module writes, by path."""
    introduction, *sections = TEMPLATE.read_text().split("\n<!-- suite: ")
    fields = {path: fields_of(suite, path) for suite in SECTIONS for path in files(suite)}
    first = {suite: fields[files(suite)[0]]["r"] for suite in SECTIONS}
    first["precision on a gpu"] = fields[files("precision")[-1]]["r"]
    common = {"helps": summary.helps(first), "loses": summary.loses(first)}
    common |= {"tolerance": summary.tolerance(first["fidelity"]), "against_window": summary.windows(first["fidelity"])}
    common |= summary.rounding(first)
    for study in ("compare", "moe", "rounding", "long"):
        common |= verdicts(first[study])
    page = [introduction.format(**common)]
    for name, _, prose in (section.partition(" -->\n") for section in sections):
        suite, _, place = name.partition(", ")  # "skip, CPU" and "skip, GPU": a section for each
        for path in files(suite):
            if place and (place == "CPU") != path.stem.endswith("-cpu"):
                continue
            own = summary.rounding(first | {suite: fields[path]["r"]}) if suite == "precision" else {}
            with naming(path):
                page.append(prose.format(**{**common, **own, **fields[path]}))
    precision = PRECISION_BLOCK.format(**summary.rounding(first))
    blocks = {COMPARISON: summary.comparison(first), PRECISION: precision}
    blocks[TRL] = summary.skip(first["skip"])["table"]
    filled = {path: with_block(path.read_text(), block) for path, block in blocks.items() if path.exists()}
    filled[README] = with_block(README.read_text(), fields[files("skip")[1]]["table"], "step on a gpu")
    return {**filled, PAGE: "\n".join(page), scale.PAGE: scale.page()}


def with_block(text: str, block: str, name: str = "results") -> str:
    """Replace the measured block `name` of a page."""
    pattern = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{block}\n{match[2]}", text)


def fields_of(suite: str, path: Path) -> dict[str, Any]:
    """The values of the placeholders in a suite's section, from one JSON file."""
    with naming(path):
        measured = load(path)
        card = measured["machine"].get("gpu")
        results = measured["results"]
        heads = {f"{part}_conditions": conditions(x["measured"]) for part, x in parts(results).items()}
        heads |= {"on_gpu": f" ({card})" if card else "", "figure": f"figures/{path.stem}.png"}
        return {"r": results, "conditions": conditions(measured), **heads, **SECTIONS[suite](results)}


def parts(results: Results) -> dict[str, Results]:
    """The parts of a suite's results that were measured separately, each with a header "measured"."""
    return {name: part for name, part in results.items() if isinstance(part, dict) and "measured" in part}


def figures_by_name() -> dict[str, tuple[list[Path], Draw]]:
    """Every figure's JSON files and drawing function."""
    from . import figures  # matplotlib takes a second to import

    of_suites = {path.stem: ([path], draw) for suite, draw in figures.DRAW.items() for path in files(suite)}
    return of_suites | {
        "readme-cpu": ([files("trainer")[0], files("precision")[0]], figures.draw_readme),
        "readme-step": ([files("skip")[1]], figures.draw_step_on_a_gpu),
    }


def digest(sources: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def stale_figures() -> list[str]:
    """Names of figures that are absent, or were drawn before their JSON files changed."""
    from PIL import Image

    def drawn_from(name: str) -> str | None:
        path = FIGURES / f"{name}.png"
        return Image.open(path).info.get("Source") if path.exists() else None

    return [name for name, (sources, _) in figures_by_name().items() if drawn_from(name) != digest(sources)]


def stale() -> list[str]:
    """The pages and figures that do not agree with the JSON files."""
    pages = [path.name for path, text in texts().items() if path.read_text() != text]
    return pages + [f"docs/figures/{name}.png" for name in stale_figures()]


def draw(name: str) -> None:
    """Draw a figure and store the digest of its JSON files in it."""
    from matplotlib import rc_context
    from PIL import Image, PngImagePlugin

    from .figures import STYLE

    path = FIGURES / f"{name}.png"
    sources, figure = figures_by_name()[name]
    with naming(sources[0]), rc_context(STYLE):
        figure(*[load(source)["results"] for source in sources], path)
    text = PngImagePlugin.PngInfo()
    text.add_text("Source", digest(sources))
    with Image.open(path) as image:
        image.load()
        image.convert("RGB").quantize(128).save(path, pnginfo=text, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gspo_kernels.benchmarks report")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page or figure is stale")
    if parser.parse_args().check:
        differing = stale()
        lines = [f"{name} is stale: run python -m gspo_kernels.benchmarks report" for name in differing]
        pages = f"{README.name}, {PAGE.name}, {COMPARISON.name}, {scale.PAGE.name}"
        print("\n".join(lines or [f"{pages} and every figure are up to date"]))
        print_outdated()
        return 1 if differing else 0
    written = texts()  # make all texts before writing the first file
    for name in stale_figures():
        draw(name)
        print(f"docs/figures/{name}.png")
    for path, text in written.items():
        path.write_text(text)
    print_outdated()
    return 0


def print_outdated() -> None:
    """Print the results that are older than the code that they measure."""
    lines = outdated.outdated(ROOT)
    print("\n  ".join(["Measured with older code, which is not an error:", *lines] if lines else []))
