"""Time the fused loss and, for comparison, a copy, the vendor's matrix products, and the loss on full logits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton.launch import Launch, launch, launches

from ..candidates import full_log_probs
from ..measure import peak_bytes

LENGTH = 1024  # tokens per sequence
SECONDS = 0.3  # duration of one measurement
Record = dict[str, Any]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden [B, T, H], lm_head [V, H], target_ids [B, T], advantages [B]


@dataclass(frozen=True)
class Setting:
    device: torch.device
    widths: tuple[int, ...] = (896, 2560, 4096)  # H of Qwen2.5-0.5B, Qwen3-4B and Qwen3-8B
    vocab: int = 151_936  # V of Qwen
    rows: int = 8192  # N

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def head(self, width: int) -> HeadRows:
        """Return a bf16 head with logits of standard deviation 3 and every row unmasked."""
        rng = torch.Generator(self.device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, device=self.device)

        ids = torch.randint(self.vocab, (self.rows,), generator=rng, device=self.device)
        hidden, weight = randn(self.rows, width).bfloat16(), (randn(self.vocab, width) * (3 / width**0.5)).bfloat16()
        mask = torch.ones_like(ids).bool()
        return HeadRows(hidden, weight, None, None, None, ids, mask, None, 1.0, None, self.vocab, entropy=False)


def tiny(device: torch.device) -> Setting:
    """Return the sizes of a dry run."""
    return Setting(device, (64,), vocab=300, rows=150)


def times(setting: Setting) -> Iterator[tuple[str, Callable[[], list[Record]]]]:
    """Yield the name of each measurement and the function that makes it."""
    yield "copy", lambda: [copy_bandwidth(setting)]
    for width in setting.widths:
        yield f"H={width} V={setting.vocab} N={setting.rows}", partial(time_model, setting, width)


def clock(function: Callable[[], Any], on_gpu: bool, seconds: float = SECONDS) -> Record:
    """Return median, 20th and 80th percentile in ms of a function after warm-up. CUDA events measure GPU times.

    Runs repeat the same data. The timed functions read more data than the caches hold, so the caches do not help.
    """
    function()
    first = _time_once(function, on_gpu)
    runs = int(min(max(seconds / (first / 1e3), 7), 100)) if on_gpu else 1
    durations = sorted(_time_once(function, on_gpu) for _ in range(runs))
    fifth = len(durations) // 5
    return {"ms": statistics.median(durations), "p20": durations[fifth], "p80": durations[-1 - fifth], "runs": runs}


def _time_once(function: Callable[[], Any], on_gpu: bool) -> float:
    """Return the time of a run in ms."""
    if not on_gpu:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_bandwidth(setting: Setting) -> Record:
    """Time a copy from the device to itself."""
    source = torch.randn(2**30 if setting.on_gpu else 2**20, device=setting.device)
    target = torch.empty_like(source)
    record = clock(lambda: target.copy_(source), setting.on_gpu)
    return {"what": "copy", **record, "TB/s": 2 * source.nbytes / record["ms"] / 1e9}


def vendor_products(setting: Setting, width: int) -> list[Record]:
    """Time the three products of a step."""
    rows, vocab = setting.rows, setting.vocab

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)

    hidden, weight, d_logits = randn(rows, width), randn(vocab, width), randn(rows, vocab)
    products = {"h W'": (hidden, weight.T), "d_logits W": (d_logits, weight), "d_logits' h": (d_logits.T, hidden)}
    records = []
    for name, (a, b) in products.items():
        record = clock(partial(torch.mm, a, b), setting.on_gpu)
        records.append({"what": f"vendor {name}", **record, "TFLOP/s": 2 * rows * width * vocab / record["ms"] / 1e9})
    return records


def full_logits(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, advantages: Tensor) -> Tensor:
    """Return the on-policy GSPO loss in the PyTorch of trainers: bf16 logits, an fp32 softmax, autograd."""
    log_probs = full_log_probs(hidden.flatten(0, 1), lm_head, target_ids.flatten(), None).view_as(target_ids)
    ratio = (log_probs - log_probs.detach()).mean(1).exp()
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def fused(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, advantages: Tensor) -> Tensor:
    return gspo_fused_loss(hidden, lm_head, target_ids, advantages, backend="triton").loss


def time_model(setting: Setting, width: int) -> list[Record]:
    """Time the vendor's three products, our passes and kernels, and the loss on full logits."""
    records = vendor_products(setting, width)
    ceiling, product = {r["what"]: r["ms"] for r in records}, 2 * setting.rows * width * setting.vocab
    # The forward needs one product; the backward computes the logits again and needs two more.
    needed = {"forward": ["h W'"], "backward": ["h W'", "d_logits W", "d_logits' h"]}
    needed["both"] = needed["forward"] + needed["backward"]
    batch = _batch(setting, width)
    for name, loss in (("ours", fused), ("full logits", full_logits)):
        for what, function in _passes(loss, batch).items():
            record: Record = {"what": f"{name} {what}"}
            try:
                record |= clock(function, setting.on_gpu)
                if what == "both" and setting.on_gpu:
                    record["peak GiB"] = peak_bytes(function, setting.device) / 2**30  # including gradients
                if name == "ours":
                    record["TFLOP/s"] = len(needed[what]) * product / record["ms"] / 1e9
                    record["vendor share"] = sum(ceiling[f"vendor {name}"] for name in needed[what]) / record["ms"]
            except torch.OutOfMemoryError:
                record["ms"] = None  # out of memory
            records.append(record)
    half = (*batch[:3], batch[3] * (torch.arange(len(batch[3]), device=setting.device) % 2))
    records.append({"what": "ours both, half of it advantage 0"} | clock(_both(fused, half), setting.on_gpu))
    return records + time_kernels(setting, batch)


