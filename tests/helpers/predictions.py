"""Predict the times of kernels and steps on GPUs from counted operations, bytes and instructions. Nothing is timed.

    PYTHONPATH=tests python -m helpers.predictions    rewrites benchmarks/results/prediction-gpu.json

The host code runs on meta tensors, which records its launches, matrix products and other operations. A kernel takes as
long as its bytes, or as its products on tensor cores and the instructions after its main loop, whichever is longer.
The instructions are those of `golden_kernels.json`. The rates and assumptions are the constants below.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_kernels import Objective
from gspo_kernels.backends.live_tiles import ESTIMATED_EFFICIENCY
from gspo_kernels.backends.triton import backward, cells, forward
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.backends.triton.tuning import assume
from gspo_kernels.benchmarks.gpu.command import PREDICTION
from gspo_kernels.benchmarks.gpu.times import BOTH, FULL, PRODUCTS, SHAPES, SHARES, Shape, selected
from gspo_kernels.benchmarks.measure import Record, formatted, jsonable
from gspo_kernels.tools import compile_cases

from .costs import TESTS


class Chip(NamedTuple):
    architecture: str
    peak: float  # TFLOP/s of tensor cores, dense bf16
    bandwidth: float  # TB/s
    multiprocessors: int
    operations: int  # of the tensor cores of a multiprocessor, per cycle
    lanes: int  # threads of a multiprocessor that execute an instruction, per cycle
    exponentials: int  # of a multiprocessor, per cycle
    vendor: float  # assumed: share of the peak that the vendor's matrix products reach
    widened: float = 0.0  # TFLOP/s of fp32 products, if `add_product` widens bf16 operands

    @property
    def clock(self) -> float:
        """Return the cycles per second at which the tensor cores reach the peak."""
        return self.peak * 1e12 / (self.multiprocessors * self.operations)


# Peaks, bandwidths and numbers of multiprocessors are published by the vendors: NVIDIA's datasheets of H200 SXM (1,979
# TFLOP/s with sparsity, 4.8 TB/s) and HGX B200 (4.5 PFLOP/s with sparsity, 8 TB/s), and AMD's of Instinct MI300X
# (1,307.4 TFLOP/s, 163.4 in fp32, 5.3 TB/s). Rates per cycle: the CUDA C++ Programming Guide's table of arithmetic
# instructions, and AMD's CDNA 3 white paper.
CHIPS = {
    "H200": Chip("sm_90", 989.5, 4.8, 132, 4096, 128, 16, vendor=0.80),
    "B200": Chip("sm_100", 2250.0, 8.0, 148, 8192, 128, 16, vendor=0.75),
    "MI300X": Chip("gfx942", 1307.4, 5.3, 304, 2048, 64, 16, vendor=0.50, widened=163.4),
}
# The other assumptions. A program runs alone on its multiprocessor, unless two fit. All programs take equally long.
MAIN_LOOP = 0.95  # speed of the main loop of a tile, relative to the vendor's products
CELLS = ESTIMATED_EFFICIENCY  # the same for products of cells
BANDWIDTH = 0.90  # share of the bandwidth that a kernel reaches
LATENCY = 3e-6  # seconds of every kernel in addition
COUNTED_AS = {"gfx942": "sm_90"}  # AMD's kernels have the instructions of Hopper's, per element
LIVE = 1 - sum(FULL.roles[1:]) / FULL.roles[0]  # share of the rows of an RL-like batch that have a gradient


class Operations(TorchDispatchMode):
    """Record the bytes that operations on meta tensors would read and write. Views and allocations move none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = tree_leaves(out if "zeros" in name else (args, kwargs, out))
        size = sum(x.nbytes for x in leaves if isinstance(x, Tensor) and x.is_meta)
        if size and not func.is_view and "empty" not in name:
            self.bytes.append(size)
        return out


