"""A run of `gspo train` whose process is killed at one of its operations on files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from helpers.reference_runs import small

from gspo_kernels.integrations.reference_trainer import read_config, train

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "shutil.rmtree")


def main(rank: int, folder: Path, killed_at: int, resume: bool, options: dict[str, Any]) -> None:
    """Train or resume a run, and kill the process just before its `killed_at`-th file operation (0: never).

    A run that finishes writes how many operations it made to the file `operations`.
    """
    config = small(folder, **options)
    count = 0

    def operation(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if name in OPERATIONS and str(arguments[0]).startswith(str(config.folder)):
            count += 1
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(operation)
    train(read_config(resume=config.folder) if resume else config)
    (config.output / "operations").write_text(str(count))