def _batch(setting: Setting, width: int) -> Batch:
    """Return a batch in which every token has a gradient."""
    head, length = setting.head(width), min(LENGTH, setting.rows // 2)
    hidden, weight = head.hidden.view(-1, length, width).requires_grad_(), head.weight.requires_grad_()
    return hidden, weight, head.target_ids.view(-1, length), torch.randn(setting.rows // length, device=setting.device)


def _both(loss: Loss, batch: Batch) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(*batch), batch[:2])


def _passes(loss: Loss, batch: Batch) -> dict[str, Callable[[], object]]:
    """Return forward, backward and both as functions without arguments."""
    graph: list[Tensor] = []  # holds the loss that `backward` differentiates again and again

    def backward() -> object:
        if not graph:
            graph.append(loss(*batch))
        return torch.autograd.grad(graph[0], batch[:2], retain_graph=True)

    def forward() -> object:
        graph.clear()
        return loss(*batch)

    def both() -> object:
        graph.clear()
        return _both(loss, batch)()

    return {"forward": forward, "backward": backward, "both": both}


def time_kernels(setting: Setting, batch: Batch) -> list[Record]:
    """Time each kernel alone: all its launches of one step, repeated with the same arguments."""
    with launches() as seen:
        _both(fused, batch)()
    records = []
    for name in dict.fromkeys(x.kernel.__name__ for x in seen):
        of_kernel = [x for x in seen if x.kernel.__name__ == name]
        once = clock(replay(of_kernel, setting.on_gpu), setting.on_gpu, SECONDS / 10)
        repeats = 1 if once["ms"] > 1 or not setting.on_gpu else 20  # CUDA events are coarse for a small kernel
        record = clock(replay(repeats * of_kernel, setting.on_gpu), setting.on_gpu, SECONDS / 3)
        record |= {key: record[key] / repeats for key in ("ms", "p20", "p80")}
        records.append({"what": f"kernel {name}", **record, "launches": len(of_kernel)})
    return records


def replay(seen: list[Launch], on_gpu: bool) -> Callable[[], object]:
    """Return a function that repeats the launches.

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