def seconds_of(chip: Chip, run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of host code on meta tensors: of each kernel, the vendor's products and other operations."""
    seconds: dict[str, float] = defaultdict(float)

    def product(out: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:  # it does nothing on meta tensors
        wide = out.dtype == torch.float32
        peak = chip.widened if wide and chip.widened else chip.peak
        size = a.nbytes + b.nbytes + (1 + (wide and not first)) * out.nbytes
        seconds["vendor's products"] += longer(chip, 2.0 * a.numel() * b.shape[1] / (chip.vendor * peak * 1e12), size)

    products = patch.multiple(backward, add_product=product, write_product=product)
    unlisted = patch.object(cells, "launch")  # the choice of cells is not on meta tensors
    with assume(chip.architecture), products, unlisted, launches() as seen, Operations() as others:
        run()
    for x in seen:
        seconds[f"kernel {x.kernel.__name__}"] += launch_seconds(chip, x)
    seconds["other operations"] += sum(longer(chip, 0.0, size) for size in others.bytes)
    return seconds


def longer(chip: Chip, seconds: float, size: float) -> float:
    """Return the seconds of a kernel that computes for `seconds` and moves `size` bytes."""
    return max(seconds, size / (BANDWIDTH * chip.bandwidth * 1e12)) + LATENCY


def launch_seconds(chip: Chip, x: Launch) -> float:
    operations, size = work_of(x)
    tile = x.kernel.__name__.endswith("_tile")
    if not operations:
        return longer(chip, 0.0, size)
    elements = x.config.block_n * x.config.block_v
    instructions, blocks = compiled(x, chip.architecture)
    share = chip.vendor * (MAIN_LOOP if tile else CELLS)
    loop = operations / x.programs / (share * chip.operations)  # cycles of a program
    after = max(instructions * elements / chip.lanes, tile * elements / chip.exponentials)
    # If two blocks fit a multiprocessor, one computes products while the other executes the instructions after them.
    cycles = math.ceil(x.programs / chip.multiprocessors) * (loop + after if blocks == 1 else max(loop, after))
    return longer(chip, cycles / chip.clock, size)


def work_of(x: Launch) -> tuple[float, int]:
    """Return the operations of a launch on tensor cores, and the bytes that it reads and writes."""
    tensors: Record = {name: getattr(value, "base", value) for name, value in x.arguments.items()}
    name = x.kernel.__name__
    config = x.config
    d_logits = tensors.get("d_logits")
    if name in ("hidden_product", "weight_product"):
        operand = tensors["hidden"].nbytes if "hidden" in tensors else 0  # how much of the weight is not known
        written = (1 + x.arguments["ADD"]) * tensors["out"].nbytes
        return 2.0 * d_logits.numel() * x.arguments["width"], d_logits.nbytes + operand + written
    if name not in ("forward_tile", "gradient_tile"):
        return 0.0, sum(t.nbytes for t in tensors.values() if isinstance(t, Tensor))
    hidden = tensors["hidden"]
    columns = x.arguments["column_blocks"] * config.block_v
    groups = 1 if tensors.get("by_tile") is not None else -(-len(hidden) // (config.block_n * config.group))
    head = groups * columns * hidden.shape[1] * hidden.itemsize  # each group of row blocks reads it once
    out = tensors["tile_top"].nbytes + tensors["tile_mass"].nbytes if d_logits is None else d_logits.nbytes
    return 2.0 * x.programs * config.block_n * config.block_v * hidden.shape[1], hidden.nbytes + head + out


@functools.cache
def golden() -> Record:
    return json.loads((TESTS / "backends" / "golden_kernels.json").read_text())["kernels"]


def compiled(x: Launch, architecture: str) -> tuple[float, int]:
    """Return the instructions of threads after a kernel's main loop, per element, and the blocks per multiprocessor."""
    sparse = x.kernel.__name__.endswith("_product") or x.arguments.get("by_tile") is not None
    c = x.config

    def report(architecture: str, ending: str) -> tuple[str, Record]:
        cases = ("bf16 cells", "bf16") if sparse else ("bf16",)  # AMD's exact backward launches the kernels of cells
        for start in (f"{architecture} | {x.kernel.__name__} | {case} | " for case in cases):
            for key, row in golden().items():
                if key.startswith(start) and key.endswith(ending):
                    return key, row
        raise AssertionError(f"the golden file has no {cases} of {architecture} {x.kernel.__name__} ...{ending}")

    _, here = report(architecture, f" {c.block_n}x{c.block_v}x{c.block_h} {c.warps}w {c.stages}s")
    key, counted = report(COUNTED_AS.get(architecture, architecture), "s")
    rows, columns, warps = map(int, re.findall(r"(\d+)x(\d+)x\d+ (\d+)w", key)[0])
    return counted["epilogue"] * 32 * warps / (rows * columns), here["blocks_per_multiprocessor"]


def step(chip: Chip, shape: Shape, live: float, share: float | None = None) -> dict[str, float]:
    """Return the seconds of a step if a share `live` of the rows has a gradient, and those of its parts.

    With `share`, return those of the backward of this share of the cells.
    """
    head = compile_cases.meta_head(rows=shape.rows, width=shape.width, vocab=shape.vocab)

    def run_forward() -> None:
        forward.head_forward(head)
        compile_cases.loss(Objective(), torch.float32, shape.rows, FULL.roles[0])

    with assume(chip.architecture):
        result = forward.head_forward(head)
        choice = selected(head, round(live * shape.rows), share, "cpu")
    d_log_probs = torch.empty_like(result.log_probs)
    first = seconds_of(chip, run_forward) if share is None else {}
    last = seconds_of(chip, lambda: backward.head_backward(head, result, d_log_probs, None, BOTH, choice))
    parts = {name: first.get(name, 0.0) + last.get(name, 0.0) for name in dict.fromkeys((*first, *last))}
    totals = {"ours forward": sum(first.values()), "ours both": sum(parts.values())} if share is None else {}
    return {**totals, "ours backward": sum(last.values()), **parts}


def predictions() -> list[Record]:
    """Return a record per shape, batch and kernel, with milliseconds by GPU."""
    batches = {"dense": (1.0, None), "rl-like": (LIVE, None)}
    batches |= {f"cells {share:g}": (1.0, share) for share in SHARES}
    records = []
    for name, shape in SHAPES.items():
        vendor = {chip: shape.operations / (x.vendor * x.peak * 1e12) for chip, x in CHIPS.items()}
        steps = {"": {chip: {f"vendor {what}": seconds for what in PRODUCTS} for chip, seconds in vendor.items()}}
        steps |= {b: {chip: step(x, shape, *how) for chip, x in CHIPS.items()} for b, how in batches.items()}
        for batch, chips in steps.items():
            for what in dict.fromkeys(what for seconds in chips.values() for what in seconds):
                times = {chip: 1e3 * seconds[what] for chip, seconds in chips.items() if what in seconds}
                records.append({"shape": name, "batch": batch, "what": what, **times})
    return records


def collect() -> Record:
    """Return the predictions, with the rates and assumptions that they follow from."""
    records = predictions()
    assumptions = {name: globals()[name] for name in ("MAIN_LOOP", "CELLS", "BANDWIDTH", "LATENCY")}
    return {
        "chips": {name: chip._asdict() for name, chip in CHIPS.items()},
        "assumptions": assumptions,
        "shapes": {name: shape._asdict() for name, shape in SHAPES.items()},
        "live rows": LIVE,
        "steps": {f"{r['shape']} {r['batch']}": r for r in records if r["what"] == "ours both"},
        "milliseconds": records,
    }


if __name__ == "__main__":
    PREDICTION.write_text(formatted(jsonable({"suite": "prediction", "results": collect()}, digits=6)) + "\n")
