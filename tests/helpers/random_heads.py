"""Random heads of a model's size on the device under test, and their outputs and gradients in float64.

Plain PyTorch in float64 is the truth. `tolerance.py` compares our errors with the errors of plain PyTorch in the dtype
of the operands. Plain PyTorch computes full logits for chunks of rows. It shares its inputs with the kernels, but no
code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from helpers.device import DEVICE
from tolerance import LOG_PROB_RMS_BF16X3, LOG_PROB_RMS_ON_GPUS, check, truncation
from torch import Tensor

from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.layout import accumulator
from gspo_kernels.ops.head import linear_log_probs_op
from gspo_kernels.reference import token_log_probs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy": dict(entropy=True),
    "softcap-scale": dict(logit_softcap=30.0, logit_scale=0.7),
    "bias": dict(bias=True),
    "temperature": dict(temperature="scalar"),
    "temperature-per-token": dict(temperature="token"),
    "padded-vocab": dict(padding=267),  # as in Qwen: 151,669 tokens, and a head with V = 151,936
    "adapter": dict(rank=16),
    "everything": dict(
        entropy=True, logit_softcap=30.0, logit_scale=0.7, bias=True, temperature="token", padding=267, rank=16
    ),
}
LEAVES = ("hidden", "weight", "bias", "adapter_hidden", "adapter_weight")
ROWS_AT_ONCE = 1024  # rows whose full logits in float64 fit into memory

Tensors = dict[str, Tensor]  # outputs by name, and gradients by "d_" + the name of the input


@dataclass(frozen=True)
class Sizes:
    """Sizes of the batches in a run. The sizes beyond 2^31 are only reached on a GPU."""

    vocab: int  # V
    width: int  # H
    wide: int  # H of a second, larger model
    rows: int  # rows that are compared with float64
    batch: int  # rows for bitwise comparisons and error distributions
    ragged: tuple[tuple[int, int, int], ...]  # N, H, V
    lengths: dict[int, int]  # length of a sequence -> number of such sequences in the test of clip decisions
    rounds: int  # repetitions of the test of clip decisions, each with other old log-probs
    many_rows: int  # many_rows * vocab exceeds 2^31 logits
    stride: int  # stride * vocab exceeds 2^31 elements of the head
    tall: tuple[int, int, int]  # N, H, V with N * H above 2^31


# On a GPU, the sizes are a model's. On a CPU, where kernels are interpreted, they are small: such a run only checks the
# tests themselves.
SIZES = (
    Sizes(
        vocab=300,
        width=64,
        wide=72,
        rows=20,
        batch=150,
        ragged=((1, 24, 17), (129, 24, 17)),
        lengths={16: 4, 64: 2},
        rounds=2,
        many_rows=140,
        stride=200,
        tall=(300, 16, 19),
    )
    if DEVICE.type == "cpu"
    else Sizes(
        vocab=151_936,
        width=896,
        wide=4096,
        rows=384,
        batch=8192,
        ragged=((127, 2881, 50_257), (1, 72, 257), (129, 72, 257)),
        lengths={16: 128, 64: 64, 256: 32, 1024: 8, 4096: 4},
        rounds=64,
        many_rows=16_384,
        stride=16_384,
        tall=(600_000, 4096, 521),
    )
)  # fmt: skip  # tables of sizes


class Upstream(NamedTuple):
    """Upstream gradients of a head's outputs. They are bf16 numbers, so that no dtype rounds them."""

    d_log_probs: Tensor  # [N]
    d_entropy: Tensor | None


