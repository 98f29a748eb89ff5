"""Run one test on a copy of the library that has one fault."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from faults.place import LIBRARY, ROOT, faulty_source
from faults.table import Fault

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


def is_killed(fault: Fault, folder: Path) -> bool:
    """Return whether the fault's test fails. pytest's output goes to `folder / "log"`.

    For a fault in a kernel, a crash of the process counts as a failed test.
    """
    path, source = faulty_source(fault)
    code = run_with_fault(path, source, fault[2], folder)
    return code == 1 or ("triton" in path.relative_to(ROOT).parts and code in CRASHES)


def run_with_fault(path: Path, source: str, test: str, folder: Path) -> int | None:
    """Run a test on a copy of the library whose file `path` contains `source`. Return pytest's exit status."""
    for name in LIBRARY:
        copy = folder / "gspo_kernels" / ("" if name == "gspo_kernels" else name)
        shutil.copytree(ROOT / name, copy, copy_function=os.symlink, dirs_exist_ok=True)
        if path.is_relative_to(ROOT / name):
            wrong = copy / path.relative_to(ROOT / name)
            wrong.unlink()
            wrong.write_text(source)
            os.utime(wrong, (0, 0))  # no compiled file has this time, so Python compiles the copy
    for name in ("tests", "pyproject.toml", "README.md", "constraints.txt", "docs"):
        (folder / name).symlink_to(ROOT / name)
    suite, _, name = test.partition("::")
    (path,) = (ROOT / "tests").rglob(str(Path(suite).with_name(f"test_{Path(suite).name}.py")))
    process = FORKS.Process(target=_run_test, args=(folder, f"{path.relative_to(ROOT)}::{name}"))
    process.start()
    process.join()
    return process.exitcode


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
