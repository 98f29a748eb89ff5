"""Every number and plot of the README and of docs/benchmarks.md, from the committed JSON and nothing else.

    python -m benchmarks.report            writes them
    python -m benchmarks.report --check    says what differs, and exits with 1 if anything does

The README has blocks between `<!-- measured: name -->` and `<!-- end -->`; docs/benchmarks.md is written whole. A plot
carries the digest of the JSON that it was drawn from, so that a stale one is found without drawing it again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import report_claims, report_costs
from .measure import RESULTS, needs

ROOT = Path(__file__).parent.parent
README, PAGE, FIGURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
Suite = dict[str, Any]


class Figure(NamedTuple):
    source: Path  # the JSON
    draw: Callable[[dict[str, Any], Path], None]


def _figures() -> dict[str, Figure]:
    """By the name of the plot. Imported late: matplotlib takes a second."""
    from . import figures_fidelity, figures_paper, figures_sparsity, figures_step, figures_training

    by_suite = {
        "step": figures_step.draw_step, "vocab": figures_step.draw_vocab, "trainer": figures_step.draw_trainer,
        "sparsity": figures_sparsity.draw_sparsity, "fidelity": figures_fidelity.draw_fidelity,
        "budgets": figures_training.draw_budgets,
    }  # fmt: skip
    drawn = {path.stem: Figure(path, draw) for suite, draw in by_suite.items() for path in files(suite)}
    for path in files("paper-checks"):
        drawn |= {f"{path.stem}-{claim}": Figure(path, draw) for claim, draw in figures_paper.DRAW.items()}
    return drawn


def files(suite: str) -> list[Path]:
    """The committed JSON of a suite: that of a CPU first, then of GPUs."""
    found = sorted(RESULTS.glob(f"{suite}-*.json"))
    return sorted(found, key=lambda path: not path.stem.endswith("-cpu"))


def load(path: Path) -> Suite:
    return json.loads(path.read_text())


def texts() -> dict[Path, str]:
    """What README and page should be. The README tells of the CPU, the page of every machine."""
    sections = report_costs.SECTIONS | report_claims.SECTIONS
    found = {suite: [load(path) for path in files(suite)] for suite in sections}
    blocks = report_costs.BLOCKS | report_claims.BLOCKS
    readme = README.read_text()
    for name, (suites, block) in blocks.items():
        if all(found[suite] for suite in suites):
            readme = _filled(readme, name, block(*(found[suite][0] for suite in suites)) + "\n")
        else:
            readme = _filled(readme, name, "")  # not measured yet
    on_gpu = any("gpu" in one["machine"] for suite in found.values() for one in suite)
    parts = [INTRODUCTION.format(where=ON_GPU if on_gpu else NO_GPU)]
    for suite, section in sections.items():
        parts += [section(one, path.stem) for one, path in zip(found[suite], files(suite), strict=True)]
    return {README: readme, PAGE: "\n\n".join(parts) + "\n"}


def _filled(text: str, name: str, block: str) -> str:
    pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
    filled, times = re.subn(pattern, lambda found: f"{found[1]}{block}{found[2]}", text, flags=re.DOTALL)
    if times != 1:
        raise ValueError(f"README.md: expected one block <!-- measured: {name} --> ... <!-- end -->, found {times}")
    return filled


INTRODUCTION = """# Benchmarks

Everything on this page is written by `python -m benchmarks.report` from the JSON files in
[`benchmarks/results/`](../benchmarks/results/); each section names the command that made its file, and where. {where}
Sections were measured on different processors; "(bf16)" is said of one that multiplies bf16 itself,
which naive PyTorch gains most from: compare within a section.
On your machine, with its cores to itself: `gspo bench`."""
NO_GPU = """**Nothing here was
measured on a GPU**: times are of a small CPU and mean something only as ratios within their own run. Passes, errors and
decisions carry over, speed does not."""
ON_GPU = """Times of a
CPU mean something only as ratios within their own run."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stale() -> list[str]:
    """What is not as the JSON says."""
    found = [str(path.relative_to(ROOT)) for path, text in texts().items() if _read(path) != text]
    return found + [f"docs/figures/{name}.png" for name, figure in _figures().items() if not _is_drawn(name, figure)]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_drawn(name: str, figure: Figure) -> bool:
    from PIL import Image

    path = FIGURES / f"{name}.png"
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get("Source") == digest(figure.source)


def draw(name: str, figure: Figure) -> None:
    """Draw a plot and write into it what it was drawn from."""
    from PIL import Image, PngImagePlugin

    path = FIGURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.draw(load(figure.source)["results"], path)
    source = PngImagePlugin.PngInfo()
    source.add_text("Source", digest(figure.source))
    with Image.open(path) as image:
        image.load()
        image.convert("RGB").quantize(128).save(path, pnginfo=source, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
    needs("matplotlib")
    if parser.parse_args().check:
        differs = stale()
        print("\n".join(f"{name} is not what the JSON says: python -m benchmarks.report" for name in differs))
        return 1 if differs else 0
    for path, text in texts().items():
        path.write_text(text)
    for name, figure in _figures().items():
        if not _is_drawn(name, figure):
            draw(name, figure)
            print(f"docs/figures/{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
