"""Run one test on a copy of the library that has one fault."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.faults.table import Fault

ROOT = Path(__file__).parent.parent.parent.parent
# Exit codes of a process that crashes because an interpreted kernel wrote out of bounds.
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
# Each fault runs in a new process. It is forked from a server that has already imported the slow modules.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "_pytest.junitxml",
        "hypothesis.strategies",
        "torch._dynamo",
        "torch.distributed.tensor",
        "transformers.modeling_utils",
        "triton.runtime.interpreter",
        "trl.trainer.grpo_trainer",
    ]
)

AROUND = ("integrations", "benchmarks")  # folders that are imported as part of gspo_kernels


def is_killed(fault: Fault, folder: Path) -> bool:
    """Return whether the fault's test fails. pytest's output goes to `folder / "log"`.

    For a fault in a kernel, a crash of the process counts as a failed test.
    """
    code = run_with_fault(fault, folder)
    return code == 1 or (fault[0].startswith("backends/triton/") and code in CRASHES)


def run_with_fault(fault: Fault, folder: Path) -> int | None:
    """Run the fault's test on a copy of the library that has the fault. Return pytest's exit status."""
    module, text, wrong, test = fault
    changed = source_of(module)
    copy = folder / "gspo_kernels"
    copy.mkdir()
    overlay(ROOT / "gspo_kernels", copy, changed)
    for name in AROUND:
        if module.startswith(f"{name}/"):
            (copy / name).mkdir()
            overlay(ROOT / name, copy / name, changed)
        else:
            (copy / name).symlink_to(ROOT / name)
    (copy / f"{module}.py").write_text(changed.read_text().replace(text, wrong))
    os.utime(copy / f"{module}.py", (0, 0))  # no compiled file has this time, so Python compiles the copy
    for name in ("tests", "pyproject.toml", "README.md", "constraints.txt", "docs"):
        (folder / name).symlink_to(ROOT / name)
    suite, _, name = test.partition("::")
    (path,) = (ROOT / "tests").rglob(str(Path(suite).with_name(f"test_{Path(suite).name}.py")))
    process = FORKS.Process(target=_run_test, args=(folder, f"{path.relative_to(ROOT)}::{name}"))
    process.start()
    process.join()
    return process.exitcode


def source_of(module: str) -> Path:
    """Return the source file of a module, named as in the tables of faults."""
    return (ROOT if module.startswith(AROUND) else ROOT / "gspo_kernels") / f"{module}.py"


def overlay(source: Path, copy: Path, changed: Path) -> None:
    """Link the entries of the folder `source` into the folder `copy`, except the file `changed`.

    Folders that contain `changed` are made anew, and their entries are linked.
    """
    for entry in source.iterdir():
        if entry == changed or entry.is_symlink():  # the caller adds the linked folders
            continue
        if entry in changed.parents:
            (copy / entry.name).mkdir()
            overlay(entry, copy / entry.name, changed)
        else:
            (copy / entry.name).symlink_to(entry)


def _run_test(folder: Path, test: str) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["GSPO_TEST_START"] = "fork"  # of the ranks of sharded tests, which import the copy, too
    gc.freeze()  # spare pytest's ten garbage collections the objects that were imported before the fork
    sys.dont_write_bytecode = True  # write no compiled files into the checkout, to which the links point
    plugins = [f"no:{name}" for name in ("cacheprovider", "xdist", "benchmark", "anyio")]
    code = pytest.main(
        ["-x", "-q", "--tb=line", "--hypothesis-profile=fault", *(f"-p{name}" for name in plugins), test]
    )
    sys.stdout.flush()
    os._exit(code)
