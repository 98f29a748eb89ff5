"""Run `python -m gspo_kernels.benchmarks gpu --in-process` as on a GPU, with CPU tensors on the stub driver.

`PYTHONPATH=tests:. python -m stub.benchmark A --tiny` takes the command's options. Times are invented, and results of
kernels are wrong. Implementations that choose their backend by the device run on the CPU.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode

from gspo_kernels.benchmarks.candidates import ALL
from gspo_kernels.benchmarks.gpu import command, times, tune

from .cases import BUILD
from .driver import Stub

CPU = torch.device("cpu")
LARGEST = 2**20  # elements of a dimension of random tensors


class OnCpu(TorchFunctionMode):
    """Make tensors on the CPU where "cuda" is asked for, and shorten huge ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def replaced(x: Any) -> Any:
            return (
                CPU if (isinstance(x, str) and x == "cuda") or (isinstance(x, torch.device) and x.type == "cuda") else x
            )

        if func is torch.device:
            return func(*args, **kwargs or {})
        if func is torch.randn:
            shape = args[0] if isinstance(args[0], tuple) else args
            args = (tuple(min(size, LARGEST) for size in shape),)
        return func(*map(replaced, args), **{name: replaced(x) for name, x in (kwargs or {}).items()})


class CpuGenerator(torch.Generator):
    """A generator on the CPU, whatever the device."""

    def __new__(cls, *device: Any) -> CpuGenerator:
        return super().__new__(cls)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1e3  # milliseconds: so slow that little is repeated


class CUDAGraph:
    def replay(self) -> None: ...


def pretend(stub: Stub) -> AbstractContextManager[object]:
    """Return a context in which torch.cuda seems to have a GPU."""
    # PyTorch's own check of a device is kept: `torch.cuda.set_device` refuses one without an index.
    patches: dict[Any, dict[str, Any]] = {
        torch: dict(Generator=CpuGenerator),
        torch._C: dict(_cuda_setDevice=lambda index: None),
        torch.cuda: dict(
            is_available=lambda: True,
            get_device_name=lambda *_: "NVIDIA H200",
            get_device_properties=lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=2**37),
            synchronize=lambda *_: None,
            Event=Event,
            CUDAGraph=CUDAGraph,
            graph=lambda graph: stub.capture(),
        ),
        times: dict(ALL={name: x for name, x in ALL.items() if x.against in ("naive", "ours")}),
        tune: dict(SHAPES_PER_BATCH=2, REFINED=1),
    }
    stack = ExitStack()
    for module, values in patches.items():
        for name, value in values.items():
            stack.enter_context(patch.object(module, name, value, create=True))
    stack.enter_context(OnCpu())
    return stack


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.argv.append("--in-process")
    with pretend(Stub("sm_90", BUILD / triton.__version__)):
        sys.exit(command.main())
