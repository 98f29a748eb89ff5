"""How long the fused loss takes, beside the vendor's products of the same shapes and the loss on full logits."""

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
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton.launch import Launch, launch, launches

from .checks import Setting
from .heads import random_head

MODELS = {"qwen2.5-0.5b": 896, "qwen3-4b": 2560, "qwen3-8b": 4096}  # H; V of the run
LENGTH = 1024  # tokens of a sequence
SECONDS = 0.3  # for one number
Record = dict[str, Any]


def clock(fn: Callable[[], Any], device: torch.device, seconds: float = SECONDS) -> Record:
    """Median and 20th and 80th percentile in ms of a warm function, by events where the device has them.

    What is timed reads more than the caches hold, so runs need not take turns with other data.
    """
    fn()
    first = _once(fn, device)
    runs = int(min(max(seconds / (first / 1e3), 7), 100)) if device.type == "cuda" else 1
    times = sorted(_once(fn, device) for _ in range(runs))
    fifth = len(times) // 5
    return {"ms": statistics.median(times), "p20": times[fifth], "p80": times[-1 - fifth], "runs": runs}


def _once(fn: Callable[[], Any], device: torch.device) -> float:
    """One run in ms."""
    if device.type != "cuda":
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def heads(setting: Setting) -> Iterator[tuple[str, Callable[..., HeadRows]]]:
    """(name, how to make it on a device) of the heads that are timed."""
    for model, width in MODELS.items():
        yield f"times {model}", partial(random_head, 16, width, setting.sizes.vocab, torch.bfloat16)


def times(setting: Setting, full: bool) -> Iterator[tuple[str, Callable[[], list[Record]]]]:
    """(name, measurement) of everything timed."""
    yield "times copy", lambda: [copy_bandwidth(setting)]
    models, batches = MODELS, (8192, 32_768) if full else (8192,)
    if setting.device.type != "cuda":  # to see that it works
        models, batches = {"interpreted": setting.sizes.width}, (2 * setting.sizes.rows,)
    for (model, width), rows in itertools.product(models.items(), batches):
        yield f"times {model} N={rows}", partial(of_model, setting, width, rows)


def copy_bandwidth(setting: Setting) -> Record:
    """Bytes read and written by a copy from the device to itself."""
    source = torch.randn(2**30 if setting.device.type == "cuda" else 2**20, device=setting.device)
    target = torch.empty_like(source)
    found = clock(lambda: target.copy_(source), setting.device)
    return {"what": "copy", **found, "TB/s": 2 * source.nbytes / found["ms"] / 1e9}


def of_model(setting: Setting, width: int, rows: int) -> list[Record]:
    """The vendor's three products, our passes and kernels, and the loss on full logits."""
    found = vendor_products(setting, width, rows)
    ceiling = {r["what"]: r["ms"] for r in found}
    product = 2 * rows * width * setting.sizes.vocab  # operations of one
    forward, *backward = (ceiling[f"vendor {name}"] for name in ("h W'", "d_logits W", "d_logits' h"))
    # One product forward; backward the logits once more, and two.
    floor = {"forward": forward, "backward": forward + sum(backward), "both": 2 * forward + sum(backward)}
    passes = {"forward": 1, "backward": 3, "both": 4}
    batch = _batch(setting, width, rows)
    for who, loss in (("ours", _ours), ("full logits", _full_logits)):
        for what, fn in _passes(loss, batch).items():
            record: Record = {"what": f"{who} {what}"}
            try:
                record |= clock(fn, setting.device)
                if what == "both":
                    record |= _peak(fn, setting.device)
                if who == "ours":
                    record["TFLOP/s"] = passes[what] * product / record["ms"] / 1e9
                    record["vendor share"] = floor[what] / record["ms"]
            except torch.OutOfMemoryError:
                record["ms"] = None  # does not fit
            found.append(record)
    half = batch | {"advantages": batch["advantages"] * (torch.arange(len(batch["advantages"])) % 2).to(setting.device)}
    found.append({"what": "ours both, half of it advantage 0"} | clock(_both(_ours, half), setting.device))
    return found + kernels(setting, batch)