def random_head(
    rows: int,
    width: int = SIZES.width,
    vocab: int = SIZES.vocab,
    dtype: torch.dtype = torch.bfloat16,
    *,
    std: float = 3.0,
    masked: bool = True,
    entropy: bool = False,
    bias: bool = False,
    padding: int = 0,
    rank: int = 0,
    temperature: str | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> HeadRows:
    """Return a head whose logits have the standard deviation `std`.

    Every third target is the likeliest token of its row.
    """
    rng = torch.Generator(DEVICE).manual_seed(0)
    wide = accumulator(dtype)
    columns = vocab - min(padding, vocab // 3)

    def randn(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=rng, device=DEVICE) * scale).to(to)

    hidden, weight = randn(rows, width), randn(vocab, width, scale=std / width**0.5)
    weight[columns:] = 100  # padding columns, which would get all the probability if they were not ignored
    ids = torch.randint(columns, (rows,), generator=rng, device=DEVICE)
    ids[::3] = (hidden[::3] @ weight[:columns].T).argmax(1)
    ids[0] = columns - 1
    mask = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    if masked:  # masked rows contain garbage
        mask = torch.rand(rows, generator=rng, device=DEVICE) > 0.2
        mask[0] = True
        ids.masked_fill_(~mask, -100)
        hidden.masked_fill_(~mask[:, None], torch.nan)
    temperatures = None
    if temperature is not None:
        shape = (rows,) if temperature == "token" else ()
        temperatures = torch.rand(shape, generator=rng, device=DEVICE, dtype=wide) + 0.5
    return HeadRows(
        hidden=hidden,
        weight=weight,
        bias=randn(vocab) if bias else None,
        adapter_hidden=randn(rows, rank, to=wide) if rank else None,
        adapter_weight=randn(vocab, rank, scale=0.1) if rank else None,
        target_ids=ids,
        mask=mask,
        temperature=temperatures,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=columns,
        entropy=entropy,
    )


def random_upstream(head: HeadRows) -> Upstream:
    """Return random upstream gradients of the outputs. They are zero for about a fifth of the rows."""
    rows = head.hidden.shape[0]
    rng = torch.Generator(DEVICE).manual_seed(1)

    def randn(scale: float) -> Tensor:
        x = (scale * torch.randn(rows, generator=rng, device=DEVICE)).bfloat16().to(accumulator(head.hidden.dtype))
        return torch.where(live, x, 0)

    live = torch.rand(rows, generator=rng, device=DEVICE) > 0.2
    live[0] = True
    return Upstream(randn(1.0), randn(0.3) if head.entropy else None)


def take_rows(head: HeadRows, rows: Any) -> HeadRows:
    return head._replace(hidden=head.hidden[rows], target_ids=head.target_ids[rows], mask=head.mask[rows])


def by_kernels(head: HeadRows, upstream: Upstream) -> Tensors:
    """Return outputs and gradients of the Triton kernels, through the operator and its autograd."""
    leaves = {n: x.detach().requires_grad_() for n in LEAVES if (x := getattr(head, n)) is not None}
    result = linear_log_probs_op(head._replace(**leaves), 0.0, 0, "triton").head
    outputs = {"log_probs": result.log_probs} | ({"entropy": result.entropy} if head.entropy else {})
    d_outputs = [x for x in upstream if x is not None]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), d_outputs)
    values = outputs | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in values.items()}


def by_torch(head: HeadRows, upstream: Upstream, dtype: torch.dtype) -> Tensors:
    """Return outputs and gradients, computed in `dtype` from full logits by autograd. Masked rows are 0.

    Gradients of chunks of rows are summed in the accumulator's dtype.
    """

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).requires_grad_()

    of_head = {n: leaf(x) for n in ("weight", "bias", "adapter_weight") if (x := getattr(head, n)) is not None}
    by_row = {n: x for n in ("hidden", "adapter_hidden") if (x := getattr(head, n)) is not None}
    outputs = {"log_probs": upstream.d_log_probs} | ({"entropy": upstream.d_entropy} if head.entropy else {})
    shapes = outputs | {f"d_{n}": x for n, x in (by_row | of_head).items()}
    wide = {f"d_{n}": accumulator(dtype) for n in of_head}
    totals = {n: torch.zeros_like(x, dtype=wide.get(n, dtype)) for n, x in shapes.items() if x is not None}
    for rows in head.mask.nonzero()[:, 0].split(ROWS_AT_ONCE):
        chunk = {n: leaf(x[rows]) for n, x in by_row.items()}
        values = _log_probs_of(head, rows, chunk, of_head, dtype)
        leaves = of_head | chunk
        d_outputs = [x[rows].to(dtype) for x in upstream if x is not None]
        gradients = torch.autograd.grad(list(values.values()), list(leaves.values()), d_outputs)
        for name, x in values.items():
            totals[name][rows] = x.detach()
        for name, g in zip(leaves, gradients, strict=True):
            if name in chunk:
                totals[f"d_{name}"][rows] = g
            else:
                totals[f"d_{name}"] += g
    return {name: x.to(dtype) for name, x in totals.items()}


