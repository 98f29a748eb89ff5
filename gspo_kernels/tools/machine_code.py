"""Count instructions in NVIDIA code: accesses of two bytes (PTX), and the instructions after the main loop (SASS)."""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import triton

# A matrix instruction of tensor cores, or the multiply-adds of an fp32 or fp64 product.
_PRODUCT = re.compile(r"HGMMA|HMMA|UTCHMMA|DMMA")
_INSTRUCTION = re.compile(r"\s*(@!?U?P\w+\s+)?([A-Z][\w.]*)(?:\s+(.*))?;")


@dataclass
class _Block:
    """Instructions that run one after the other."""

    operations: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)  # labels of blocks that may follow
    falls_through: bool = True


def run_tool(name: str, option: str, cubin: bytes) -> str:
    """Run a binary tool of NVIDIA that comes with Triton on a compiled kernel; return what it prints."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def narrow_accesses(ptx: str) -> int:
    """Return how many loads and stores of global memory in PTX move at most two bytes per thread."""
    return len(re.findall(r"\b(?:ld|st)\.global(?:\.(?!v\d)[\w:]+)*\.[bsu](?:8|16)\b", ptx))


def disassemble(cubin: bytes) -> str:
    """Return a kernel's SASS, or "" if nvdisasm does not know the architecture (Triton 3.6 and sm_103)."""
    try:
        return run_tool("nvdisasm", "-c", cubin)
    except subprocess.CalledProcessError:
        return ""


def epilogue_instructions(sass: str) -> int | None:
    """Return the instructions of a thread after the main loop, on the shortest path to the end of the kernel.

    The main loop is the smallest loop with a matrix instruction. The shortest path leaves out branches that few tiles
    take, such as the one for tiles that hold a target. None for a kernel without such a loop.
    """
    names, blocks = _blocks(sass)
    place = {name: i for i, name in enumerate(names)}
    loops = []
    for end, block in enumerate(blocks):
        for target in block.targets:
            begin = place.get(target, end + 1)
            if begin <= end and any(_PRODUCT.match(x) for b in blocks[begin : end + 1] for x in b.operations):
                loops.append((sum(len(b.operations) for b in blocks[begin : end + 1]), begin, end))
    if not loops:
        return None
    _, begin, end = min(loops)
    # Dijkstra from the block after the loop.
    queue, done = [(0, end + 1)], set()
    while queue:
        length, i = heapq.heappop(queue)
        if i in done or i >= len(blocks):
            continue
        done.add(i)
        length += len(blocks[i].operations)
        if "EXIT" in blocks[i].operations[-1:]:
            return length
        following = [place[t] for t in blocks[i].targets if t in place]
        for j in following + [i + 1] * blocks[i].falls_through:
            if not begin <= j <= end:
                heapq.heappush(queue, (length, j))
    return None


def _blocks(sass: str) -> tuple[list[str], list[_Block]]:
    """Split SASS at labels and branches; return the blocks' labels ("" where there is none) and the blocks."""
    names, blocks = [""], [_Block()]
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            if blocks[-1].operations or names[-1]:
                names.append("")
                blocks.append(_Block())
            names[-1] = label[1]
            continue
        match = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if match is None:
            continue
        predicate, operation, operands = match.groups()
        blocks[-1].operations.append(operation if not predicate else f"{operation} if")
        if operation.startswith(("BRA", "EXIT")):
            blocks[-1].targets = re.findall(r"\.L_x_\d+", operands or "")
            blocks[-1].falls_through = predicate is not None or "UP" in (operands or "").split(",")[0]
            names.append("")
            blocks.append(_Block())
    return names, blocks