def vendor_products(setting: Setting, width: int, rows: int) -> list[Record]:
    """The three products of a step, with results in bf16 and in fp32."""
    vocab, device = setting.sizes.vocab, setting.device

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    hidden, weight, d_logits = randn(rows, width), randn(vocab, width), randn(rows, vocab)
    products = {"h W'": (hidden, weight.T), "d_logits W": (d_logits, weight), "d_logits' h": (d_logits.T, hidden)}
    found = []
    for name, (a, b) in products.items():
        variants: dict[str, dict[str, Any]] = {"": {}, " to fp32": {"out_dtype": torch.float32}}
        for suffix, options in variants.items():
            if options and device.type != "cuda":
                continue  # torch has it on CUDA alone
            record = clock(lambda a=a, b=b, options=options: torch.mm(a, b, **options), device)
            speed = 2 * rows * width * vocab / record["ms"] / 1e9
            found.append({"what": f"vendor {name}{suffix}", **record, "TFLOP/s": speed})
    return found


def _batch(setting: Setting, width: int, rows: int) -> dict[str, Tensor]:
    """Arguments of the loss: whole sequences, every token of which has a gradient."""
    head = setting.head(rows, width, masked=False)
    length = min(LENGTH, rows // 2)
    return {
        "hidden": head.hidden.view(-1, length, width).requires_grad_(),
        "lm_head": head.weight.requires_grad_(),
        "target_ids": head.target_ids.view(-1, length),
        "advantages": torch.randn(rows // length, device=setting.device),
    }


def _ours(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, advantages: Tensor) -> Tensor:
    return gspo_fused_loss(hidden, lm_head, target_ids, advantages, backend="triton").loss


def _full_logits(hidden: Tensor, lm_head: Tensor, target_ids: Tensor, advantages: Tensor) -> Tensor:
    """On-policy GSPO as trainers write it: bf16 logits, an fp32 softmax, autograd."""
    log_probs = torch.log_softmax((hidden @ lm_head.T).float(), -1).gather(-1, target_ids[..., None])[..., 0]
    ratio = (log_probs - log_probs.detach()).mean(1).exp()
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def _both(loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> Callable[[], object]:
    leaves = (batch["hidden"], batch["lm_head"])
    return lambda: torch.autograd.grad(loss(**batch), leaves)


def _passes(loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    kept: list[Tensor] = []

    def backward() -> object:
        if not kept:
            kept.append(loss(**batch))
        return torch.autograd.grad(kept[0], (batch["hidden"], batch["lm_head"]), retain_graph=True)

    def forward() -> object:
        kept.clear()
        return loss(**batch)

    def both() -> object:
        kept.clear()
        return _both(loss, batch)()

    return {"forward": forward, "backward": backward, "both": both}


def _peak(fn: Callable[[], object], device: torch.device) -> Record:
    """The most memory a run takes beyond what is there before it, gradients included."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    return {"peak GiB": (torch.cuda.max_memory_allocated() - before) / 2**30}


def kernels(setting: Setting, batch: dict[str, Tensor]) -> list[Record]:
    """Each kernel on its own: all its launches of one step, once more with the same arguments."""
    with launches() as seen:
        _both(_ours, batch)()
    found = []
    for name in dict.fromkeys(one.kernel.__name__ for one in seen):
        same = [one for one in seen if one.kernel.__name__ == name]
        once = clock(replay(same, setting.device), setting.device, SECONDS / 10)
        times = 1 if once["ms"] > 1 or setting.device.type != "cuda" else 20  # events are coarse beside a small kernel
        record = clock(replay(times * same, setting.device), setting.device, SECONDS / 3)
        record |= {key: record[key] / times for key in ("ms", "p20", "p80")}
        found.append({"what": f"kernel {name}", **record, "launches": len(same)})
    return found


def replay(some: list[Launch], device: torch.device) -> Callable[[], object]:
    """Launch them again; on a GPU from a captured graph, or a small kernel's time would be that of its launch."""

    def run() -> None:
        for one in some:
            launch(one.kernel, one.programs, one.config, **one.arguments)

    if device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
