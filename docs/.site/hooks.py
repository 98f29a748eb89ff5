"""Hooks of `mkdocs build`: sources for the API reference, two generated pages, and links to files of the clone."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.structure.files import File

from gspo_kernels.tools.cli import app

ROOT = Path(__file__).parent.parent.parent
API = ROOT / "build" / "api"
# For the search: other spellings of a page's words, and a changelog that comes after the pages that it repeats.
META = {
    "index.md": {"tags": ["licence"]},
    "trainers/trl.md": {"tags": ["accumulation"]},
    "trainers/own_loop.md": {"tags": ["accumulation"]},
    "changelog.md": {"search": {"boost": 0.1}},
}
OUTSIDE = re.compile(r"\[([^]]+)\]\((?:\.\./)+(?:benchmarks|examples|gspo_kernels|integrations|tests)/[^)]*\)")


def on_startup(command: str, dirty: bool) -> None:
    """Copy the sources to build/api in the layout of the installed package, for the API reference."""
    shutil.rmtree(API, ignore_errors=True)
    shutil.copytree(ROOT / "gspo_kernels", API / "gspo_kernels")
    shutil.copytree(ROOT / "integrations", API / "gspo_kernels" / "integrations")


def on_files(files: Any, config: Any) -> None:
    """Add two pages: the changelog, with its links made relative to docs/, and the options of `gspo`."""
    changelog = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))
    files.append(File.generated(config, "api/command_line.md", content=command_line()))


def command_line() -> str:
    """Return a page with the help text and the options of each `gspo` command."""
    page = ["# Command line\n\n`pip install -e '.[cli]'` installs `gspo`; `gspo train` needs `.[train]`."]
    commands: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore
    for name, command in commands.items():
        text = re.sub(r"docs/(\w+)\.md", r"[gspo train](../\1.md)", inspect.cleandoc(command.help).replace("<", "&lt;"))
        page.append(f"## gspo {name}\n\n{text}\n\n| option | meaning |\n|---|---|")
        for option in command.params:
            names = ", ".join(option.opts) if option.param_type_name == "option" else option.metavar
            default = f" (default: {option.default})" if option.default not in (None, False) else ""
            page[-1] += f"\n| `{names}` | {option.help}{default} |"
    return "\n\n".join(page) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Add META. Turn links to source files into plain text: they work in a clone, but the site has no such files."""
    page.meta |= META.get(page.file.src_uri, {})
    return OUTSIDE.sub(r"\1", markdown)
