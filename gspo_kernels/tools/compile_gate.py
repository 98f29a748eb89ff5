"""Compile every kernel for GPUs that need not be present, and report registers, spills and instructions.

The host code runs on meta tensors, so the kernels are those that it would launch. Each is specialised as Triton's JIT
would specialise it (divisibility by 16, strides of 1) and compiled. The interpreter must be off in this process.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.triton.launch import Launch, launches
from ..backends.triton.tuning import SAME_AS, SHARED_MEMORY, assume
from .compile_cases import runs
from .machine_code import disassemble, epilogue_instructions, narrow_accesses

_POINTEE = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1", torch.uint8: "u8",
}  # fmt: skip  # a table
# Counted in the assembly: matrix instructions, asynchronous copies, fp32 multiply-adds, and tf32, which must not occur.
_COUNTED = {
    "cuda": {
        "mma": r"\bmma\.sync",
        "wgmma": r"\bwgmma\.mma_async",
        "tcgen05": r"\btcgen05\.mma\b",
        "cp.async": r"\bcp\.async\.c[ag]\.shared\.global",
        "tma": r"\bcp\.async\.bulk\.tensor",
        "tf32": r"tf32",
        "fma": r"\bfma\.rn\.f(?:32|64)",
    },
    "hip": {"mfma": r"\bv_mfma_", "tf32": r"xf32", "fma": r"\bv_(?:pk_)?fma"},
}  # fmt: skip  # a table
# In kernels without a matrix product, ptxas spills a register to fit one more block. Bytes of stack that this takes:
ONE_REGISTER = 16
_MATRIX_UNIT = {"sm_80": "mma", "sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
_MATRIX_UNIT |= {name: _MATRIX_UNIT[other] for name, other in SAME_AS.items()}
MATRIX_KERNELS = ("forward_tile", "gradient_tile", "hidden_product", "weight_product")


@dataclass(frozen=True)
class Report:
    """Resources and instructions of one compiled kernel."""

    registers: int  # per thread
    spilled_bytes: int  # stack frame or scratch
    shared_bytes: int
    blocks_per_multiprocessor: int  # limited by registers, shared memory and threads; at least 1
    narrow_accesses: int  # loads and stores of global memory of at most two bytes
    epilogue: int | None  # instructions of a thread after the main loop, see `machine_code`; None if not known
    instructions: dict[str, int]  # counts by the names in `_COUNTED`

    def faults(self, architecture: str, matrix: bool, dtype: torch.dtype, aligned: bool) -> list[str]:
        """Describe faults: spills, too much shared memory, no matrix instruction, tf32 in fp32, narrow accesses.

        Args:
            matrix: whether the kernel computes matrix products.
            aligned: whether the rows of all matrices start at multiples of 16 bytes.
        """
        faults = []
        if self.spilled_bytes > (0 if matrix else ONE_REGISTER):
            faults.append(f"spills {self.spilled_bytes} bytes")
        if self.shared_bytes > SHARED_MEMORY[architecture]:
            faults.append(f"shared memory {self.shared_bytes} of {SHARED_MEMORY[architecture]} bytes")
        if self.instructions["tf32"] and dtype == torch.float32:
            faults.append("tf32 in an fp32 kernel")
        if matrix and dtype.itemsize == 2 and not self.instructions[_MATRIX_UNIT[architecture]]:
            faults.append(f"no {_MATRIX_UNIT[architecture]} instruction")
        if matrix and aligned and self.narrow_accesses:
            faults.append(f"{self.narrow_accesses} loads or stores of at most two bytes")
        return faults


class Row(NamedTuple):
    """One kernel of one case on one architecture."""

    architecture: str
    kernel: str
    case: str
    config: str
    report: Report | None  # None if it did not compile
    faults: list[str]


def survey(
    architectures: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
    shape: tuple[int, int] | None = None,
) -> list[Row]:
    """Compile every kernel variant that the library launches; `progress` is called with (done, total).

    With `shape` (H, V), only the kernels of heads of that shape.
    """
    variants: dict[Any, tuple[str, str, torch.dtype, Launch]] = {}
    for architecture in architectures:
        with assume(architecture):
            for case, dtype, run in runs(shape):
                with launches() as recorded:
                    run()
                for launch in recorded:
                    key = (architecture, launch.kernel.__name__, launch.config, str(specialise(launch)))
                    variants.setdefault(key, (architecture, case, dtype, launch))
    rows: list[Row] = []
    with ThreadPoolExecutor() as pool:
        for row in pool.map(lambda variant: _row(*variant), variants.values()):
            rows.append(row)
            if progress is not None:
                progress(len(rows), len(variants))
    return rows


def _row(architecture: str, case: str, dtype: torch.dtype, launch: Launch) -> Row:
    """Compile one variant and report it."""
    config, name = launch.config, launch.kernel.__name__
    shape = "x".join(str(x) for x in (config.block_n, config.block_v, config.block_h) if x)
    text = f"{shape} {config.warps}w {config.stages}s"
    try:
        report = inspect(compile_launch(launch, architecture), architecture, config.warps)
    except Exception as error:  # any exception of the compiler is this row's fault
        return Row(architecture, name, case, text, None, [f"{type(error).__name__}: {str(error).strip()[:300]}"])
    faults = report.faults(architecture, name in MATRIX_KERNELS, dtype, _aligned(launch))
    return Row(architecture, name, case, text, report, faults)


def target(architecture: str) -> GPUTarget:
    """Return Triton's target for an architecture such as "sm_90" or "gfx942"."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """Return (types by parameter, constants, parameters divisible by 16), as Triton's JIT specialises a launch."""
    signature, constants, divisible = {}, {}, []
    for parameter in launch.kernel.params:
        name, value = parameter.name, launch.arguments[parameter.name]
        kind = parameter.annotation_type
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_POINTEE[value.dtype]}"
            if value.is_meta or value.data_ptr() % 16 == 0:
                divisible.append(name)
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_POINTEE[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, float):
            signature[name] = kind or "fp32"
        elif value == 1 and not kind and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = kind or ("i32" if -(2**31) <= value < 2**31 else "i64")
            if value % 16 == 0 and not parameter.do_not_specialize:
                divisible.append(name)
    return signature, constants, tuple(divisible)


def compile_launch(launch: Launch, architecture: str) -> Any:
    """Compile the kernel of a launch for an architecture."""
    signature, constants, divisible = specialise(launch)
    index = {p.name: i for i, p in enumerate(launch.kernel.params)}
    source = ASTSource(
        launch.kernel,
        signature=signature,
        constexprs={(index[name],): value for name, value in constants.items()},
        attrs={(index[name],): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": launch.config.warps, "num_stages": launch.config.stages}
    return triton.compile(source, target=target(architecture), options=options)


def _aligned(launch: Launch) -> bool:
    """Return whether the rows of a launch's matrices start at multiples of 16 bytes."""
    matrices = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor) and x.ndim == 2]
    return all(x.stride(0) * x.itemsize % 16 == 0 for x in matrices)


