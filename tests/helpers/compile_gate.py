"""Compile every kernel for GPUs that need not be present, and report registers, spills and instructions.

The host code runs on meta tensors, so exactly the kernels that it would launch are compiled. Triton's JIT binds their
arguments (`binding.py`), and each variant is compiled once. The interpreter must be off in this process.

    cd tests && python -m helpers.compile_gate [--case bf16] [sm_90 ...]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from helpers.binding import Variant, assume_driver, bind
from helpers.compile_cases import SHAPES, runs
from triton import knobs

from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.backends.triton.tuning import ARCHITECTURES, SAME_AS, SHARED_MEMORY, assume

# The matrix instruction of each architecture, and its pattern in PTX or AMD's assembly.
_MATRIX_UNIT = {"sm_80": "mma", "sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
_MATRIX_UNIT |= {name: _MATRIX_UNIT[other] for name, other in SAME_AS.items()}
_PATTERNS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma\b",
    "mfma": r"\bv_mfma_",
}
MATRIX_KERNELS = ("forward_tile", "gradient_tile", "hidden_product", "weight_product")
# In kernels without a matrix product, ptxas may spill one register to fit one more block. This takes 16 bytes of stack.
ONE_REGISTER = 16
# Bytes that Triton 3.8 spills in the forward tile, in the branch for tiles that hold a target or end the vocabulary.
# Other tiles skip this branch (docs/limits.md).
SPILLED_BY_TRITON_3_8 = {"sm_100": 112, "sm_103": 112}


@dataclass(frozen=True)
class Report:
    """Resources and instructions of one compiled kernel."""

    registers: int  # per thread
    spilled_bytes: int  # stack frame or scratch
    shared_bytes: int
    narrow_accesses: int  # loads and stores of global memory of at most two bytes
    instructions: int | None  # without NOPs; None if nvdisasm does not know the architecture (Triton 3.6 and sm_103)
    matrix_instructions: int
    tf32: int  # mentions of TF32

    def faults(self, architecture: str, matrix: bool, dtype: torch.dtype, wide: bool, spills: int) -> list[str]:
        """List faults: spills, too much shared memory, no matrix instruction, tf32 in fp32, narrow accesses.

        Args:
            matrix: whether the kernel computes matrix products.
            wide: whether all memory accesses must move more than two bytes.
            spills: bytes that may be spilled.
        """
        faults = []
        if self.spilled_bytes > spills:
            faults.append(f"spills {self.spilled_bytes} bytes")
        if self.shared_bytes > SHARED_MEMORY[architecture]:
            faults.append(f"shared memory {self.shared_bytes} of {SHARED_MEMORY[architecture]} bytes")
        if self.tf32 and dtype == torch.float32:
            faults.append("tf32 in an fp32 kernel")
        if matrix and dtype.itemsize == 2 and not self.matrix_instructions:
            faults.append(f"no {_MATRIX_UNIT[architecture]} instruction")
        if wide and self.narrow_accesses:
            faults.append(f"{self.narrow_accesses} loads or stores of at most two bytes")
        return faults


class Row(NamedTuple):
    """A kernel, the case that launched it, and an architecture."""

    architecture: str
    kernel: str
    case: str
    config: str
    report: Report | None  # None if it did not compile
    faults: list[str]


def survey(architectures: Sequence[str], only: str | None = None) -> Iterator[Row]:
    """Compile each kernel variant that the library launches once. `only` names the one case to compile."""
    cases = [x for x in runs() if only in (None, x[0])]
    if only is None:
        cases += [(f"{case} {h},{v}", dtype, run) for h, v in SHAPES for case, dtype, run in runs((h, v))]
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
    with ThreadPoolExecutor() as pool:
        yield from pool.map(lambda compiled: compiled(), variants.values())


def _row(architecture: str, case: str, dtype: torch.dtype, launch: Launch, variant: Variant | TypeError) -> Row:
    """Compile and report a variant, or report why a launch could not be bound."""
    config = launch.config
    name = launch.kernel.__name__
    shape = "x".join(str(x) for x in (config.block_n, config.block_v, config.block_h) if x)
    text = f"{shape} {config.warps}w {config.stages}s"
    try:
        if isinstance(variant, TypeError):
            raise variant
        report = inspect(variant.compile(), architecture)
    except Exception as error:  # whatever the compiler raises is a fault of this row
        return Row(architecture, name, case, text, None, [f"{type(error).__name__}: {str(error).strip()[:300]}"])
    wide = name in (*MATRIX_KERNELS, "cached_tile", "multiply_pairs", "sum_pairs") and _aligned(launch)
    faults = report.faults(architecture, name in MATRIX_KERNELS, dtype, wide, spills_allowed(name, architecture))
    return Row(architecture, name, case, text, report, faults)


def spills_allowed(kernel: str, architecture: str) -> int:
    """Number of bytes that a kernel may spill with the installed Triton."""
    if kernel not in MATRIX_KERNELS:
        return ONE_REGISTER
    known = kernel == "forward_tile" and triton.__version__.startswith("3.8.")
    return SPILLED_BY_TRITON_3_8.get(architecture, 0) if known else 0


def _aligned(launch: Launch) -> bool:
    """True if the rows of all matrices of a launch start at multiples of 16 bytes."""
    matrices = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor) and x.ndim == 2]
    return all(x.stride(0) * x.itemsize % 16 == 0 for x in matrices)


def inspect(compiled: Any, architecture: str) -> Report:
    """Read resources from the compiled code, and count its instructions."""
    instructions: int | None
    if architecture.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        usage = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
        registers, spilled = usage["vgpr_count"], usage["private_segment_fixed_size"]
        narrow = r"\b(?:global|buffer)_(?:load|store)_[su]?(?:short|byte)"
        instruction = r"^\t(?:v|s|ds|global|buffer|flat|scratch)_(?!nop|code_end)"
        instructions = len(re.findall(instruction, text, re.MULTILINE))
    else:
        text = compiled.asm["ptx"]
        usage = _run_tool("cuobjdump", "-res-usage", compiled.asm["cubin"])
        resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert resources, usage
        registers, spilled = int(resources[1]), int(resources[2])
        narrow = r"\b(?:ld|st)\.global(?:\.(?!v\d)[\w:]+)*\.[bsu](?:8|16)\b"
        try:
            sass = _run_tool("nvdisasm", "-c", compiled.asm["cubin"])
            instructions = len(re.findall(r"^\s*/\*[0-9a-f]+\*/(?!\s+NOP\b)", sass, re.MULTILINE))
        except subprocess.CalledProcessError:
            instructions = None
    return Report(
        registers,
        spilled,
        shared_bytes=compiled.metadata.shared,
        narrow_accesses=len(re.findall(narrow, text)),
        instructions=instructions,
        matrix_instructions=len(re.findall(_PATTERNS[_MATRIX_UNIT[architecture]], text)),
        tf32=len(re.findall("xf32|tf32", text)),
    )


def _run_tool(name: str, option: str, cubin: bytes) -> str:
    """Run one of NVIDIA's binary tools, which come with Triton, on a compiled kernel. Return its output."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row of JSON for each kernel, and its faults on stderr. Return 1 if there are faults."""
    parser = argparse.ArgumentParser(prog="helpers.compile_gate", description="Compile the Triton kernels.")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--case", help="compile the kernels of one case of compile_cases.py, such as bf16")
    options = parser.parse_args(arguments)
    if unknown := set(options.architectures) - set(ARCHITECTURES):
        parser.error(f"unknown architecture: {', '.join(sorted(unknown))}")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so kernels are interpreted, not compiled: unset it")
    compiled = failed = 0
    for row in survey(options.architectures or ARCHITECTURES, options.case):
        compiled += 1
        failed += bool(row.faults)
        print(json.dumps([*row[:4], row.report and asdict(row.report), row.faults]), flush=True)
        if row.faults:
            print(f"{row.architecture} {row.kernel}, {row.case}: {'; '.join(row.faults)}", file=sys.stderr)
    print(f"{failed} of {compiled} kernels fail", file=sys.stderr)
    return int(failed > 0 or compiled == 0)


if __name__ == "__main__":
    sys.exit(main())