def _log_probs_of(head: HeadRows, rows: Tensor, chunk: Tensors, of_head: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the outputs of a chunk of rows from their full logits."""
    hidden, weight = chunk["hidden"], of_head["weight"]
    if head.adapter_hidden is not None:  # compute the low-rank term by extending H with R columns
        hidden = torch.cat([hidden, chunk["adapter_hidden"]], 1)
        weight = torch.cat([weight, of_head["adapter_weight"]], 1)
    temperature: Tensor | float = 1.0
    if head.temperature is not None:
        temperature = (head.temperature[rows] if head.temperature.ndim else head.temperature).to(dtype)
    log_probs, entropy = token_log_probs(
        hidden,
        weight,
        head.target_ids[rows],
        of_head.get("bias"),
        head.logit_scale,
        head.logit_softcap,
        temperature,
        head.vocab_size,
    )
    return {"log_probs": log_probs} | ({"entropy": entropy} if head.entropy else {})


def assert_law(head: HeadRows, ours: Tensors, same_dtype: Tensors, truth: Tensors) -> None:
    """Assert that the error of every output and gradient is within the limit of `tolerance.py`."""
    assert ours.keys() == same_dtype.keys() == truth.keys()
    dtype = head.kernel_dtype
    more_rms = truncation_of(head)
    for name, x in ours.items():
        if name.startswith("d_"):
            check(name, x, same_dtype[name], truth[name], dtype)
        elif head.split:
            error = (x.double() - truth[name]).square().mean().sqrt()
            assert error <= LOG_PROB_RMS_BF16X3 + more_rms, f"{name} off by {error:.2e}"
        else:
            check(name, x, same_dtype[name], truth[name], accumulator(dtype), more_rms)


def assert_near(head: HeadRows, log_probs: Tensor, truth: Tensor) -> None:
    """Assert that the RMS error of log-probs is within the limit for GPUs."""
    error = (log_probs.double() - truth.double()).square().mean().sqrt().item()
    limit = LOG_PROB_RMS_ON_GPUS + truncation_of(head)
    assert error <= limit, f"log-probs off by {error:.2e}, allowed {limit:.2e}"


def truncation_of(head: HeadRows) -> float:
    """Return `tolerance.truncation` of a head. Soft-cap and bias, which tensor cores do not compute, are ignored."""
    dtype = head.kernel_dtype
    width = head.hidden.shape[1]
    if not truncation(DEVICE, dtype, width, 1.0):
        return 0.0
    weight = head.weight[: head.vocab_size].T
    chunks = head.hidden[head.mask].split(ROWS_AT_ONCE)
    largest = max((hidden @ weight).abs().max().item() for hidden in chunks)
    lowest = 1.0 if head.temperature is None else head.temperature.min().item()
    return truncation(DEVICE, dtype, width, largest * abs(head.logit_scale) / lowest)


def relative_rms(x: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return ((x.double() - truth).norm() / truth.norm().clamp(min=1e-300)).item()


def assert_same_bits(ours: Iterable[Tensor], expected: Iterable[Tensor], case: str = "") -> None:
    """Assert that no bit differs, including those of NaN and of signed zeros."""
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{case} {i}"
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        differing = int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
        assert not differing, f"{case} {i}: {differing} of {a.numel()} elements differ"
