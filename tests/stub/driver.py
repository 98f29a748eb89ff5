"""Launch kernels on a stub of the CUDA driver: Triton's JIT, C launcher and TMA encoder run, on CPU tensors.

`cu.c` is the stub. Kernels are compiled to PTX and not run, so the results are what `_write_results` writes.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.nvidia import compiler, driver
from triton.runtime.driver import driver as active
from triton.tools.tensor_descriptor import TensorDescriptor

from gspo_kernels.backends import dispatch, live_tiles
from gspo_kernels.backends.triton import gradient_rows, tuning
from gspo_kernels.backends.triton import launch as launching

SOURCE = Path(__file__).resolve().with_name("cu.c")
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""  # as Triton looks for it
# Bytes of shared memory that a block may use: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}


def environment() -> dict[str, str]:
    """Return the environment of a process that compiles kernels instead of interpreting them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parent.parent
    folders = [kept.get("PYTHONPATH", ""), str(tests), str(tests.parent)]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}


class Stub:
    """The stub library, and Triton's driver on it. There is one per process."""

    def __init__(self, architecture: str, folder: Path) -> None:
        """Build the library in `folder`, and make it this process's libcuda.so.1. Keep compiled kernels there, too."""
        folder.mkdir(parents=True, exist_ok=True)
        library, include = folder / "libcuda.so.1", Path(driver.__file__).parent / "include"
        built = library.with_suffix(f".{os.getpid()}")
        command = [COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-I", include, "-o", built, SOURCE]
        subprocess.run(command, check=True)
        built.replace(library)  # another process may have loaded it
        # The loader finds a library that is already loaded by its soname.
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.capturing, self.kernels = self.number("stub_capturing"), set[Any]()
        self.number("stub_shared_memory").value = SHARED_MEMORY[architecture]
        os.environ |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
        capability = divmod(int(architecture.removeprefix("sm_")), 10)

        # Kernels are not run, so assembling them would only take time. The compile gate does that.
        backend: Any = compiler.CUDABackend
        backend.make_cubin = lambda self, ptx, *_: ptx.encode()
        triton_driver: Any = driver.CudaDriver.__new__(driver.CudaDriver)  # its __init__ asks torch.cuda
        triton_driver.utils, triton_driver.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
        triton_driver.get_current_device = triton_driver.get_current_stream = lambda *device: 0
        triton_driver.get_device_capability = lambda *device: capability
        self.utils: Any = triton_driver.utils
        active.set_active(triton_driver)
        backends: Any = dispatch
        backends._triton_obstacle = lambda device: None
        tuning._assumed = architecture
        self._replace_everywhere(launching.launch, self._launch)
        self._replace_everywhere(gradient_rows.may_read, lambda x: not x.is_meta and not self.capturing.value)
        # Outside a capture, cells are computed even for the small heads of these cases.
        live_tiles.break_even = lambda width, device: 0.0 if self.capturing.value else math.inf

    def number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self.library, name)

    def counts(self) -> dict[str, int]:
        """Return the numbers of modules, descriptors and launches so far."""
        names = ("modules", "descriptors", "launches")
        return {name: ctypes.c_long.in_dll(self.library, f"stub_{name}").value for name in names}

    def forget_kernels(self) -> None:
        """Let the JIT load all kernels anew."""
        for kernel in self.kernels:
            kernel.device_caches.clear()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Refuse to load kernels, as during the capture of a CUDA graph."""
        self.capturing.value = 1
        try:
            yield
        finally:
            self.capturing.value = 0

    def _replace_everywhere(self, function: Any, other: Any) -> None:
        for module in [m for name, m in sys.modules.items() if name.startswith("gspo_kernels")]:
            if vars(module).get(function.__name__) is function:
                setattr(module, function.__name__, other)

    def _launch(self, kernel: Any, programs: int, config: tuning.Config, **arguments: Any) -> Any:
        """Launch, compare what the driver received with the arguments, and write results for the host to read."""
        before = self.counts()["launches"]
        self.kernels.add(kernel)
        variant = LAUNCH(kernel, programs, config, **arguments)
        if self.counts()["launches"] > before:
            expected = list(_values(kernel, arguments))
            received = self.received()
            assert received[: len(expected)] == expected, f"{kernel.__name__}: {received}, expected {expected}"
            assert received[len(expected) :] == [(8, 0)] * 2, f"{kernel.__name__}: scratch memory {received}"
        _write_results(kernel.__name__, arguments)
        return variant

    def received(self) -> list[tuple[int, int]]:
        """Return the size in bytes and the value of each parameter of the last launch."""
        n = self.number("stub_count").value
        sizes = (ctypes.c_int * n).in_dll(self.library, "stub_size")
        return list(zip(sizes, (ctypes.c_uint64 * n).in_dll(self.library, "stub_value"), strict=True))


LAUNCH = launching.launch
_BYTES = {"i32": 4, "i64": 8}


def _values(kernel: Any, arguments: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the size and the value of the parameters that the driver must receive, in order."""
    for parameter in kernel.params:
        x = arguments[parameter.name]
        kind = parameter.annotation_type
        is_constant_one = type(x) is int and x == 1 and not kind and not parameter.do_not_specialize
        if parameter.is_constexpr or x is None or is_constant_one:
            continue
        if isinstance(x, TensorDescriptor):
            yield 128, x.base.data_ptr()
            yield from ((4, size) for size in x.shape)
            yield from ((8, stride) for stride in x.strides)
        elif isinstance(x, Tensor):
            yield 8, x.data_ptr()
        elif isinstance(x, float):
            yield 8, int.from_bytes(struct.pack("<d", x), "little")
        else:
            yield _BYTES[kind or "i32"], x


def _write_results(kernel: str, arguments: dict[str, Any]) -> None:
    """Write what the host reads, as after a usual batch: some rows without a gradient, and some cells to compute."""
    if kernel == "reduce_rows":
        for name in ("log_probs", "shift", "log_total"):
            arguments[name].fill_(-1.0)
        if arguments["HAS_TILE_MASS"]:  # light cells, except those with a target
            arguments["tile_mass"].fill_(1e-6)
            arguments["place"].copy_(torch.arange(len(arguments["place"])))
    if kernel == "sequence_loss":
        coefficient = arguments["coefficient"].fill_(1e-3)
        coefficient[: len(coefficient) // 3] = 0
