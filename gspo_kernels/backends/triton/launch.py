"""Kernel launches. All launches of the library go through `launch`, so that `launches` can record them.

With meta tensors nothing is launched. So on a machine without a GPU, the same host code can record the kernels that an
H200 would run, to compile and count them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from .tuning import Config


class Launch(NamedTuple):
    """A recorded launch."""

    kernel: Any  # a Triton function
    arguments: dict[str, Any]  # by name, constants included
    config: Config
    programs: int


_listeners: list[list[Launch]] = []


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Record all launches inside this context in the list that it yields."""
    recorded: list[Launch] = []
    _listeners.append(recorded)
    try:
        yield recorded
    finally:
        _listeners[:] = [x for x in _listeners if x is not recorded]  # not `remove`: two lists may be equal


def launch(kernel: Any, programs: int, config: Config, **arguments: Any) -> Any:
    """Run `programs` programs of a kernel, unless its tensors are meta tensors.

    Returns:
        The compiled kernel, the same object for all launches that Triton does not distinguish. None if interpreted or
        if nothing runs.
    """
    for recorded in _listeners:
        recorded.append(Launch(kernel, arguments, config, programs))
    device = next(x for x in arguments.values() if isinstance(x, torch.Tensor)).device
    if device.type == "meta" or programs == 0:
        return None
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return kernel[(programs,)](**arguments, **launch_options(config))


def launch_options(config: Config) -> dict[str, Any]:
    """Triton's launch options. They set fused multiply-adds explicitly, because Triton's default changes."""
    return dict(num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True)
