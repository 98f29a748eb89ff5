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
from .measure import RESULTS

ROOT = Path(__file__).parent.parent
README, PAGE, FIGURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
Suite = dict[str, Any]


class Figure(NamedTuple):
    suite: str
    draw: Callable[[dict[str, Any], Path], None]


def _figures() -> dict[str, Figure]:
    """Imported late: text can be checked where matplotlib is not."""
    from . import figures_fidelity, figures_paper, figures_sparsity, figures_step, figures_training

    drawn = {
        "step": Figure("step", figures_step.draw_step),
        "vocab": Figure("vocab", figures_step.draw_vocab),
        "trainer": Figure("trainer", figures_step.draw_trainer),
        "sparsity": Figure("sparsity", figures_sparsity.draw_sparsity),
        "fidelity": Figure("fidelity", figures_fidelity.draw_fidelity),
        "budgets": Figure("budgets", figures_training.draw_budgets),
    }
    claims = {f"paper-{claim}": Figure("paper-checks", draw) for claim, draw in figures_paper.DRAW.items()}
    return drawn | claims


def load(suite: str) -> Suite:
    """A committed JSON, as it stands."""
    return json.loads((RESULTS / f"{suite}-cpu.json").read_text())


SUITES = ("step", "vocab", "fidelity", "sparsity", "policy", "budgets", "overhead", "trainer", "paper-checks")


def texts() -> dict[Path, str]:
    """What README and page should be."""
    suites = {name: load(name) for name in SUITES}
    blocks = report_costs.blocks(suites) | report_claims.blocks(suites)
    readme = README.read_text()
    for name in re.findall(r"<!-- measured: ([\w-]+) -->", readme):
        readme = _filled(readme, name, blocks[name])
    sections = (*report_costs.sections(suites), *report_claims.sections(suites))
    return {README: readme, PAGE: "\n\n".join((INTRODUCTION, *sections)) + "\n"}


def _filled(text: str, name: str, block: str) -> str:
    pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{block}\n{found[2]}", text, flags=re.DOTALL)


INTRODUCTION = """# Benchmarks

Everything on this page is written by `python -m benchmarks.report` from the JSON files in
[`benchmarks/results/`](../benchmarks/results/); each section names the command that made its file. **Nothing here was
measured on a GPU**: times are of a small CPU and mean something only as ratios within their own run. Passes, errors,
decisions and memory in units of the batch carry over; speed does not. On your machine: `gspo bench`."""


def digest(suite: str) -> str:
    return hashlib.sha256((RESULTS / f"{suite}-cpu.json").read_bytes()).hexdigest()


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
        return image.info.get("Source") == digest(figure.suite)


def draw(name: str, figure: Figure) -> None:
    """Draw a plot and write into it what it was drawn from."""
    from PIL import Image, PngImagePlugin

    path = FIGURES / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.draw(load(figure.suite)["results"], path)
    source = PngImagePlugin.PngInfo()
    source.add_text("Source", digest(figure.suite))
    with Image.open(path) as image:
        image.load()
        image.convert("RGB").quantize(128).save(path, pnginfo=source, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything differs")
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
