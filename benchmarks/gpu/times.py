"""What the groups measure: the loss, its kernels, the vendor's products, and other packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton.launch import Launch, launch, launches

from .. import peaked, workloads
from ..candidates import ALL, Candidate, ours_at
from ..measure import Record, spread, timed
from ..suites import bench
from ..suites.options import say
from ..workloads import Head, Spec, Workload

SECONDS = 0.3  # duration of one measurement
ROUNDS = 5  # interleaved runs of each package
TILES = ("forward_tile", "gradient_tile")
PRODUCTS = ("h W'", "d_logits W", "d_logits' h")  # of N x H x V
WITH_CACHE = (
    ours_at(0.0, "ours, default cache", None),
    ours_at(1e-3, "ours, budget 1e-3, default cache", None),
    ours_at(0.0, "ours, all in the cache", 2**20),
)
Measurement = tuple[str, Callable[[], list[Record]]]  # name, and the function that measures
Step = Callable[[], object]


class Shape(NamedTuple):
    rows: int  # N
    width: int  # H
    vocab: int  # V

    @property
    def operations(self) -> float:
        """Operations of a pass, 2 N H V."""
        return 2.0 * math.prod(self)


class Setting(NamedTuple):
    device: torch.device
    shapes: dict[str, Shape]  # V is a multiple of 256 in A only
    sequences: int  # of a dense batch
    tokens: tuple[int, int]  # of the RL-like batches
    minutes: float = 1.0  # for the group

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def head(self, shape: Shape) -> HeadRows:
        """Make a bf16 head on the device, with every row unmasked."""
        hidden, weight, ids, _ = peaked.make(*shape, device=self.device)
        operands = hidden.bfloat16(), weight.bfloat16(), None, None, None, ids, torch.ones_like(ids).bool()
        return HeadRows(*operands, None, 1.0, None, shape.vocab, entropy=False)


SHAPES = {"A": Shape(4096, 4096, 131_072), "C": Shape(4096, 896, 151_936), "D": Shape(8192, 4096, 151_936)}
FULL = Setting(torch.device("cuda"), SHAPES, 64, (4096, 32_768))
SMALL = {"A": Shape(128, 64, 512), "C": Shape(64, 64, 300), "D": Shape(128, 64, 320)}
TINY = Setting(torch.device("cpu"), SMALL, 4, (64, 192))


def clock(function: Step, on_gpu: bool, seconds: float = SECONDS) -> Record:
    """Time a function: median, 20th and 80th percentile of its seconds. On a GPU, CUDA events measure the time.

    Runs repeat the same data. The timed functions read more data than the caches hold, so the caches do not help.
    """
    if not on_gpu:
        return spread([timed(function, torch.device("cpu"))])

    def run() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    run()  # compiles
    return spread([run() for _ in range(int(min(max(seconds / run(), 7), 100)))])


def ceilings(setting: Setting) -> Iterator[Measurement]:
    """Measure the vendor's products of every shape."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)

    def products(name: str) -> list[Record]:
        n, h, v = shape = setting.shapes[name]
        hidden, weight, d_logits = randn(n, h), randn(v, h), randn(n, v)
        factors = (hidden, weight.T), (d_logits, weight), (d_logits.T, hidden)
        times = [clock(partial(torch.mm, *pair), setting.on_gpu) for pair in factors]
        return [
            {"shape": name, "what": f"vendor {what}", **time, "TFLOP/s": shape.operations / time["seconds"] / 1e12}
            for what, time in zip(PRODUCTS, times, strict=True)
        ]

    yield from ((f"products, shape {name}", partial(products, name)) for name in setting.shapes)


def steps(setting: Setting, name: str) -> Iterator[Measurement]:
    """Measure passes and kernels of a dense batch, then errors, times and memory of full logits.

    On shape D, TRL, Liger and the compiled loss are measured too.
    """
    shape = setting.shapes[name]
    w = workloads.batch(
        peaked.make(*shape, device=setting.device), setting.sequences, zero=0, clipped=0, dtype=torch.bfloat16
    )
    yield "dense", partial(time_step, setting, w, {"shape": name, "batch": "dense"}, shape.operations)
    del w
    packages = ("naive", "compile", "trl", "liger", "ours") if name == "D" else ("naive", "ours")
    chosen = [c for c in candidates(setting) if c.against in packages]
    yield compared(setting, name, shape.rows, "dense", chosen)


