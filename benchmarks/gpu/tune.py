"""Which block shapes are fastest? Every candidate is compiled, held against the table's own results, and timed.

The ranking is for a reader, who fills `gspo_kernels/kernels/tuning.py` by hand.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import torch
from tolerance import RELATIVE_RMS
from torch import Tensor

from gspo_kernels.backends.rows import HeadRows, NeedsGradient
from gspo_kernels.backends.triton import backward, forward
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.backends.triton.tuning import SHARED_MEMORY, Config, architecture, tile_config

from .checks import LOG_PROB_ERROR_ON_TENSOR_CORES, Setting
from .compile import META, compile_all, needed
from .heads import relative_rms
from .times import Record, clock, replay

KERNELS = {"forward_tile": forward, "gradient_tile": backward}
AT_ONCE = 32  # candidates compiled together
BEST = 4  # whose neighbours in the second round are tried
ENOUGH = 0.1  # seconds for one time


def candidates(device: torch.device) -> list[Config]:
    """Shapes whose operands fit the shared memory and whose logits fit the registers, largest tiles first."""
    grid = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 5), (True, False))
    room = SHARED_MEMORY[architecture(device) or ""]
    some = [
        Config(n, v, h, warps, stages, descriptors=descriptors)
        for n, v, h, warps, stages, descriptors in grid
        if stages * (n + v) * h * 2 <= room and 32 <= n * v // (32 * warps) <= 128
    ]
    # The fewer bytes a tile reads per operation, the better its chances; deep pipelines before shallow ones.
    return sorted(some, key=lambda c: (1 / c.block_n + 1 / c.block_v, not c.descriptors, -c.stages * c.block_h))


@contextmanager
def chosen(config: Config) -> Iterator[None]:
    """All heads get this block shape."""
    with ExitStack() as stack:
        for module in KERNELS.values():
            stack.enter_context(patch.object(module, "tile_config", lambda head, kernel: config))
        yield


def tune(setting: Setting, kernel: str, width: int, minutes: float, say: Callable[[str], None]) -> list[Record]:
    """Records of one kernel at one H, fastest first, failures last."""
    bench = _Bench(setting, kernel, width)
    end, pool = time.monotonic() + 60 * minutes, candidates(setting.device)
    if setting.device.type != "cuda":
        pool = pool[-2:]  # interpreted, two are enough to see that it works
    records, last = [], 0.0
    for batch in _batches(pool):
        start = time.monotonic()
        if start + 1.5 * last > end:
            break
        records += bench.measure(batch)
        last = time.monotonic() - start
        say(f"tune {kernel} H={width}: {len(records)} of {len(pool)} in {last:.0f} s, {_best(records)}")
    best = [Config(**r["config"]) for r in sorted(filter(_works, records), key=_speed)[:BEST]]
    records += bench.measure([replace(c, group=group) for c in best for group in (4, 16, 32)])
    best = sorted(filter(_works, records), key=_speed)[:BEST]
    if kernel == "forward_tile":  # where entropy is asked for, the shape must be the same one
        for record in best:
            record["with entropy"] = bench.with_entropy(Config(**record["config"]))
    say(f"tune {kernel} H={width}: {len(records)} measured, {_best(records)}")
    return sorted(records, key=lambda r: (not _works(r), _speed(r)))


def _batches(some: list[Config]) -> list[list[Config]]:
    return [some[i : i + AT_ONCE] for i in range(0, len(some), AT_ONCE)]


def _works(record: Record) -> bool:
    return record["fault"] is None


def _speed(record: Record) -> float:
    return record.get("ms") or float("inf")


def _best(records: list[Record]) -> str:
    works = sorted(filter(_works, records), key=_speed)
    if not works:
        return "none works"
    c = works[0]["config"]
    shape = f"{c['block_n']}x{c['block_v']}x{c['block_h']} {c['warps']}w {c['stages']}s group {c['group']}"
    return f"best {works[0]['TFLOP/s']:.0f} TFLOP/s with {shape}{' descriptors' * c['descriptors']}"


class _Bench:
    """One kernel, one head, and what the table's own block shape makes of them."""

    def __init__(self, setting: Setting, kernel: str, width: int) -> None:
        self.setting, self.kernel, self.width = setting, kernel, width
        rows = setting.sizes.batch
        self.head = setting.head(rows, width, masked=False)
        tensors = {name: x.to(META) for name, x in self.head._asdict().items() if isinstance(x, Tensor)}
        self.meta = self.head._replace(**tensors)
        self.result = forward.head_forward(self.head)
        self.d_log_probs = torch.randn(rows, device=setting.device)
        with chosen(tile_config(self.head, kernel.removesuffix("_tile"))):
            self.expected, _ = self.run(self.head)

    def run(self, head: HeadRows) -> tuple[Tensor, list[Launch]]:
        """The kernel's result, and its launches."""
        with launches() as seen:
            if self.kernel == "forward_tile":
                out: Any = forward.head_forward(head).log_probs
            else:
                needs = NeedsGradient(True, False, False, False, False)
                out = backward.head_backward(head, self.result, self.d_log_probs, None, needs)[0]
        return out, [one for one in seen if one.kernel.__name__ == self.kernel]

    def measure(self, configs: list[Config]) -> list[Record]:
        broken: dict[Config, str] = {}
        if self.setting.device.type == "cuda":
            broken = self._compile(configs)
        return [self._one(config, self.head, broken.get(config)) for config in configs]

    def with_entropy(self, config: Config) -> Record:
        return self._one(config, self.head._replace(entropy=True), None)

    def _compile(self, configs: list[Config]) -> dict[Config, str]:
        wanted = []
        for config in configs:
            with chosen(config):
                seen = needed(self.setting.device, self.meta)
                wanted += [one for one in seen if one.kernel.__name__ == self.kernel]
        return {one.config: failure for one, failure in compile_all(wanted)}

    def _one(self, config: Config, head: HeadRows, fault: str | None) -> Record:
        record: Record = {"kernel": self.kernel, "width": self.width, "config": asdict(config), "fault": fault}
        if fault:
            return record
        try:
            with chosen(config):
                out, seen = self.run(head)
            record |= self._error(out)
            record |= clock(replay(seen, self.setting.device), self.setting.device, ENOUGH)
            operations = 2 * head.hidden.shape[0] * self.width * self.setting.sizes.vocab
            record["TFLOP/s"] = operations / record["ms"] / 1e9
        except Exception as error:  # too much shared memory, mostly: this candidate's finding
            record["fault"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        return record

    def _error(self, out: Tensor) -> Record:
        """How far the result is from that of the table's shape; a fault if that is too far."""
        if self.kernel == "forward_tile":
            error, limit = (
                (out.double() - self.expected.double()).square().mean().sqrt().item(),
                LOG_PROB_ERROR_ON_TENSOR_CORES,
            )
        else:
            error, limit = relative_rms(out, self.expected), RELATIVE_RMS[self.head.hidden.dtype]
        return {"error": error, "fault": None if error <= limit else f"off by {error:.2g}, allowed {limit:.2g}"}
