"""Rank block shapes by speed. Each shape is compiled and timed, and its result compared with the tuned shape's.

The fastest shapes must be entered in `gspo_kernels/backends/triton/tuning.py` by hand.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gspo_kernels.backends.rows import HeadResult, HeadRows, LiveTiles, NeedsGradient
from gspo_kernels.backends.triton import backward, forward
from gspo_kernels.backends.triton.cells import lists, products
from gspo_kernels.backends.triton.launch import Launch, launch_options, launches
from gspo_kernels.backends.triton.tuning import SHARED_MEMORY, Config, architecture, assume
from gspo_kernels.tolerance import LOG_PROB_RMS_ON_GPUS, RELATIVE_RMS

from ..measure import Record
from .times import TILES, Measurement, Setting, clock, replay

PRODUCTS = ("hidden_product", "weight_product")
KERNELS = TILES + PRODUCTS
SHARE = 0.3  # of the cells, for the products
SHAPES_PER_BATCH = 32  # shapes that are compiled together
REFINED = 4  # number of fastest shapes that are also tried with other group sizes
SECONDS = 0.1  # duration of one measurement


def shapes(device: torch.device, kernel: str) -> list[Config]:
    """List shapes whose operands fit in shared memory and whose sums fit in registers, largest blocks first."""
    grid = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5), (True, False))
    available = SHARED_MEMORY[architecture(device) or ""]
    fitting = [
        Config(n, v, h, warps, stages, descriptors=descriptors)
        for n, v, h, warps, stages, descriptors in grid
        if stages * (n + v) * h * 2 <= available and 32 <= n * v // (32 * warps) <= 128
        if kernel in TILES or (n <= 128 and not descriptors)  # cells have 128 rows, and products use pointers
    ]
    # A block that reads fewer bytes per operation is likely to be faster. A deeper pipeline is likely to be faster too.
    return sorted(fitting, key=lambda c: (1 / c.block_n + 1 / c.block_v, not c.descriptors, -c.stages * c.block_h))


def shape_text(config: dict[str, Any]) -> str:
    """Format a block shape."""
    by = "descriptors" if config["descriptors"] else "pointers"
    blocks = "x".join(str(config[f"block_{axis}"]) for axis in "nvh")
    return f"{blocks} {config['warps']}w {config['stages']}s group {config['group']} {by}"


@contextmanager
def forced(config: Config, kernel: str) -> Iterator[None]:
    """Use this block shape for all tiles, or for all products of cells."""
    with ExitStack() as stack:
        for module in (products,) if kernel in PRODUCTS else (forward, backward):
            name = "product_config" if kernel in PRODUCTS else "tile_config"
            stack.enter_context(patch.object(module, name, lambda *_: config))
        yield


def tune(setting: Setting, kernel: str, width: int) -> Iterator[Measurement]:
    """Measure a kernel's block shapes at one H, in batches, then the fastest tiles with other group sizes."""
    bench = KernelBench(setting, kernel, width)
    pool = shapes(setting.device, kernel)
    pool = pool if setting.on_gpu else pool[-2:]  # a dry run only checks that tuning works
    end = time.monotonic() + 48 * setting.minutes  # four fifths of the time
    last = 0.0
    for i in range(0, len(pool), SHAPES_PER_BATCH):
        start = time.monotonic()
        if start + 1.5 * last > end:
            break
        yield f"{i} of {len(pool)} shapes", partial(bench.measure, pool[i : i + SHAPES_PER_BATCH])
        last = time.monotonic() - start
    best = [Config(**r["config"]) for r in ranked(bench.records)[:REFINED] if kernel in TILES]
    yield "group sizes", partial(bench.measure, [replace(c, group=group) for c in best for group in (4, 16, 32)])


def ranked(records: list[Record]) -> list[Record]:
    """Sort the records of block shapes that work, fastest first."""
    return sorted((r for r in records if "config" in r and not r["failure"]), key=lambda r: r["seconds"])


