"""Run a command that starts Ray, on a CPU."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def run_with_ray(
    command: list[str], folder: Path, variables: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, with `helpers` importable and `variables` added to the environment."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "timeout": timeout}
    # Ray makes sockets in its folder, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        return subprocess.run(command, env=os.environ | ours | variables | {"RAY_TMPDIR": short}, **options)
