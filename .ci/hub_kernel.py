"""Write the layout of the Hugging Face kernels hub: python .ci/hub_kernel.py build/hub

    build.toml            read by kernel-builder: edition 5, a kernel without compiled code
    README.md             the card
    torch-ext/            the sources of the kernel, the core of gspo_kernels
    build/torch-<backend> the same files and metadata.json, which `kernels.get_kernel` loads
    tests/, benchmarks/   for `pytest tests` and `kernels benchmark`

The folder is the content of a hub repository of the type "kernel". Nothing is uploaded here. The hub's name for this
kernel, as kernel-builder takes it from `[general.hub]` in build.toml, does not exist yet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BACKENDS = ("cpu", "cuda", "rocm")  # those that we test or compile for
# The `gspo` command, and what only it and the reference trainer use.
LEFT_OUT = ("tools", "extras.py", "__pycache__")


def write(folder: Path) -> None:
    """Replace `folder` by the layout."""
    (version,) = re.findall(r'^version = "(\d+)\.', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if folder.exists():
        shutil.rmtree(folder)
    sources = folder / "torch-ext" / "gspo_kernels"
    shutil.copytree(ROOT / "gspo_kernels", sources, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in ("tests", "benchmarks"):
        shutil.copytree(ROOT / ".ci" / "hub" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", folder)
    card = (ROOT / ".ci" / "hub" / "CARD.md").read_text()
    (folder / "README.md").write_text(card.replace("@VERSION@", version))
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    (folder / "build.toml").write_text(
        f'[general]\nname = "gspo-kernels"\nversion = {version}\nedition = 5\nlicense = "Apache-2.0"\n'
        f'backends = [{backends}]\n\n[torch-noarch]\npyext = ["py", "typed"]\n'
    )
    files = {
        path.relative_to(sources).as_posix(): hashlib.sha256(path.read_bytes())
        for path in sorted(sources.rglob("*"))
        if path.is_file()
    }
    digests = {name: base64.b64encode(content.digest()).decode() for name, content in files.items()}
    unique = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:10]
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(sources, variant)
        metadata = {
            "name": "gspo-kernels",
            "id": f"_gspo_kernels_{backend}_{unique}",  # the name under which the package is imported
            "version": int(version),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