def inspect(compiled: Any, architecture: str, warps: int) -> Report:
    """Return registers, spills, shared memory and instruction counts of a compiled kernel."""
    shared = compiled.metadata.shared
    if architecture.startswith("gfx"):
        text, counted = compiled.asm["amdgcn"], _COUNTED["hip"]
        usage = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.M)}
        registers, spilled = usage["vgpr_count"], usage["private_segment_fixed_size"]
        total, by_registers, by_threads = 65_536, 512 // _round_up(registers, 8) * 4 // warps, 32 // warps
        narrow, epilogue = len(re.findall(r"\b(?:global|buffer)_(?:load|store)_[su]?(?:short|byte)", text)), None
    else:
        text, counted = compiled.asm["ptx"], _COUNTED["cuda"]
        registers, spilled = _resources(compiled.asm["cubin"])
        like = SAME_AS.get(architecture, architecture)
        total, limit = {"sm_80": 167_936, "sm_89": 102_400}.get(like, 233_472), {"sm_89": 48}.get(like, 64)
        by_registers, by_threads = 65_536 // (_round_up(registers, 8) * 32 * warps), limit // warps
        shared += 1024
        sass = disassemble(compiled.asm["cubin"])
        narrow, epilogue = narrow_accesses(sass), epilogue_instructions(sass)
    blocks = _blocks_that_fit(by_registers, total, shared, by_threads)
    instructions = {name: len(re.findall(pattern, text)) for name, pattern in counted.items()}
    return Report(registers, spilled, compiled.metadata.shared, blocks, narrow, epilogue, instructions)


def _blocks_that_fit(by_registers: int, memory: int, per_block: int, by_threads: int) -> int:
    """Return the blocks per multiprocessor; `memory` is its shared memory and `per_block` what a block uses."""
    return max(min(by_registers, memory // max(per_block, 1), by_threads), 1)


def _round_up(x: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least x."""
    return -(-x // unit) * unit


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers per thread, bytes of stack frame), read by the disassembler that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert usage, out
    return int(usage[1]), int(usage[2])
