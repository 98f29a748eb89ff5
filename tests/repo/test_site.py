"""The documentation site builds without a warning and documents every public name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
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
    assert public_names() - NOT_DOCUMENTED <= headings
    # Pages load nothing from another server.
    loaded = r'<(?:script|img|iframe)[^>]*src="(\w+:)?//|<link[^>]*(?:stylesheet|preconnect)[^>]*href="(\w+:)?//'
    assert [path.name for path, page in pages.items() if re.search(loaded, page)] == []