def time_step(setting: Setting, w: Workload, tags: Record, operations: float) -> list[Record]:
    """Time forward, backward, and every kernel of a step. `operations`: of a pass."""
    old = ALL["ours"].old(w)
    leaves = w.hidden.requires_grad_(), w.weight.requires_grad_()

    def loss() -> Tensor:
        options: dict[str, Any] = dict(old_log_probs=old, cache_mib=0, backend="triton")
        return gspo_fused_loss(*leaves, w.target_ids, w.advantages, **options).loss

    backward = partial(torch.autograd.grad, loss(), leaves, retain_graph=True)
    passes: dict[str, Step] = {"forward": loss, "backward": backward}
    records = [{**tags, "what": f"ours {what}", **clock(run, setting.on_gpu)} for what, run in passes.items()]
    both: Step = lambda: torch.autograd.grad(loss(), leaves)  # noqa: E731
    return records + time_kernels(setting, both, tags, operations)


def compared(setting: Setting, name: str, tokens: int, scenario: str, chosen: list[Candidate]) -> Measurement:
    """Make the measurement of implementations: errors against float64, and times in interleaved rounds."""
    head = Head(*setting.shapes[name][1:])
    batch = f"{scenario}, {tokens} tokens"
    spec = Spec(head, tokens, scenario, "bfloat16", str(setting.device))

    def compare() -> list[Record]:
        rounds = ROUNDS if setting.on_gpu else 1
        records = bench.compare(spec, chosen, rounds, say, memory=False)["candidates"]
        faults = [r.get("wrong", "") if r["against"] == "ours" else "" for r in records]
        tags = [{"shape": name, "batch": batch, "what": r["name"]} for r in records]
        return [{**tag, "fault": fault, **r} for tag, fault, r in zip(tags, faults, records, strict=True)]

    return batch, compare


def packages(setting: Setting, size: int) -> Iterator[Measurement]:
    """Measure RL-like batches on the head of shape D.

    The smallest batch (`size` 0) is measured with all packages. The others leave out those that take long, because they
    tune their kernels or loop over the sequences.
    """
    chosen = [c for c in candidates(setting) if c.against != "compile"]
    if size > 0:
        chosen = [c for c in chosen if c.against in ("naive", "trl", "liger", "ours") and not c.compiles]
    yield compared(setting, "D", setting.tokens[size], "rl-like", chosen)


def candidates(setting: Setting) -> list[Candidate]:
    """List naive GSPO and ours, and on a GPU the other packages too. On a CPU, they are left out of the dry run."""
    chosen = list(ALL.values())
    if not setting.on_gpu:
        chosen = [c for c in chosen if c.against in ("naive", "ours")]
    return [*chosen, *WITH_CACHE]


def time_kernels(setting: Setting, step: Step, tags: Record, operations: float) -> list[Record]:
    """Time each kernel alone: all its launches in a step. `operations`: of each of the two tiles."""
    with launches() as seen:
        step()
    records = []
    for name in dict.fromkeys(x.kernel.__name__ for x in seen):
        of_kernel = [x for x in seen if x.kernel.__name__ == name]
        repeats = 20 if setting.on_gpu and name not in TILES else 1  # CUDA events are coarse for a small kernel
        record = clock(replay(repeats * of_kernel, setting.on_gpu), setting.on_gpu, SECONDS / 3)
        record |= {key: record[key] / repeats for key in ("seconds", "p20", "p80")}
        if name in TILES:
            record["TFLOP/s"] = operations / record["seconds"] / 1e12
        records.append({**tags, "what": f"kernel {name}", **record, "launches": len(of_kernel)})
    return records


def replay(seen: list[Launch], on_gpu: bool) -> Step:
    """Make a function that repeats the launches.

    On a GPU the function replays a captured graph, because launching a small kernel takes longer than the kernel.
    """

    def run() -> None:
        for x in seen:
            launch(x.kernel, x.programs, x.config, **x.arguments)

    if not on_gpu:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
