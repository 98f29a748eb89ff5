"""Every kernel launch of the library goes through here, so that launches can be listed.

`launches` records them; on meta tensors nothing runs. So the kernels that an H200 would run can be compiled and counted
on a machine without a GPU: the same host code runs on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from .tuning import Config


class Launch(NamedTuple):
    kernel: Any  # a Triton function
    arguments: dict[str, Any]  # by name, constants too
    config: Config
    programs: int


_listeners: list[list[Launch]] = []


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Record the launches made inside."""
    seen: list[Launch] = []
    _listeners.append(seen)
    try:
        yield seen
    finally:
        _listeners[:] = [x for x in _listeners if x is not seen]  # by identity: two lists may be equal


def launch(kernel: Any, programs: int, config: Config, **arguments: Any) -> None:
    """Run `programs` programs of a kernel, unless its tensors are meta tensors."""
    for seen in _listeners:
        seen.append(Launch(kernel, arguments, config, programs))
    device = next(x for x in arguments.values() if isinstance(x, torch.Tensor)).device
    if device.type == "meta" or programs == 0:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](**arguments, num_warps=config.warps, num_stages=config.stages)
