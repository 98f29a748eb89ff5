"""Rank block shapes by speed. Each shape is compiled, timed, and its result compared with that of the tuning table's.

The fastest shapes must be entered in `gspo_kernels/backends/triton/tuning.py` by hand.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gspo_kernels.backends.rows import NeedsGradient
from gspo_kernels.backends.triton import backward, forward
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.backends.triton.tuning import SHARED_MEMORY, Config, architecture, assume, tile_config
from gspo_kernels.tools.compile_gate import specialise

from .times import Record, Setting, clock, replay

KERNELS = {"forward_tile": forward, "gradient_tile": backward}
SHAPES_PER_BATCH = 32  # shapes that are compiled together
REFINED = 4  # number of fastest shapes that are also tried with other group sizes
SECONDS = 0.1  # duration of one measurement
# Allowed errors of log-probs (root mean square) and bf16 gradients (relative): the tests' limits.
LOG_PROB_RMS, GRADIENT_RELATIVE_RMS = 3e-5, 4e-3
D_HIDDEN = NeedsGradient(hidden=True, weight=False, bias=False, adapter_hidden=False, adapter_weight=False)


def shapes(device: torch.device) -> list[Config]:
    """Return shapes whose operands fit in shared memory and whose logits fit in registers, largest tiles first."""
    grid = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5), (True, False))
    available = SHARED_MEMORY[architecture(device) or ""]
    fitting = [
        Config(n, v, h, warps, stages, descriptors=descriptors)
        for n, v, h, warps, stages, descriptors in grid
        if stages * (n + v) * h * 2 <= available and 32 <= n * v // (32 * warps) <= 128
    ]
    # A tile that reads fewer bytes per operation is likely to be faster. A deeper pipeline is likely to be faster too.
    return sorted(fitting, key=lambda c: (1 / c.block_n + 1 / c.block_v, not c.descriptors, -c.stages * c.block_h))


def shape_text(config: dict[str, Any]) -> str:
    """Return a block shape as text."""
    by = "descriptors" if config["descriptors"] else "pointers"
    blocks = "x".join(str(config[f"block_{axis}"]) for axis in "nvh")
    return f"{blocks} {config['warps']}w {config['stages']}s group {config['group']} {by}"


@contextmanager
def forced(config: Config) -> Iterator[None]:
    """Use this block shape for all heads."""
    with ExitStack() as stack:
        for module in KERNELS.values():
            stack.enter_context(mock.patch.object(module, "tile_config", lambda head, kernel: config))
        yield


def tune(setting: Setting, kernel: str, width: int, minutes: float) -> list[Record]:
    """Return the records of a kernel at one H, fastest first, failures last."""
    bench = KernelBench(setting, kernel, width)
    end, pool = time.monotonic() + 60 * minutes, shapes(setting.device)
    if not setting.on_gpu:
        pool = pool[-2:]  # a dry run only checks that tuning works
    records: list[Record] = []
    last = 0.0
    for i in range(0, len(pool), SHAPES_PER_BATCH):
        start = time.monotonic()
        if start + 1.5 * last > end:
            break
        records += bench.measure(pool[i : i + SHAPES_PER_BATCH])
        last = time.monotonic() - start
        print(f"tune {kernel} H={width}: {len(records)} of {len(pool)} in {last:.0f} s", flush=True)
    best = [Config(**r["config"]) for r in ranked(records)[:REFINED]]
    records += bench.measure([replace(c, group=group) for c in best for group in (4, 16, 32)])
    return ranked(records) + [r for r in records if r["fault"] is not None]


def ranked(records: list[Record]) -> list[Record]:
    """Return the records without a fault, fastest first."""
    return sorted((r for r in records if r["fault"] is None), key=lambda r: r["ms"])


class KernelBench:
    """A kernel, a head, and the kernel's result with the tuning table's block shape."""

    def __init__(self, setting: Setting, kernel: str, width: int) -> None:
        self.setting, self.kernel, self.width = setting, kernel, width
        self.head = setting.head(width)
        tensors = {name: x.to("meta") for name, x in self.head._asdict().items() if isinstance(x, Tensor)}
        self.meta_head = self.head._replace(**tensors)
        self.result = forward.head_forward(self.head)
        self.d_log_probs = torch.randn(setting.rows, device=setting.device)
        with forced(tile_config(self.head, kernel.removesuffix("_tile"))):
            self.expected, _ = self.run()

    def run(self) -> tuple[Tensor, list[Launch]]:
        """Return the kernel's result and its launches."""
        with launches() as seen:
            if self.kernel == "forward_tile":
                out = forward.head_forward(self.head).log_probs
            else:
                out = backward.head_backward(self.head, self.result, self.d_log_probs, None, D_HIDDEN)[0]
        assert out is not None
        return out, [x for x in seen if x.kernel.__name__ == self.kernel]

    def measure(self, configs: list[Config]) -> list[Record]:
        """Return a record per shape."""
        failures = self._compile(configs) if self.setting.on_gpu else {}
        return [self._measure(config, failures.get(config)) for config in configs]

    def _compile(self, configs: list[Config]) -> dict[Config, str]:
        """Compile on all cores, as the JIT would. Return the shapes that do not compile, with the error."""
        distinct: dict[tuple[Config, str], Launch] = {}
        for config in configs:
            with forced(config), assume(architecture(self.setting.device) or ""), launches() as seen:
                result = forward.head_forward(self.meta_head)  # with meta tensors, launches are only recorded
                if self.kernel == "gradient_tile":
                    none = D_HIDDEN._replace(hidden=False)  # the same kernel, without the products that follow
                    backward.head_backward(self.meta_head, result, torch.empty_like(result.log_probs), None, none)
            distinct |= {(x.config, str(specialise(x))): x for x in seen if x.kernel.__name__ == self.kernel}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = zip(distinct.values(), pool.map(_compile_failure, distinct.values()), strict=True)
            return {x.config: failure for x, failure in failures if failure}

    def _measure(self, config: Config, failure: str | None) -> Record:
        record: Record = {"kernel": self.kernel, "width": self.width, "config": asdict(config), "fault": failure}
        if failure:
            return record
        try:
            with forced(config):
                out, seen = self.run()
            record |= self._error(out)
            record |= clock(replay(seen, self.setting.on_gpu), self.setting.on_gpu, SECONDS)
            operations = 2 * self.setting.rows * self.width * self.setting.vocab
            record["TFLOP/s"] = operations / record["ms"] / 1e9
        except Exception as error:  # any error, mostly too much shared memory
            record["fault"] = _one_line(error)
        return record

    def _error(self, out: Tensor) -> Record:
        """Return the error against the result of the table's shape, and a fault if the error is too large."""
        difference, expected = out.double() - self.expected.double(), self.expected.double()
        if self.kernel == "forward_tile":
            error, limit = difference.square().mean().sqrt().item(), LOG_PROB_RMS
        else:
            error, limit = (difference.norm() / expected.norm()).item(), GRADIENT_RELATIVE_RMS
        return {"error": error, "fault": None if error <= limit else f"off by {error:.2g}, allowed {limit:.2g}"}


def _compile_failure(x: Launch) -> str:
    try:
        x.kernel.warmup(**x.arguments, grid=(x.programs,), num_warps=x.config.warps, num_stages=x.config.stages)
    except Exception as error:  # any error, such as too much shared memory or a failing compiler pass
        return _one_line(error)
    return ""


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"
