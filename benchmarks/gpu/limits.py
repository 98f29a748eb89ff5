"""What only large batches and the device itself show: offsets past 2^31, memory, captured graphs, vendor products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tolerance import RELATIVE_RMS
from torch import Tensor

from gspo_kernels import gspo_fused_loss
from gspo_kernels.backends.precision import add_product
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton.tuning import tile_config

from .checks import Check, Setting
from .heads import (
    DTYPES,
    Found,
    NotHereError,
    Tensors,
    by_kernels,
    by_torch,
    compare_all,
    differing,
    random_head,
    random_upstream,
    relative_rms,
    together,
)

# Rounding a result to fp16 errs by 2e-4 of it and to bf16 by 1.7e-3; accumulation in fp32 stays below.
ACCUMULATED_IN_FP32 = 1e-4
WORKSPACE = 256 * 2**20  # bytes, the default of GSPO_WORKSPACE_MIB


def checks(setting: Setting) -> Iterator[tuple[str, Check]]:
    """(name, check) of everything here."""
    yield "past 2^31: logits", partial(many_logits, setting)
    for dtype in ("bf16", "fp32"):
        yield f"past 2^31: head {dtype}", partial(far_apart_head, setting, dtype)
    yield "past 2^31: hidden states", partial(many_hidden_states, setting)
    for entropy in (False, True):
        yield f"peak memory{' with entropy' if entropy else ''}", partial(peak_memory, setting, entropy)
    for dtype in ("bf16", "fp16"):
        yield f"vendor product {dtype}", partial(products_accumulate_in_fp32, setting, dtype)
    yield "captured graph", partial(replays_bitwise, setting)
    yield "torch.compile", partial(compiles_whole, setting)


def heads(setting: Setting) -> Iterator[tuple[str, Callable[..., HeadRows]]]:
    """(name, how to make it on a device) of the heads of these checks that no other check has."""
    sizes = setting.sizes
    yield "past 2^31: hidden states", partial(random_head, *sizes.tall, DTYPES["bf16"])
    wide = (sizes.rows, sizes.wide, sizes.vocab)
    yield "peak memory with entropy", partial(random_head, *wide, DTYPES["bf16"], entropy=True)


def only_on_cuda(setting: Setting) -> None:
    if setting.device.type != "cuda":
        raise NotHereError("needs a CUDA device")


def many_logits(setting: Setting) -> Found:
    """Every logit of N V > 2^31 takes part in forward and backward."""
    head = setting.head(setting.sizes.many_rows, masked=False)
    upstream, dtype = random_upstream(head), head.hidden.dtype
    ours = by_kernels(head, upstream)
    found = compare_all(ours, by_torch(head, upstream, dtype), by_torch(head, upstream, torch.float64), dtype)
    return together([Found({"elements": head.hidden.shape[0] * head.weight.shape[0]}), found])


def far_apart_head(setting: Setting, dtype: str) -> Found:
    """A head whose rows lie so far apart that its last ones start past 2^31 elements."""
    head = setting.head(setting.sizes.rows, dtype=dtype)
    room = head.weight.new_empty(setting.sizes.vocab, setting.sizes.stride)
    apart = head._replace(weight=room[:, : setting.sizes.width].copy_(head.weight))
    upstream = random_upstream(head)
    near, far = by_kernels(head, upstream), by_kernels(apart, upstream)
    found: dict[str, float] = {"log_probs differ": differing(near["log_probs"], far["log_probs"])}
    limit: dict[str, float] = {"log_probs differ": 0}
    for name in ("d_hidden", "d_weight"):  # the vendor's product may add up in another order
        found[f"{name} rms"] = relative_rms(far[name], near[name])
        limit[f"{name} rms"] = RELATIVE_RMS[DTYPES[dtype]]
    return Found({"elements": room.numel()} | found, limit)


def many_hidden_states(setting: Setting) -> Found:
    """N H > 2^31; of d_hidden the first and last rows are compared, and those around the boundary."""
    rows, width, vocab = setting.sizes.tall
    head = random_head(rows, width, vocab, DTYPES["bf16"], setting.device, masked=False)
    upstream, dtype = random_upstream(head), head.hidden.dtype
    boundary = min(2**31 // width, rows - 50)
    some = torch.tensor([*range(100), *range(boundary - 50, boundary + 50), *range(rows - 100, rows)])

    def cut(found: Tensors) -> Tensors:
        return found | {"d_hidden": found["d_hidden"][some.to(setting.device)].clone()}

    ours = cut(by_kernels(head, upstream))
    same, truth = (cut(by_torch(head, upstream, of)) for of in (dtype, torch.float64))
    return together([Found({"elements": head.hidden.numel()}), compare_all(ours, same, truth, dtype)])


def _loss(head: HeadRows, length: int, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """On-policy GSPO of packed sequences of `length` tokens: () -> (loss, log-probs, d_hidden, d_weight)."""
    hidden, weight = head.hidden.detach().requires_grad_(), head.weight.detach().requires_grad_()
    rows = head.hidden.shape[0]
    offsets = torch.arange(0, rows + length, length, device=hidden.device).clamp_(max=rows)
    advantages = torch.randn(len(offsets) - 1, device=hidden.device)

    def run() -> tuple[Tensor, ...]:
        out = gspo_fused_loss(
            hidden, weight, head.target_ids, advantages, mask=head.mask, cu_seqlens=offsets, backend="triton", **options
        )
        return out.loss, out.log_probs, *torch.autograd.grad(out.loss, (hidden, weight))

    return run


def peak_memory(setting: Setting, entropy: bool) -> Found:
    """Of forward and backward of the fused loss, beyond its inputs."""
    only_on_cuda(setting)
    rows, width = setting.sizes.memory_rows, setting.sizes.wide
    head = setting.head(rows, width, masked=False)
    few = head._replace(hidden=head.hidden[:512], target_ids=head.target_ids[:512], mask=head.mask[:512])
    _loss(few, 256, entropy=entropy)()  # kernels are loaded, the vendor library has its own workspace
    run = _loss(head, 1024, entropy=entropy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    tiles = -(-setting.sizes.vocab // tile_config(head, "forward").block_v)
    gradients = head.hidden.nbytes + head.weight.nbytes
    allowed = gradients + 4 * rows * tiles * (1 + entropy) + 2 * rows * width + WORKSPACE
    measured = {"bytes": peak, "gradients alone": gradients, "full bf16 logits": 2 * rows * setting.sizes.vocab}
    return Found(measured, {"bytes": allowed})


def products_accumulate_in_fp32(setting: Setting, dtype: str) -> Found:
    """The products of the backward add half operands to fp32 sums without rounding to half in between."""
    n, v, h = setting.sizes.batch, setting.sizes.batch // 2, setting.sizes.width
    rng = torch.Generator(setting.device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=setting.device)

    d_logits = randn(n, v + 8).to(DTYPES[dtype])[:, :v]  # padded rows, as the backward's are
    hidden, weight = randn(n, h).to(DTYPES[dtype]), randn(v, h).to(DTYPES[dtype])
    measured = {}
    for name, a, b in (("d_hidden", d_logits, weight), ("d_weight", d_logits.T, hidden)):
        start = 10 * randn(a.shape[0], h)  # so that a sum which is overwritten shows
        into, truth = start.clone(), start.double() + a.double() @ b.double()
        add_product(into, a, b)
        measured[f"{name} rms"] = relative_rms(into, truth)
    return Found(measured, dict.fromkeys(measured, ACCUMULATED_IN_FP32))


def replays_bitwise(setting: Setting) -> Found:
    """A captured step replays with the bits of the eager one, also on new numbers in the same memory."""
    only_on_cuda(setting)
    measured: dict[str, float] = {}
    for kind, masked in (("all rows", False), ("masked", True)):
        head = setting.head(setting.sizes.rows, masked=masked)
        run = _loss(head, 64)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = run()
        for turn in ("captured", "new"):
            if turn == "new":
                head.hidden.copy_(head.hidden.flip(0))
                head.mask.copy_(head.mask.flip(0))
                head.target_ids.copy_(head.target_ids.flip(0))
            graph.replay()
            first = [x.clone() for x in held]
            graph.replay()
            measured[f"{kind}, {turn}: replays differ"] = sum(map(differing, first, held))
            eager = run()
            # Eager gathers the rows that have a gradient; where all have one, the products are the same calls.
            same = first if not masked else first[:2]
            measured[f"{kind}, {turn}: differs from eager"] = sum(map(differing, same, eager))
            for name, ours, theirs in zip(("d_hidden", "d_weight"), first[2:], eager[2:], strict=True):
                measured[f"{kind}, {turn}: {name} rms"] = relative_rms(ours, theirs)
    near = RELATIVE_RMS[torch.bfloat16]
    return Found(measured, {name: near if name.endswith("rms") else 0 for name in measured})


def compiles_whole(setting: Setting) -> Found:
    """One graph without a break; the operators inside it are the same, so log-probs and gradients are too."""
    head = setting.head(setting.sizes.rows)
    ids, mask = head.target_ids[None], head.mask[None]
    advantages = torch.ones(1, device=setting.device)

    def loss(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = gspo_fused_loss(hidden[None], weight, ids, advantages, mask=mask, backend="triton")
        return out.loss, out.log_probs

    def run(fn: Any) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (head.hidden, head.weight)]
        value, log_probs = fn(*leaves)
        return [log_probs, *torch.autograd.grad(value, leaves)]

    torch.compiler.reset()
    # On a CPU the C++ compiler would take longer than everything else.
    backend = "inductor" if setting.device.type == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    names = ("log_probs", "d_hidden", "d_weight")
    measured = {name: differing(a, b) for name, a, b in zip(names, run(loss), run(compiled), strict=True)}
    return Found(measured, dict.fromkeys(measured, 0))
