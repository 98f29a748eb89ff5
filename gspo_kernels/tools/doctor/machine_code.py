"""Count registers, spills, narrow accesses and instructions in the code of a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton


class Counts(NamedTuple):
    registers: int  # per thread
    spilled_bytes: int  # stack frame or scratch
    narrow_accesses: int  # loads and stores of global memory of at most two bytes
    instructions: int | None  # None if nvdisasm does not know the architecture (Triton 3.6 and sm_103)


def count_nvidia(ptx: str, cubin: bytes) -> Counts:
    usage = _run_tool("cuobjdump", "-res-usage", cubin)
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources, usage
    try:
        instructions = count_sass(_run_tool("nvdisasm", "-c", cubin))
    except subprocess.CalledProcessError:
        instructions = None
    return Counts(int(resources[1]), int(resources[2]), narrow_accesses(ptx), instructions)


def count_amd(assembly: str) -> Counts:
    usage = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    narrow = re.findall(r"\b(?:global|buffer)_(?:load|store)_[su]?(?:short|byte)", assembly)
    instructions = re.findall(r"^\t(?:v|s|ds|global|buffer|flat|scratch)_(?!nop|code_end)", assembly, re.MULTILINE)
    return Counts(usage["vgpr_count"], usage["private_segment_fixed_size"], len(narrow), len(instructions))


def count_sass(sass: str) -> int:
    """Count all instructions except NOPs, which pad the end of a kernel."""
    return len(re.findall(r"^\s*/\*[0-9a-f]+\*/(?!\s+NOP\b)", sass, re.MULTILINE))


def narrow_accesses(ptx: str) -> int:
    """Count loads and stores of global memory that move at most two bytes per thread."""
    return len(re.findall(r"\b(?:ld|st)\.global(?:\.(?!v\d)[\w:]+)*\.[bsu](?:8|16)\b", ptx))


def _run_tool(name: str, option: str, cubin: bytes) -> str:
    """Run one of NVIDIA's binary tools, which come with Triton, on a compiled kernel. Return its output."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout
