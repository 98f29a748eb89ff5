"""Every kernel launch of the library goes through here, so that what is launched can be listed.

`launches` records them; on meta tensors nothing runs. That is how the kernels that an H200 would run are compiled, and
counted, on a machine without a GPU: the same host code runs, and what it asks for is the list.
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
    """The launches made inside."""
    seen: list[Launch] = []
    _listeners.append(seen)
    try:
        yield seen
    finally:
        _listeners.remove(seen)


def launch(kernel: Any, programs: int, config: Config, **arguments: Any) -> None:
    """Run `programs` instances of a kernel."""
    for seen in _listeners:
        seen.append(Launch(kernel, arguments, config, programs))
    device = next(x for x in arguments.values() if isinstance(x, torch.Tensor)).device
    if device.type == "meta" or programs == 0:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](**arguments, num_warps=config.warps, num_stages=config.stages)
