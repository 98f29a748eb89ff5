"""Rank block shapes by speed: every candidate is compiled, compared with the table's own results, and timed.

The ranking is for a reader, who fills `gspo_kernels/backends/triton/tuning.py` by hand.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gspo_kernels.backends.rows import HeadRows, NeedsGradient
from gspo_kernels.backends.triton import backward, forward
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.backends.triton.tuning import SHARED_MEMORY, Config, architecture, tile_config

from .compile import compile_all, needed
from .setting import Setting
from .times import Record, clock, replay

KERNELS = {"forward_tile": forward, "gradient_tile": backward}
CANDIDATES_PER_BATCH = 32  # compiled together
REFINED = 4  # the fastest, whose other group sizes are tried
SECONDS = 0.1  # for one time
# How far a candidate's log-probs (root mean square) and bf16 gradients (relative) may be off: the tests' limits.
LOG_PROB_RMS, GRADIENT_RELATIVE_RMS = 3e-5, 4e-3
D_HIDDEN = NeedsGradient(hidden=True, weight=False, bias=False, adapter_hidden=False, adapter_weight=False)


def candidates(device: torch.device) -> list[Config]:
    """Return shapes whose operands fit the shared memory and whose logits fit the registers, largest tiles first."""
    grid = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5), (True, False))
    available = SHARED_MEMORY[architecture(device) or ""]
    fitting = [
        Config(n, v, h, warps, stages, descriptors=descriptors)
        for n, v, h, warps, stages, descriptors in grid
        if stages * (n + v) * h * 2 <= available and 32 <= n * v // (32 * warps) <= 128
    ]
    # The fewer bytes a tile reads per operation, the better its chances; deep pipelines before shallow ones.
    return sorted(fitting, key=lambda c: (1 / c.block_n + 1 / c.block_v, not c.descriptors, -c.stages * c.block_h))


@contextmanager
def chosen(config: Config) -> Iterator[None]:
    """Give all heads this block shape."""
    with ExitStack() as stack:
        for module in KERNELS.values():
            stack.enter_context(mock.patch.object(module, "tile_config", lambda head, kernel: config))
        yield


def tune(setting: Setting, kernel: str, width: int, minutes: float, say: Callable[[str], None]) -> list[Record]:
    """Return records of one kernel at one H, fastest first, failures last."""
    bench = _Bench(setting, kernel, width)
    end, pool = time.monotonic() + 60 * minutes, candidates(setting.device)
    if not setting.on_gpu:
        pool = pool[-2:]  # interpreted, two are enough to see that it works
    records: list[Record] = []
    last = 0.0
    for i in range(0, len(pool), CANDIDATES_PER_BATCH):
        start = time.monotonic()
        if start + 1.5 * last > end:
            break
        records += bench.measure(pool[i : i + CANDIDATES_PER_BATCH])
        last = time.monotonic() - start
        say(f"tune {kernel} H={width}: {len(records)} of {len(pool)} in {last:.0f} s, {_best(records)}")
    best = [Config(**r["config"]) for r in _ranked(records)[:REFINED]]
    records += bench.measure([replace(c, group=group) for c in best for group in (4, 16, 32)])
    if kernel == "forward_tile":  # a head has one shape, with and without entropy
        for record in _ranked(records)[:REFINED]:
            record["with entropy"] = bench.with_entropy(Config(**record["config"]))
    say(f"tune {kernel} H={width}: {len(records)} measured, {_best(records)}")
    return _ranked(records) + [r for r in records if r["fault"] is not None]


def _ranked(records: list[Record]) -> list[Record]:
    """Return those that work, fastest first."""
    return sorted((r for r in records if r["fault"] is None), key=lambda r: r["ms"])


def shape_of(config: dict[str, Any]) -> str:
    """Return a block shape in a line."""
    by = "descriptors" if config["descriptors"] else "pointers"
    blocks = "x".join(str(config[f"block_{axis}"]) for axis in "nvh")
    return f"{blocks} {config['warps']}w {config['stages']}s group {config['group']} {by}"


def _best(records: list[Record]) -> str:
    ranked = _ranked(records)
    return f"best {ranked[0]['TFLOP/s']:.0f} TFLOP/s with {shape_of(ranked[0]['config'])}" if ranked else "none works"


class _Bench:
    """One kernel, one head, and the result of the table's own block shape."""

    def __init__(self, setting: Setting, kernel: str, width: int) -> None:
        self.setting, self.kernel, self.width = setting, kernel, width
        self.head = setting.head(setting.rows, width)
        tensors = {name: x.to("meta") for name, x in self.head._asdict().items() if isinstance(x, Tensor)}
        self.meta_head = self.head._replace(**tensors)
        self.result = forward.head_forward(self.head)
        self.d_log_probs = torch.randn(setting.rows, device=setting.device)
        with chosen(tile_config(self.head, kernel.removesuffix("_tile"))):
            self.expected, _ = self.run(self.head)

    def run(self, head: HeadRows) -> tuple[Tensor, list[Launch]]:
        """Return the kernel's result and its launches."""
        with launches() as seen:
            if self.kernel == "forward_tile":
                out = forward.head_forward(head).log_probs
            else:
                out = backward.head_backward(head, self.result, self.d_log_probs, None, D_HIDDEN)[0]
        assert out is not None
        return out, [x for x in seen if x.kernel.__name__ == self.kernel]

    def measure(self, configs: list[Config]) -> list[Record]:
        failures = self._compile(configs) if self.setting.on_gpu else {}
        return [self._measure_one(config, self.head, failures.get(config)) for config in configs]

    def with_entropy(self, config: Config) -> Record:
        return self._measure_one(config, self.head._replace(entropy=True), None)

    def _compile(self, configs: list[Config]) -> dict[Config, str]:
        """Compile on all cores; return the shapes that do not, and why."""
        wanted: list[Launch] = []
        for config in configs:
            with chosen(config):
                seen = needed(self.setting.device, self.meta_head)
                wanted += [x for x in seen if x.kernel.__name__ == self.kernel]
        return {x.config: failure for x, failure in compile_all(wanted)}

    def _measure_one(self, config: Config, head: HeadRows, failure: str | None) -> Record:
        record: Record = {"kernel": self.kernel, "width": self.width, "config": asdict(config), "fault": failure}
        if failure:
            return record
        try:
            with chosen(config):
                out, seen = self.run(head)
            record |= self._error(out)
            record |= clock(replay(seen, self.setting.on_gpu), self.setting.on_gpu, SECONDS)
            operations = 2 * self.setting.rows * self.width * self.setting.vocab
            record["TFLOP/s"] = operations / record["ms"] / 1e9
        except Exception as error:  # mostly too much shared memory: the result of this candidate
            record["fault"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        return record

    def _error(self, out: Tensor) -> Record:
        """Return how far the result is from that of the table's shape; a fault if that is too far."""
        difference, expected = out.double() - self.expected.double(), self.expected.double()
        if self.kernel == "forward_tile":
            error, limit = difference.square().mean().sqrt().item(), LOG_PROB_RMS
        else:
            error, limit = (difference.norm() / expected.norm()).item(), GRADIENT_RELATIVE_RMS
        return {"error": error, "fault": None if error <= limit else f"off by {error:.2g}, allowed {limit:.2g}"}
