"""Every number and plot of the README and of docs/benchmarks.md, from the committed JSON and nothing else.

    python -m gspo_kernels.benchmarks report            writes them
    python -m gspo_kernels.benchmarks report --check    says what differs, and exits with 1 if anything does

The README has blocks between `<!-- measured: name -->` and `<!-- end -->`; docs/benchmarks.md is written whole. A plot
carries the digest of the JSON that it was drawn from, so that a stale one is found without drawing it again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..measure import RESULTS, ROOT
from . import claims as report_claims
from . import costs as report_costs
from . import work as report_work

README, PAGE, FIGURES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
Suite = dict[str, Any]
# Of the README: name -> (suites, text of them); of the page: suite -> text of it and of its file's name.
BLOCKS = report_costs.BLOCKS | report_work.BLOCKS | report_claims.BLOCKS
SECTIONS = report_costs.SECTIONS | report_work.SECTIONS | report_claims.SECTIONS


class Figure(NamedTuple):
    source: Path  # the JSON
    draw: Callable[[dict[str, Any], Path], None]


def _figures() -> dict[str, Figure]:
    """By the name of the plot. Imported late: matplotlib takes a second."""
    from . import figures_fidelity, figures_paper, figures_sparsity, figures_step, figures_training

    by_suite = {
        "step": figures_step.draw_step,
        "vocab": figures_step.draw_vocab,
        "trainer": figures_step.draw_trainer,
        "sparsity": figures_sparsity.draw_sparsity,
        "fidelity": figures_fidelity.draw_fidelity,
        "budgets": figures_training.draw_budgets,
    }
    drawn = {path.stem: Figure(path, draw) for suite, draw in by_suite.items() for path in files(suite)}
    for path in files("paper-checks"):
        drawn |= {f"{path.stem}-{claim}": Figure(path, draw) for claim, draw in figures_paper.DRAW.items()}
    return drawn


def files(suite: str) -> list[Path]:
    """The committed JSON of a suite: that of a CPU first, then of GPUs."""
    paths = sorted(RESULTS.glob(f"{suite}-*.json"))
    return sorted(paths, key=lambda path: not path.stem.endswith("-cpu"))


def load(path: Path) -> Suite:
    with _of(path):
        suite = json.loads(path.read_text())
        return {**suite, "machine": suite["machine"], "results": suite["results"]}


@contextmanager
def _of(path: Path) -> Iterator[None]:
    """What cannot be told of a file names the file."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise SystemExit(f"{path}: not what its suite writes when it is through: {error!r}") from error


def texts() -> dict[Path, str]:
    """What README and page should be. The README tells of the CPU, the page of every machine."""
    loaded = {suite: [load(path) for path in files(suite)] for suite in SECTIONS}
    readme = README.read_text()
    for name, (suites, block) in BLOCKS.items():
        text = ""
        if all(loaded[suite] for suite in suites):
            with _of(files(suites[0])[0]):
                text = block(*(loaded[suite][0] for suite in suites)) + "\n"
        readme = _filled(readme, name, text)
    on_gpu = any("gpu" in measured["machine"] for suite in loaded.values() for measured in suite)
    parts = [INTRODUCTION.format(where=ON_GPU if on_gpu else NO_GPU)]
    for suite, section in SECTIONS.items():
        for measured, path in zip(loaded[suite], files(suite), strict=True):
            with _of(path):
                parts.append(section(measured, path.stem))
    return {README: readme, PAGE: "\n\n".join(parts) + "\n"}


def _filled(text: str, name: str, block: str) -> str:
    pattern = rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)"
    filled, times = re.subn(pattern, lambda match: f"{match[1]}{block}{match[2]}", text, flags=re.DOTALL)
    if times != 1:
        raise ValueError(f"README.md: expected one block <!-- measured: {name} --> ... <!-- end -->, found {times}")
    return filled


INTRODUCTION = """# Benchmarks

Everything on this page is written by `python -m gspo_kernels.benchmarks report` from the JSON files in
[`benchmarks/results/`](../benchmarks/results/); each section names the command that made its file, and where. {where}
Sections were measured on different processors; "(bf16)" is said of one that multiplies bf16 itself,
which naive PyTorch gains most from: compare within a section.
The commands measure whoever is installed; everyone is in the environment of `make build/peers/ready`
(`build/peers/bin/python`). On your machine, with its cores to itself: `gspo bench`."""
NO_GPU = """**Nothing here was
measured on a GPU**: times are of a small CPU and mean something only as ratios within their own run. What a GPU makes
of passes, errors and decisions is not measured either: the Triton kernels cut other cells and round `d_logits` to the
dtype of the operands."""
ON_GPU = """Times of a
CPU mean something only as ratios within their own run."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stale() -> list[str]:
    """What is not as the JSON says."""
    outdated = [str(path.relative_to(ROOT)) for path, text in texts().items() if _read(path) != text]
    return outdated + [f"docs/figures/{name}.png" for name, figure in _figures().items() if not _is_drawn(name, figure)]


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
    with _of(figure.source):
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
        differs = stale()
        said = [f"{name} is not what the JSON says: python -m gspo_kernels.benchmarks report" for name in differs]
        print("\n".join(said or [f"{README.name}, {PAGE.name} and every plot are what the JSON says"]))
        return 1 if differs else 0
    written = texts()  # all of it before anything is changed
    if absent := [suite for suite in SECTIONS if not files(suite)]:
        print(f"not measured, and so not told of: {', '.join(absent)}")
    for name, figure in _figures().items():
        if not _is_drawn(name, figure):
            draw(name, figure)
            print(f"docs/figures/{name}.png")
    for path, text in written.items():
        path.write_text(text)
    return 0
