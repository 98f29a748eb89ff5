"""Hooks of `mkdocs build`: the package as it is imported, the changelog as a page, and links to files of the clone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
API = ROOT / "build" / "api"
OUTSIDE = re.compile(r"\[([^]]+)\]\((?:\.\./)+(?:benchmarks|gspo_kernels|integrations|tests)/[^)]*\)")


def on_startup(command: str, dirty: bool) -> None:
    """Put the folders where Python finds them when it imports `gspo_kernels`, for the API reference."""
    shutil.rmtree(API, ignore_errors=True)
    shutil.copytree(ROOT / "gspo_kernels", API / "gspo_kernels")
    shutil.copytree(ROOT / "integrations", API / "gspo_kernels" / "integrations")


def on_files(files: Any, config: Any) -> None:
    """Add CHANGELOG.md, which links to pages as docs/NAME.md."""
    changelog = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to source files into plain text. They work in a clone, but the site has no such files."""
    return OUTSIDE.sub(r"\1", markdown)
