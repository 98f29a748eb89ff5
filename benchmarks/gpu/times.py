"""Times of the fused loss beside a copy, the vendor's products of the same shapes, and the loss on full logits."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.triton.launch import Launch, launch, launches

from .setting import Setting

MODELS = {"qwen2.5-0.5b": 896, "qwen3-4b": 2560, "qwen3-8b": 4096}  # H; V is the run's
LENGTH = 1024  # tokens of a sequence
SECONDS = 0.3  # for one number
Record = dict[str, Any]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden [B, T, H], lm_head, target_ids, advantages


def times(setting: Setting, full: bool) -> Iterator[tuple[str, Callable[[], list[Record]]]]:
    """Yield (name, measurement) of everything timed."""
    yield "copy", lambda: [copy_bandwidth(setting)]
    models, batches = MODELS, (8192, 32_768) if full else (8192,)
    if setting.tiny_width is not None:
        models, batches = {"interpreted": setting.tiny_width}, (40,)
    for (model, width), rows in itertools.product(models.items(), batches):
        yield f"{model} N={rows}", partial(time_model, setting, width, rows)


def clock(function: Callable[[], Any], on_gpu: bool, seconds: float = SECONDS) -> Record:
    """Return median and 20th and 80th percentile in ms of a warm function, by events on a GPU.

    What is timed reads more than the caches hold, so runs need not take turns with other data.
    """
    function()
    first = _run_once(function, on_gpu)
    runs = int(min(max(seconds / (first / 1e3), 7), 100)) if on_gpu else 1
    durations = sorted(_run_once(function, on_gpu) for _ in range(runs))
    fifth = len(durations) // 5
    return {"ms": statistics.median(durations), "p20": durations[fifth], "p80": durations[-1 - fifth], "runs": runs}


def _run_once(function: Callable[[], Any], on_gpu: bool) -> float:
    """Return the time of one run in ms."""
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


# -- ceilings


def copy_bandwidth(setting: Setting) -> Record:
    """Time a copy from the device to itself."""
    source = torch.randn(2**30 if setting.on_gpu else 2**20, device=setting.device)
    target = torch.empty_like(source)
    record = clock(lambda: target.copy_(source), setting.on_gpu)
    return {"what": "copy", **record, "TB/s": 2 * source.nbytes / record["ms"] / 1e9}


def vendor_products(setting: Setting, width: int, rows: int) -> list[Record]:
    """Time the three products of a step, with results in bf16 and in fp32."""
    vocab = setting.vocab

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)

    hidden, weight, d_logits = randn(rows, width), randn(vocab, width), randn(rows, vocab)
    products = {"h W'": (hidden, weight.T), "d_logits W": (d_logits, weight), "d_logits' h": (d_logits.T, hidden)}
    suffixes: dict[str, Any] = {"": {}}
    if setting.on_gpu:  # PyTorch has this only on CUDA
        suffixes[" to fp32"] = {"out_dtype": torch.float32}
    records = []
    for (name, (a, b)), (suffix, options) in itertools.product(products.items(), suffixes.items()):
        record = clock(partial(torch.mm, a, b, **options), setting.on_gpu)
        speed = 2 * rows * width * vocab / record["ms"] / 1e9
        records.append({"what": f"vendor {name}{suffix}", **record, "TFLOP/s": speed})
    return records


def full_logits(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, advantages: Tensor) -> Tensor:
    """Compute on-policy GSPO as trainers write it: bf16 logits, an fp32 softmax, autograd."""
    log_probs = torch.log_softmax((hidden @ lm_head.T).float(), -1).gather(-1, target_ids[..., None])[..., 0]
    ratio = (log_probs - log_probs.detach()).mean(1).exp()
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


# -- the fused loss


def time_model(setting: Setting, width: int, rows: int) -> list[Record]:
    """Time the vendor's three products, our passes and kernels, and the loss on full logits."""
    records = vendor_products(setting, width, rows)
    ceiling = {r["what"]: r["ms"] for r in records}
    product = 2 * rows * width * setting.vocab  # operations of one
    forward, *backward = (ceiling[f"vendor {name}"] for name in ("h W'", "d_logits W", "d_logits' h"))
    # One product forward; backward the logits once more, and two.
    floor = {"forward": forward, "backward": forward + sum(backward), "both": 2 * forward + sum(backward)}
    passes = {"forward": 1, "backward": 3, "both": 4}
    batch = _batch(setting, width, rows)
    for name, loss in (("ours", fused), ("full logits", full_logits)):
        for what, function in _passes(loss, batch).items():
            record: Record = {"what": f"{name} {what}"}
            try:
                record |= clock(function, setting.on_gpu)
                if what == "both" and setting.on_gpu:
                    record |= _peak(function)
                if name == "ours":
                    record["TFLOP/s"] = passes[what] * product / record["ms"] / 1e9
                    record["vendor share"] = floor[what] / record["ms"]
            except torch.OutOfMemoryError:
                record["ms"] = None  # does not fit
            records.append(record)
    half = (*batch[:3], batch[3] * (torch.arange(len(batch[3]), device=setting.device) % 2))
    records.append({"what": "ours both, half of it advantage 0"} | clock(_both(fused, half), setting.on_gpu))
    return records + time_kernels(setting, batch)


def _batch(setting: Setting, width: int, rows: int) -> Batch:
    """Return whole sequences, every token of which has a gradient."""
    head = setting.head(rows, width)
    length = min(LENGTH, rows // 2)
    hidden, weight = head.hidden.view(-1, length, width).requires_grad_(), head.weight.requires_grad_()
    return hidden, weight, head.target_ids.view(-1, length), torch.randn(rows // length, device=setting.device)


def fused(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, advantages: Tensor) -> Tensor:
    return gspo_fused_loss(hidden, lm_head, target_ids, advantages, backend="triton").loss


def _both(loss: Loss, batch: Batch) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss(*batch), batch[:2])


def _passes(loss: Loss, batch: Batch) -> dict[str, Callable[[], object]]:
    """Return forward, backward and both as functions of no arguments."""
    graph: list[Tensor] = []  # the loss that `backward` differentiates again and again

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


def _peak(function: Callable[[], object]) -> Record:
    """Return the most memory that a run takes beyond what is there before it, gradients included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return {"peak GiB": (torch.cuda.max_memory_allocated() - before) / 2**30}


def time_kernels(setting: Setting, batch: Batch) -> list[Record]:
    """Time each kernel on its own: all its launches of one step, once more with the same arguments."""
    with launches() as seen:
        _both(fused, batch)()
    records = []
    for name in dict.fromkeys(x.kernel.__name__ for x in seen):
        same = [x for x in seen if x.kernel.__name__ == name]
        once = clock(replay(same, setting.on_gpu), setting.on_gpu, SECONDS / 10)
        repeats = 1 if once["ms"] > 1 or not setting.on_gpu else 20  # events are coarse beside a small kernel
        record = clock(replay(repeats * same, setting.on_gpu), setting.on_gpu, SECONDS / 3)
        record |= {key: record[key] / repeats for key in ("ms", "p20", "p80")}
        records.append({"what": f"kernel {name}", **record, "launches": len(same)})
    return records


def replay(seen: list[Launch], on_gpu: bool) -> Callable[[], object]:
    """Return a function that launches them again.

    On a GPU it replays a captured graph: the time of a small kernel would else be that of its launch.
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
