"""Compile every kernel for GPUs that need not be present, and report registers, spills and instructions.

The host code runs on meta tensors, so the kernels are those that it would launch. Triton's JIT binds their arguments
(`binding.py`) and each variant is compiled once. The interpreter must be off in this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..backends.triton.launch import Launch, launches
from ..backends.triton.tuning import SAME_AS, SHARED_MEMORY, assume
from .binding import Variant, assume_driver, bind
from .compile_cases import SHAPES, SHARED_CASES, runs
from .machine_code import disassemble, epilogue_instructions, narrow_accesses, run_tool

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

    def faults(self, architecture: str, matrix: bool, dtype: torch.dtype, wide: bool) -> list[str]:
        """Describe faults: spills, too much shared memory, no matrix instruction, tf32 in fp32, narrow accesses.

        Args:
            matrix: whether the kernel computes matrix products.
            wide: whether the kernel must access memory in units of more than two bytes.
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
        if wide and self.narrow_accesses:
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
    """Compile every kernel variant that the library launches, each once; `progress` is called with (done, total).

    With `shape` (H, V), only the kernels of heads of that shape.
    """
    cases = list(runs(shape))
    if shape is None:
        cases += [(f"{case} {h},{v}", dtype, run) for h, v in SHAPES for case, dtype, run in runs((h, v), SHARED_CASES)]
    variants: dict[Any, Callable[[], Row]] = {}
    for architecture in architectures:
        with assume(architecture), assume_driver(architecture):
            for case, dtype, run in cases:
                with launches() as recorded:
                    run()
                for launch in recorded:
                    row = partial(_row, architecture, case, dtype, launch)
                    try:
                        variant = bind(launch)
                        variants.setdefault(id(variant), partial(row, variant))
                    except TypeError as error:
                        variants.setdefault(str(error), partial(row, error))
    rows: list[Row] = []
    with ThreadPoolExecutor() as pool:
        for row in pool.map(lambda compiled: compiled(), variants.values()):
            rows.append(row)
            if progress is not None:
                progress(len(rows), len(variants))
    return rows


def _row(architecture: str, case: str, dtype: torch.dtype, launch: Launch, variant: Variant | TypeError) -> Row:
    """Compile a variant and report it; or report the error of a launch that cannot be bound."""
    config, name = launch.config, launch.kernel.__name__
    shape = "x".join(str(x) for x in (config.block_n, config.block_v, config.block_h) if x)
    text = f"{shape} {config.warps}w {config.stages}s"
    try:
        if isinstance(variant, TypeError):
            raise variant
        report = inspect(variant.compile(), architecture, config.warps)
    except Exception as error:  # any exception of the compiler is this row's fault
        return Row(architecture, name, case, text, None, [f"{type(error).__name__}: {str(error).strip()[:300]}"])
    wide = name in (*MATRIX_KERNELS, "kept_tile") and _aligned(launch)
    faults = report.faults(architecture, name in MATRIX_KERNELS, dtype, wide)
    return Row(architecture, name, case, text, report, faults)


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
        total, by_threads = SHARED_MEMORY[architecture], 32 // warps
        by_registers = 512 // _round_up(registers, 8) * 4 // warps
        narrow, epilogue = len(re.findall(r"\b(?:global|buffer)_(?:load|store)_[su]?(?:short|byte)", text)), None
    else:
        text, counted = compiled.asm["ptx"], _COUNTED["cuda"]
        registers, spilled = _resources(compiled.asm["cubin"])
        like = SAME_AS.get(architecture, architecture)
        total, limit = {"sm_80": 167_936, "sm_89": 102_400}.get(like, 233_472), {"sm_89": 48}.get(like, 64)
        by_registers, by_threads = 65_536 // (_round_up(registers, 8) * 32 * warps), limit // warps
        shared += 1024
        narrow, epilogue = narrow_accesses(text), epilogue_instructions(disassemble(compiled.asm["cubin"]))
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
    """Return (registers per thread, bytes of stack frame), read by cuobjdump."""
    out = run_tool("cuobjdump", "-res-usage", cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert usage, out
    return int(usage[1]), int(usage[2])