def selected(head: HeadRows, device: torch.device | str) -> LiveTiles:
    """Choose all rows, and a random share of their cells."""
    cell = forward.cell_shape(head)
    assert cell is not None
    rows = len(head.mask)
    size = -(-rows // cell[0]), -(-head.vocab_size // cell[1])
    cells = torch.rand(size, generator=torch.Generator().manual_seed(0)) < SHARE
    cells[0, 0] = True
    choice = LiveTiles(torch.arange(rows), cells, torch.tensor([rows, 1]))
    return LiveTiles(*(x.to(device) for x in choice))


class KernelBench:
    """A kernel, a head, and the kernel's result with the tuning table's block shape."""

    def __init__(self, setting: Setting, kernel: str, width: int) -> None:
        shape = setting.shapes["D"]._replace(width=width)
        self.device = setting.device
        self.on_gpu = setting.on_gpu
        self.kernel = kernel
        self.operations = shape.operations * (SHARE if kernel in PRODUCTS else 1.0)
        head = setting.head(shape)
        self.inputs = head, forward.head_forward(head), torch.randn(shape.rows, device=setting.device)
        self.expected = self.run(*self.inputs)[0].double()
        self.records: list[Record] = []

    def run(self, head: HeadRows, result: HeadResult, d_log_probs: Tensor) -> tuple[Tensor, list[Launch]]:
        """Compute the kernel's result, and record its launches. With meta tensors, launches are only recorded."""
        of_weight = self.kernel == "weight_product"
        needs = NeedsGradient(not of_weight, of_weight, bias=False, adapter_hidden=False, adapter_weight=False)
        place = "cpu" if d_log_probs.is_meta else self.device  # the host reads the number of cells
        choice = selected(head, place) if self.kernel in PRODUCTS else None
        with launches() as seen:
            if self.kernel == "forward_tile":
                out = forward.head_forward(head).log_probs
            else:
                gradients = backward.head_backward(head, result, d_log_probs, None, needs, choice)
                out = gradients.hidden if needs.hidden else gradients.weight
        assert out is not None
        return out, [x for x in seen if x.kernel.__name__ == self.kernel]

    def measure(self, configs: list[Config]) -> list[Record]:
        """Compile and time shapes: one record per shape."""
        if self.on_gpu:
            self._compile(configs)
        records = [{"what": self.kernel, "config": asdict(config), **self._measure(config)} for config in configs]
        self.records += records
        return records

    def _compile(self, configs: list[Config]) -> None:
        """Compile on all cores, as the JIT would."""
        meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, self.inputs)
        first = []
        for config in configs:
            with forced(config, self.kernel), assume(architecture(self.device) or ""), patch.object(lists, "launch"):
                first.append(self.run(*meta)[1][0])  # the other launches run the same compiled kernel

        def compile_one(x: Launch) -> None:
            with suppress(Exception):  # any error: `_measure` meets it again and records it
                x.kernel.warmup(**x.arguments, **launch_options(x.config), grid=(1,))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, first))

    def _measure(self, config: Config) -> Record:
        """Time one block shape. Record the reason if it fails or its result is too far from the tuned shape's."""
        try:
            with forced(config, self.kernel):
                out, seen = self.run(*self.inputs)
            time = clock(replay(seen, self.on_gpu), self.on_gpu, SECONDS)
        except Exception as error:  # any error, mostly too much shared memory
            return {"failure": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        scale = self.expected.norm()
        limit = RELATIVE_RMS[torch.bfloat16]
        if self.kernel == "forward_tile":
            scale = len(self.expected) ** 0.5
            limit = LOG_PROB_RMS_ON_GPUS
        off = ((out.double() - self.expected).norm() / scale).item()
        failure = "" if off <= limit else f"off by {off:.2g}, allowed {limit:.2g}"
        return {"failure": failure, **time, "TFLOP/s": self.operations / time["seconds"] / 1e12}
