"""What the groups measure: the loss, its kernels, products of cells, the vendor's products, and other packages."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.precision import add_product, write_product
from gspo_kernels.backends.rows import HeadRows, LiveTiles, NeedsGradient
from gspo_kernels.backends.triton import backward, forward
from gspo_kernels.backends.triton.launch import Launch, launch, launches
from gspo_kernels.backends.triton.slabs import chunk_and_slab
from gspo_kernels.backends.triton.tuning import tile_config

from .. import peaked, workloads
from ..candidates import ALL, Candidate, ours_at
from ..measure import ROOT, Record, spread, timed
from ..suites import bench
from ..suites.options import say
from ..workloads import Head, Spec, Workload

SECONDS = 0.3  # duration of one measurement
ROUNDS = 5  # interleaved runs of each package
SHARES = (0.07, 0.3, 1.0)  # of the cells, in the backward of selected cells
BOTH = NeedsGradient(hidden=True, weight=True, bias=False, adapter_hidden=False, adapter_weight=False)
PRODUCTS = ("h W'", "d_logits W", "d_logits' h")  # of N x H x V
COUNTERS = (
    "DRAM Throughput", "Duration", "L2 Cache Throughput", "L2 Hit Rate", "Local Memory Spilling Requests",
    "SM Frequency", "SM: Pipe Tensor Cycles Active",
)  # fmt: skip  # ncu's names of metrics
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
    roles: tuple[int, int, int]  # sequences of an RL-like batch: all, of advantage 0, and clipped
    tokens: tuple[int, int, int]  # of the RL-like batches
    minutes: float = 1.0  # for the group

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def head(self, shape: Shape) -> HeadRows:
        """Make a bf16 head on the device, with every row unmasked."""
        hidden, weight, ids, _ = peaked.make(*shape, device=self.device)
        operands = hidden.bfloat16(), weight.bfloat16(), None, None, None, ids, torch.ones_like(ids).bool()
        return HeadRows(*operands, None, 1.0, None, shape.vocab, entropy=False)


SHAPES = {
    "A": Shape(4096, 4096, 131_072), "B": Shape(8192, 2560, 151_936), "C": Shape(4096, 896, 151_936),
    "D": Shape(8192, 4096, 151_936),
}  # fmt: skip  # numbers
FULL = Setting(torch.device("cuda"), SHAPES, (64, 19, 7), (4096, 8192, 32_768))
SMALL = {"A": Shape(128, 64, 512), "B": Shape(128, 64, 300), "C": Shape(64, 64, 300), "D": Shape(128, 64, 320)}
TINY = Setting(torch.device("cpu"), SMALL, (4, 1, 1), (64, 128, 192))


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
    """Measure a copy from the device to itself, and the vendor's products of every shape and of its slabs."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)

    def copy() -> list[Record]:
        source = randn(2**31 if setting.on_gpu else 2**20)
        record = clock(partial(torch.empty_like(source).copy_, source), setting.on_gpu)
        return [{"what": "copy", **record, "TB/s": 2 * source.nbytes / record["seconds"] / 1e12}]

    def products(name: str) -> list[Record]:
        n, h, v = shape = setting.shapes[name]
        hidden, weight, d_logits = randn(n, h), randn(v, h), randn(n, v)
        factors = (hidden, weight.T), (d_logits, weight), (d_logits.T, hidden)
        times = [clock(partial(torch.mm, *pair), setting.on_gpu) for pair in factors]
        return [
            {"shape": name, "what": f"vendor {what}", **time, "TFLOP/s": shape.operations / time["seconds"] / 1e12}
            for what, time in zip(PRODUCTS, times, strict=True)
        ]

    def of_slabs(name: str, batch: str, n: int) -> list[Record]:
        """Time the products of the backward's widest slab: d_hidden is added in fp32, d_weight is written rounded."""
        _, h, v = setting.shapes[name]
        weight = randn(v, h)
        ids = torch.zeros(n, dtype=torch.int64, device=setting.device)
        head = HeadRows(randn(n, h), weight, None, None, None, ids, ids == 0, None, 1.0, None, v, entropy=False)
        rows, columns, _ = chunk_and_slab(head, n, tile_config(head, "gradient"), unrounded=False, direct=True)
        columns = min(columns, v)
        d_logits = randn(rows, columns)
        hidden = head.hidden[:rows]
        d_weight = torch.empty_like(weight[:columns])
        total = torch.zeros_like(hidden, dtype=torch.float32)
        times = {
            PRODUCTS[1]: clock(partial(add_product, total, d_logits, weight[:columns]), setting.on_gpu),
            PRODUCTS[2]: clock(partial(write_product, d_weight, d_logits.T, hidden), setting.on_gpu),
        }
        tags = {"shape": name, "batch": f"{batch}, {rows} x {columns}"}
        operations = 2.0 * rows * columns * h
        return [
            {**tags, "what": f"slab {what}", **time, "TFLOP/s": operations / time["seconds"] / 1e12}
            for what, time in times.items()
        ]

    yield "copy", copy
    yield from ((f"products, shape {name}", partial(products, name)) for name in setting.shapes)
    count, *idle = setting.roles
    for name, shape in setting.shapes.items():
        for batch, n in (("dense", shape.rows), ("rl-like", shape.rows * (count - sum(idle)) // count)):
            yield f"slabs, shape {name}, {batch}", partial(of_slabs, name, batch, n)


def steps(setting: Setting, name: str) -> Iterator[Measurement]:
    """Measure passes and kernels of a dense and an RL-like batch, then errors, times and memory of full logits.

    On shape D, TRL, Liger and the compiled loss are measured too.
    """
    shape = setting.shapes[name]
    policy = peaked.make(*shape, device=setting.device)
    count, *idle = setting.roles
    for batch, (zero, clipped) in (("dense", (0, 0)), ("rl-like", idle)):
        w = workloads.batch(policy, count, zero, clipped, dtype=torch.bfloat16)
        live = 1 - (zero + clipped) / count
        operations = {"forward_tile": shape.operations, "gradient_tile": live * shape.operations}
        yield batch, partial(time_step, setting, w, {"shape": name, "batch": batch}, operations)
    del policy
    packages = ("naive", "compile", "trl", "liger", "ours") if name == "D" else ("naive", "ours")
    chosen = [c for c in candidates(setting) if c.against in packages]
    yield compared(setting, name, shape.rows, "dense", chosen)


def time_step(setting: Setting, w: Workload, tags: Record, operations: dict[str, float]) -> list[Record]:
    """Time forward, backward, both, and every kernel of a step."""
    old = ALL["ours"].old(w).log_probs
    leaves = w.hidden.requires_grad_(), w.weight.requires_grad_()

    def loss(cache_mib: float | None = 0.0) -> Tensor:
        options: dict[str, Any] = dict(old_log_probs=old, cache_mib=cache_mib, backend="triton")
        return gspo_fused_loss(*leaves, w.target_ids, w.advantages, **options).loss

    def both(cache_mib: float | None = 0.0) -> object:
        return torch.autograd.grad(loss(cache_mib), leaves)

    backward = partial(torch.autograd.grad, loss(), leaves, retain_graph=True)
    passes: dict[str, Step] = {"forward": loss, "backward": backward, "both": both}
    passes["both, default cache"] = partial(both, None)
    records = [{**tags, "what": f"ours {what}", **clock(run, setting.on_gpu)} for what, run in passes.items()]
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
    chosen = [c for c in ALL.values() if not c.per_token]
    if not setting.on_gpu:
        chosen = [c for c in chosen if c.against in ("naive", "ours")]
    return [*chosen, *WITH_CACHE]


def cells(setting: Setting, name: str) -> Iterator[Measurement]:
    """Measure the backward of selected cells and its kernels at several shares of cells."""
    shape = setting.shapes[name]
    head = setting.head(shape)
    result = forward.head_forward(head)
    d_log_probs = torch.randn(shape.rows, device=setting.device) / shape.rows

    def run(share: float) -> list[Record]:
        choice = selected(head, shape.rows, share, setting.device)
        tags = {"shape": name, "batch": f"cells {share:g}"}
        step = partial(backward.head_backward, head, result, d_log_probs, None, BOTH, choice)
        kernels = ("gradient_tile", "hidden_product", "weight_product")
        operations = {kernel: share * shape.operations for kernel in kernels}
        record = {**tags, "what": "ours backward", **clock(step, setting.on_gpu)}
        return [record, *time_kernels(setting, step, tags, operations)]

    yield from ((f"cells {share:g}", partial(run, share)) for share in SHARES)


def selected(head: HeadRows, rows: int, share: float | None, device: torch.device | str) -> LiveTiles:
    """Choose the first `rows` rows, and a random share of their cells. A share of None chooses all columns."""
    cell = forward.cell_shape(head)
    rng = torch.Generator().manual_seed(0)
    assert cell is not None
    size = -(-len(head.mask) // cell[0]), -(-head.vocab_size // cell[1])
    cells = torch.rand(size, generator=rng) < (1.0 if share is None else share)
    cells[0, 0] = True
    cells[-(-rows // cell[0]) :] = False
    choice = LiveTiles(torch.arange(len(head.mask)), cells, torch.tensor([rows, int(share is not None)]))
    return LiveTiles(*(x.to(device) for x in choice))


def time_kernels(setting: Setting, step: Step, tags: Record, operations: dict[str, float]) -> list[Record]:
    """Time each kernel alone: all its launches in a step. `operations`: those on tensor cores, by kernel."""
    with launches() as seen:
        step()
    records = []
    for name in dict.fromkeys(x.kernel.__name__ for x in seen):
        of_kernel = [x for x in seen if x.kernel.__name__ == name]
        repeats = 20 if setting.on_gpu and name not in operations else 1  # CUDA events are coarse for a small kernel
        record = clock(replay(repeats * of_kernel, setting.on_gpu), setting.on_gpu, SECONDS / 3)
        record |= {key: record[key] / repeats for key in ("seconds", "p20", "p80")}
        if name in operations:
            record["TFLOP/s"] = operations[name] / record["seconds"] / 1e12
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


def profile(setting: Setting) -> Iterator[Measurement]:
    """Read the profiler's counters of a forward tile of shape A: tensor cores, L2 cache and memory."""
    options = "--csv --clock-control none --kernel-name forward_tile --launch-count 1 --kill yes --print-details all"
    for section in ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis"):
        options += f" --section {section}"

    def counters() -> list[Record]:
        with TemporaryDirectory() as folder:
            group_a = ["gspo_kernels.benchmarks", "gpu", "A", "--in-process", "--output", f"{folder}/gpu.json"]
            command = ["ncu", *options.split(), sys.executable, "-m", *group_a]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        rows = csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"'))
        read = {row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}".strip() for row in rows}
        absent = [name for name in COUNTERS if name not in read]
        fault = f"exit status {done.returncode}, no counters {', '.join(absent)}" if absent else ""
        counters = {name: read[name] for name in COUNTERS if name in read}
        return [{"what": "ncu: " + "; ".join(f"{n} {x}" for n, x in counters.items()), "fault": fault, **counters}]

    yield "profile", counters


def checks(setting: Setting) -> Iterator[Measurement]:
    """Run the tests that need a GPU: first the kernels at a model's sizes. The log has the failures after each part."""
    first = ["tests/backends/test_gpu.py", "tests/backends/test_model_sizes.py"]
    others = ["tests", "--ignore=tests/math", *(f"--ignore={path}" for path in first)]
    parts = {"kernels": first, "others": others, "math": ["tests/math"]}

    def run(what: str) -> list[Record]:
        options = ["-n", "12", "--dist", "worksteal", "-v"] if setting.on_gpu else ["--collect-only", "-q"]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *parts[what], *options]
        status = subprocess.run(command, cwd=ROOT).returncode
        return [{"what": f"pytest -m gpu, {what}", "fault": f"exit status {status}" if status else ""}]

    yield from ((what, partial(run, what)) for what in (parts if setting.on_gpu else ["kernels"]))
