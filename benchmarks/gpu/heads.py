"""Random heads, their log-probs and gradients from the kernels and from plain PyTorch, and what lies between the two.

Plain PyTorch in float64 is the truth; in the dtype of the operands it is what the law of `tests/tolerance.py` compares
errors with. It runs over chunks of rows with all their logits, so it shares nothing with the kernels but its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tolerance import check
from torch import Tensor

from gspo_kernels import ops
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.layout import accumulator
from gspo_kernels.reference import token_log_probs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy": dict(entropy=True),
    "soft-cap, scale": dict(logit_softcap=30.0, logit_scale=0.7),
    "bias": dict(bias=True),
    "temperature": dict(temperature="scalar"),
    "temperature per token": dict(temperature="token"),
    "padded vocabulary": dict(padding=267),  # Qwen's: 151,669 tokens in a head of 151,936 rows
    "adapter": dict(rank=16),
    "everything": dict(
        entropy=True, logit_softcap=30.0, logit_scale=0.7, bias=True, temperature="token", padding=267, rank=16
    ),
}
LEAVES = ("hidden", "weight", "bias", "adapter_hidden", "adapter_weight")
ROWS_AT_ONCE = 1024  # of full logits in float64


Tensors = dict[str, Tensor]  # by name: outputs, and gradients as "d_" and the input's


class NotHereError(Exception):
    """This device cannot run the check."""


@dataclass(frozen=True)
class Found:
    """What a check measured, how much of it is allowed, and what is wrong besides."""

    measured: dict[str, Any]
    limit: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Everything that makes the check fail, in words; NaN is within no limit."""
        over = [
            f"{name} is {self.measured[name]:.3g}, allowed {limit:.3g}"
            for name, limit in self.limit.items()
            if not self.measured[name] <= limit
        ]
        return over + self.wrong


def together(found: Iterable[Found]) -> Found:
    """Several findings as one; their names must differ."""
    measured, limit, wrong = {}, {}, []
    for one in found:
        measured, limit, wrong = measured | one.measured, limit | one.limit, wrong + one.wrong
    return Found(measured, limit, wrong)


class Upstream(NamedTuple):
    """What autograd hands to the backward; bf16 numbers, so that no dtype rounds them."""

    d_log_probs: Tensor  # [N]
    d_entropy: Tensor | None


def random_head(
    rows: int, width: int, vocab: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0, std: float = 3.0,
    masked: bool = True, entropy: bool = False, bias: bool = False, padding: int = 0, rank: int = 0,
    temperature: str | None = None, logit_scale: float = 1.0, logit_softcap: float | None = None,
) -> HeadRows:  # fmt: skip
    """A head with logits of standard deviation `std`. A third of the rows ask for their likeliest token."""
    rng = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    wide, columns = accumulator(dtype), vocab - min(padding, vocab // 3)

    def randn(*shape: int, scale: float = 1.0, of: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=rng, device=device) * scale).to(of)

    hidden, weight = randn(rows, width), randn(vocab, width, scale=std / width**0.5)
    weight[columns:] = 100  # would take all the probability
    ids = torch.randint(columns, (rows,), generator=rng, device=device)
    ids[::3] = (hidden[::3] @ weight[:columns].T).argmax(1)
    ids[0] = columns - 1
    mask = torch.ones(rows, dtype=torch.bool, device=device)
    if masked:  # and garbage where nothing counts
        mask = torch.rand(rows, generator=rng, device=device) > 0.2
        mask[0] = True
        ids.masked_fill_(~mask, -100)
        hidden.masked_fill_(~mask[:, None], torch.nan)
    heat = None
    if temperature is not None:
        heat = torch.rand(rows if temperature == "token" else (), generator=rng, device=device, dtype=wide) + 0.5
    return HeadRows(
        hidden, weight, randn(vocab) if bias else None,
        randn(rows, rank, of=wide) if rank else None, randn(vocab, rank, scale=0.1) if rank else None,
        ids, mask, heat, logit_scale, logit_softcap, columns, entropy,
    )  # fmt: skip


def random_upstream(head: HeadRows) -> Upstream:
    """Gradients of the outputs; zero for a fifth of the rows."""
    device, rows = head.hidden.device, head.hidden.shape[0]
    rng = torch.Generator(device).manual_seed(1)

    def randn(scale: float) -> Tensor:
        x = (scale * torch.randn(rows, generator=rng, device=device)).bfloat16().to(accumulator(head.hidden.dtype))
        return torch.where(live, x, 0)

    live = torch.rand(rows, generator=rng, device=device) > 0.2
    live[0] = True
    return Upstream(randn(1.0), randn(0.3) if head.entropy else None)


