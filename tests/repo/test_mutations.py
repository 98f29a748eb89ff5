"""The fast tests kill seeded faults: each fault is one edit of a copy of the library, and the copy must fail.

A fault that survives means that a promise is made but not tested.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers.faults import FAULTS

ROOT = Path(__file__).parent.parent.parent
# What Python ends with when a kernel has written where it must not.
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
# A process a fault, forked from one that has imported what takes long.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["hypothesis", "pytest", "torch", "triton.language", "transformers"])


def run_with_fault(fault: str, folder: Path) -> int | None:
    """What pytest ends with on a copy of the library with the fault; its output is in the copy's log."""
    for name in ("gspo_kernels", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "integrations", folder / "gspo_kernels" / "integrations")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("README.md", "constraints.txt", "docs"):  # tests read them
        (folder / name).symlink_to(ROOT / name)
    module, old, new, test = FAULTS[fault]
    source = folder / "gspo_kernels" / f"{module}.py"
    source.write_text(source.read_text().replace(old, new))
    suite, _, name = test.partition("::")
    (path,) = (folder / "tests").rglob(str(Path(suite).with_name(f"test_{Path(suite).name}.py")))
    process = FORKS.Process(target=_run_test, args=(folder, f"{path}::{name}"))
    process.start()
    process.join()
    return process.exitcode


def _run_test(folder: Path, test: str) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test])
    sys.stdout.flush()
    os._exit(code)


def test_every_fault_is_an_edit_of_the_library() -> None:
    folders = {
        path: ROOT if path.startswith("integrations/") else ROOT / "gspo_kernels" for path, *_ in FAULTS.values()
    }
    sources = {path: (folder / f"{path}.py").read_text() for path, folder in folders.items()}
    assert [fault for fault, (path, old, *_) in FAULTS.items() if old not in sources[path]] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_killed(fault: str, tmp_path: Path) -> None:
    if FAULTS[fault][3].startswith("trainers/trl"):
        pytest.importorskip("trl", minversion="1.15")
    if FAULTS[fault][3].startswith("trainers/verl") and importlib.util.find_spec("verl") is None:
        pytest.skip("verl has an environment of its own: make test-trainers")
    code = run_with_fault(fault, tmp_path)
    killed = code == 1 or (FAULTS[fault][0].startswith("backends/triton/") and code in CRASHES)
    assert killed, f"{fault}: survived or did not run\n{(tmp_path / 'log').read_text()[-2000:]}"
