"""Kernels compiled for GPUs that are not here, and what the compiler made of them.

The host code runs on meta tensors, so the list of kernels is the list it would launch; each is then specialised as
Triton's JIT would (divisibility by 16, strides of 1) and compiled. The interpreter must be off in this process.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from ..layout import HeadRows, PolicyRows
from ..objective import Objective
from .backward import head_backward
from .cell_backward import Plan, cell_backward, parts_of
from .forward import forward_with_shares, head_forward
from .launch import Launch, launches
from .logit_tile import straighten
from .sequence import policy_forward
from .tuning import SHARED_MEMORY, assume, tile_config
from .upstream import make_upstream

_POINTEE = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1", torch.uint8: "u8",
}  # fmt: skip
# What is counted in the assembly: matrix instructions, asynchronous copies, and what must not be there.
_COUNTED = {
    "cuda": {
        "mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma\b",
        "cp.async": r"\bcp\.async\.c[ag]\.shared\.global", "tma": r"\bcp\.async\.bulk\.tensor", "tf32": r"tf32",
        "fma": r"\bfma\.rn\.f(?:32|64)",
    },
    "hip": {"mfma": r"\bv_mfma_", "tf32": r"xf32", "fma": r"\bv_(?:pk_)?fma"},
}  # fmt: skip
# In kernels without a matrix product ptxas spills a register to fit one more block: bytes of the stack that that takes.
ONE_REGISTER = 16
MATRIX_KERNELS = ("forward_tile", "gradient_tile", "hidden_product", "weight_product")

# What is compiled: names of heads, and what they have beyond hidden states and weights of Qwen3-8B's shape.
_TAIL = dict(bias=True, logit_softcap=30.0, temperature=True)
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16 entropy": dict(entropy=True),
    "bf16 temperature": dict(entropy=True, temperature=True),
    "bf16 tail": dict(entropy=True, **_TAIL),
    "bf16 adapter": dict(rank=64),
    "bf16 everything": dict(entropy=True, rank=64, **_TAIL),
    "bf16 ragged": dict(width=2881, vocab=50_257),
    "fp16": dict(dtype=torch.float16),
    "fp16 everything": dict(dtype=torch.float16, entropy=True, rank=64, **_TAIL),
    "fp32": dict(dtype=torch.float32),
    "fp32 everything": dict(dtype=torch.float32, entropy=True, rank=64, **_TAIL),
    "fp64": dict(dtype=torch.float64),
    "fp64 everything": dict(dtype=torch.float64, entropy=True, rank=64, **_TAIL),
}
# ... whose backward computes some of the tiles.
CELL_CASES: dict[str, dict[str, Any]] = {
    "bf16 cells": {},
    "bf16 cells tail": dict(logit_softcap=30.0, temperature=True),
    "fp16 cells": dict(dtype=torch.float16),
    "fp32 cells": dict(dtype=torch.float32),
    "fp64 cells": dict(dtype=torch.float64),
}
OBJECTIVES: dict[str, Objective] = {
    "gspo": Objective(),
    "gspo everything": Objective(kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.1, dual_clip=3.0),
    "grpo everything": Objective(ratio="token", kl_coef=0.1, entropy_coef=0.1, aggregation="token-mean", delta=2.0),
    "gmpo": Objective(surrogate="gmpo", kl_coef=0.1),
    "cispo": Objective(ratio="token", surrogate="cispo", kl_coef=0.1, kl_estimator="unbiased"),
    "sapo": Objective(ratio="token", surrogate="sapo", kl_coef=0.1, kl_estimator="k3+"),
}


@dataclass(frozen=True)
class Report:
    """What one compiled kernel needs and contains."""

    registers: int
    spilled_bytes: int  # stack frame or scratch
    shared_bytes: int
    blocks_per_multiprocessor: int  # by registers, shared memory and threads; one block per multiprocessor at least
    instructions: dict[str, int]  # counts of the interesting ones

    def faults(self, architecture: str, matrix: bool, dtype: torch.dtype) -> list[str]:
        """What must not be, in words."""
        found = []
        if self.spilled_bytes > (0 if matrix else ONE_REGISTER):
            found.append(f"spills {self.spilled_bytes} bytes")
        if self.shared_bytes > SHARED_MEMORY[architecture]:
            found.append(f"shared memory {self.shared_bytes} of {SHARED_MEMORY[architecture]} bytes")
        if self.instructions["tf32"] and dtype == torch.float32:
            found.append("tf32 in an fp32 kernel")
        expected = {"sm_80": "mma", "sm_89": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
        if matrix and dtype.itemsize == 2 and not self.instructions[expected[architecture]]:
            found.append(f"no {expected[architecture]} instruction")
        return found


class Row(NamedTuple):
    """One kernel of one case on one architecture."""

    architecture: str
    kernel: str
    case: str
    config: str
    report: Report | None  # None if it did not compile
    faults: list[str]


def survey(architectures: Sequence[str], progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """Compile everything that the library would launch; `progress` is told (done, of how many)."""
    work: dict[Any, tuple[str, str, torch.dtype, Launch]] = {}
    for architecture in architectures:
        with assume(architecture):
            for case, dtype, run in _runs():
                with launches() as seen:
                    run()
                for launch in seen:
                    key = (architecture, launch.kernel.__name__, launch.config, str(specialise(launch)))
                    work.setdefault(key, (architecture, case, dtype, launch))
    rows: list[Row] = []
    with ThreadPoolExecutor() as pool:
        for row in pool.map(lambda item: _row(*item), work.values()):
            rows.append(row)
            if progress is not None:
                progress(len(rows), len(work))
    return rows


def _row(architecture: str, case: str, dtype: torch.dtype, launch: Launch) -> Row:
    config, name = launch.config, launch.kernel.__name__
    shape = "x".join(str(x) for x in (config.block_n, config.block_v, config.block_h) if x)
    text = f"{shape} {config.warps}w {config.stages}s"
    try:
        report = inspect(compile_launch(launch, architecture), architecture, config.warps)
    except Exception as error:  # whatever the compiler throws is this row's finding
        return Row(architecture, name, case, text, None, [f"{type(error).__name__}: {str(error).strip()[:300]}"])
    faults = report.faults(architecture, name in MATRIX_KERNELS, dtype)
    return Row(architecture, name, case, text, report, faults)


def _runs() -> Iterator[tuple[str, torch.dtype, Callable[[], object]]]:
    """(name, dtype, host call on meta tensors) of every case."""
    for name, options in CASES.items():
        head = _head(**options)
        yield name, head.hidden.dtype, lambda head=head: _both_passes(head)
    for name, options in CELL_CASES.items():
        head = _head(**options)
        yield name, head.hidden.dtype, lambda head=head: _live_cells(head)
    for name, objective in OBJECTIVES.items():
        for dtype in (torch.float32, torch.float64):
            yield f"{name} {_POINTEE[dtype]}", dtype, lambda objective=objective, dtype=dtype: _loss(objective, dtype)


def _head(
    dtype: torch.dtype = torch.bfloat16, rows: int = 8192, width: int = 4096, vocab: int = 151_936, rank: int = 0,
    bias: bool = False, temperature: bool = False, logit_softcap: float | None = None, entropy: bool = False,
) -> HeadRows:  # fmt: skip
    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return HeadRows(
        empty(rows, width), empty(vocab, width), empty(vocab) if bias else None,
        empty(rows, rank, of=wide) if rank else None, empty(vocab, rank, of=wide) if rank else None,
        empty(rows, of=torch.int64), empty(rows, of=torch.bool), empty(rows, of=wide) if temperature else None,
        1.0, logit_softcap, vocab, entropy,
    )  # fmt: skip


def _both_passes(head: HeadRows) -> None:
    result = head_forward(head)
    d_entropy = torch.empty_like(result.entropy) if head.entropy else None
    needs = (True, True, head.bias is not None, head.adapter_hidden is not None, head.adapter_weight is not None)
    head_backward(head, result, torch.empty_like(result.log_probs), d_entropy, needs)


def _live_cells(head: HeadRows) -> None:
    """The backward of a list of cells: of all of them."""
    result, tiles = forward_with_shares(head, wanted=True)
    assert tiles is not None
    config, device = tile_config(head, "gradient"), head.hidden.device
    blocks, columns = -(-head.hidden.shape[0] // tiles.block_rows), tiles.share.shape[0]
    lists, width, chunk = parts_of(head, torch.ones(blocks, columns, dtype=torch.bool, device=device), config)
    slabs, chunks = lists.first.shape
    of_slab, of_chunk = width // config.block_v, chunk // config.block_n
    counts = [
        [min(of_slab, columns - s * of_slab) * min(of_chunk, blocks - c * of_chunk) for c in range(chunks)]
        for s in range(slabs)
    ]
    order = torch.arange(head.hidden.shape[0], device=device)
    up = make_upstream(straighten(head, config), result, torch.ones_like(result.log_probs), None, order, False)
    cell_backward(up, head.vocab_size, config, (True, True), Plan(len(order), True, lists, counts, width, chunk))


def _loss(objective: Objective, dtype: torch.dtype, rows: int = 8192, sequences: int = 16) -> None:
    per_row = torch.empty(rows, dtype=dtype, device="meta")
    offsets = torch.empty(sequences + 1, dtype=torch.int64, device="meta")
    ref = weights = per_row if objective.kl_coef else None
    policy = PolicyRows(offsets, per_row, per_row, ref, weights, None, None)
    policy_forward(per_row, per_row if objective.entropy_coef else None, per_row > 0, policy, objective)


def target(architecture: str) -> GPUTarget:
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def specialise(launch: Launch) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """(types by parameter, constants, parameters divisible by 16): the key under which Triton's JIT would compile."""
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
    """The compiled kernel of a launch, for an architecture."""
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