def by_kernels(head: HeadRows, upstream: Upstream) -> Tensors:
    """Log-probs, entropies and gradients."""
    leaves = {n: x.detach().requires_grad_() for n in LEAVES if (x := getattr(head, n)) is not None}
    result = ops.linear_log_probs(head._replace(**leaves), "triton")
    out = {"log_probs": result.log_probs} | ({"entropy": result.entropy} if head.entropy else {})
    d_out = [x for x in upstream if x is not None]
    gradients = torch.autograd.grad(list(out.values()), list(leaves.values()), d_out)
    found = out | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def by_torch(head: HeadRows, upstream: Upstream, dtype: torch.dtype) -> Tensors:
    """The same from full logits and autograd in `dtype`, zeros where the mask says so; chunks are added up in full."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).requires_grad_()

    of_head = {n: leaf(x) for n in ("weight", "bias", "adapter_weight") if (x := getattr(head, n)) is not None}
    by_row = {n: x for n in ("hidden", "adapter_hidden") if (x := getattr(head, n)) is not None}
    outputs = {"log_probs": upstream.d_log_probs}
    if upstream.d_entropy is not None:
        outputs["entropy"] = upstream.d_entropy
    like = outputs | {f"d_{n}": x for n, x in (by_row | of_head).items()}
    wide = {f"d_{n}": accumulator(dtype) for n in of_head}
    found = {n: torch.zeros(x.shape, dtype=wide.get(n, dtype), device=x.device) for n, x in like.items()}
    for rows in head.mask.nonzero()[:, 0].split(ROWS_AT_ONCE):
        chunk = {n: leaf(x[rows]) for n, x in by_row.items()}
        hidden, weight = chunk["hidden"], of_head["weight"]
        if head.adapter_hidden is not None:  # a low-rank term is more columns of the same product
            hidden = torch.cat([hidden, chunk["adapter_hidden"]], 1)
            weight = torch.cat([weight, of_head["adapter_weight"]], 1)
        log_probs, entropy = token_log_probs(
            hidden, weight, head.target_ids[rows], of_head.get("bias"), head.logit_scale, head.logit_softcap,
            1.0 if head.temperature is None else _of_rows(head.temperature, rows).to(dtype), head.vocab_size,
        )  # fmt: skip
        out = {"log_probs": log_probs} | ({"entropy": entropy} if head.entropy else {})
        d_out = [x[rows].to(dtype) for x in upstream if x is not None]
        leaves = of_head | chunk
        gradients = torch.autograd.grad(list(out.values()), list(leaves.values()), d_out)
        for name, x in out.items():
            found[name][rows] = x.detach()
        for name, g in zip(leaves, gradients, strict=True):
            if name in chunk:
                found[f"d_{name}"][rows] = g
            else:
                found[f"d_{name}"] += g
    return {name: x.to(dtype) for name, x in found.items()}


def _of_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows] if x.ndim else x


def compare(name: str, ours: Tensor, same_dtype: Tensor, truth: Tensor, dtype: torch.dtype) -> Found:
    """One output under the law: our error over the allowed one ("law", at most 1), and the error itself."""
    measured: dict[str, Any] = {
        f"{name} rms": relative_rms(ours, truth),
        f"{name} max": (ours.double() - truth.double()).abs().max().item(),
    }
    try:
        measured[f"{name} law"] = check(name, ours, same_dtype, truth, dtype)
    except AssertionError as broken:
        return Found(measured, wrong=[str(broken)])
    return Found(measured, {f"{name} law": 1.0})


def compare_all(ours: Tensors, same: Tensors, truth: Tensors, dtype: torch.dtype) -> Found:
    assert ours.keys() == same.keys() == truth.keys()
    kinds = {name: dtype if name.startswith("d_") else accumulator(dtype) for name in ours}
    return together(compare(name, ours[name], same[name], truth[name], kinds[name]) for name in ours)


def relative_rms(x: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return ((x.double() - truth).norm() / truth.norm().clamp(min=1e-300)).item()


def spread(error: Tensor, name: str = "log_prob") -> dict[str, float]:
    """Of per-token errors: standard deviation, bias, both together, largest."""
    error = error.double()
    return {
        f"{name} std": error.std(correction=0).item(),
        f"{name} bias": error.mean().item(),
        f"{name} error": error.square().mean().sqrt().item(),
        f"{name} max": error.abs().max().item(),
    }


def differing(a: Tensor, b: Tensor) -> int:
    """In how many elements the bits differ."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    assert a.dtype == b.dtype and a.shape == b.shape
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
