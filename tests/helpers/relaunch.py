"""Launch a recorded kernel again with other arguments."""

from __future__ import annotations

from typing import Any

from gspo_kernels.backends.triton import launch


def relaunch(seen: list[launch.Launch], name: str, **changes: Any) -> None:
    """A recorded launch once more, some of its arguments others."""
    old = next(x for x in seen if x.kernel.__name__ == name)
    launch.launch(old.kernel, old.programs, old.config, **{**old.arguments, **changes})