def inspect(compiled: Any, architecture: str, warps: int) -> Report:
    """Registers, spills, shared memory and instruction counts of a compiled kernel."""
    if architecture.startswith("gfx"):
        text, counted = compiled.asm["amdgcn"], _COUNTED["hip"]
        usage = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)\s*$", text, re.M)}
        registers, spilled = usage["vgpr_count"], usage["private_segment_fixed_size"]
        blocks = _fit(512 // _up(registers, 8) * 4 // warps, 65_536, compiled.metadata.shared, 32 // warps)
    else:
        text, counted = compiled.asm["ptx"], _COUNTED["cuda"]
        registers, spilled = _resources(compiled.asm["cubin"])
        total = {"sm_80": 167_936, "sm_89": 102_400}.get(architecture, 233_472)
        limit = {"sm_89": 48}.get(architecture, 64)
        blocks = _fit(
            65_536 // (_up(registers, 8) * 32 * warps), total, compiled.metadata.shared + 1024, limit // warps
        )
    return Report(
        registers, spilled, compiled.metadata.shared, blocks,
        {name: len(re.findall(pattern, text)) for name, pattern in counted.items()},
    )  # fmt: skip


def _fit(by_registers: int, memory: int, per_block: int, by_threads: int) -> int:
    return max(min(by_registers, memory // max(per_block, 1), by_threads), 1)


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of stack frame) by the disassembler that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found, out
    return int(found[1]), int(found[2])
