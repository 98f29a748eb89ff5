"""The calls that run on the stub driver.

`PYTHONPATH=tests:. python -m stub.cases sm_90` runs them and prints a `Report` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from helpers.random_heads import by_kernels, random_head, random_upstream, take_rows

from gspo_kernels import KeptSets, Objective, gspo_fused_loss, linear_log_probs
from gspo_kernels.backends.triton.launch import launches

from . import driver

BUILD = Path(__file__).resolve().parent.parent.parent / "build" / "stub"
BUDGET, CACHE = dict(gradient_budget=1e-2), dict(cache_mib=10.0)
EXTRAS: dict[str, Any] = dict(entropy=True, bias=True, logit_softcap=30.0, logit_scale=0.7, temperature="token")
Options = dict[str, Any]


def _of_every_dtype() -> Iterator[tuple[str, Options]]:
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
        ("fp64", torch.float64),
    ):
        yield name, dict(dtype=dtype)
        yield f"{name} cache", dict(dtype=dtype, **CACHE)
        yield f"{name} budget", dict(dtype=dtype, **BUDGET)
        yield f"{name} budget and cache", dict(dtype=dtype, **BUDGET, **CACHE)
        yield f"{name} extras", dict(dtype=dtype, **EXTRAS)
        yield f"{name} adapter", dict(dtype=dtype, rank=16)


# Options of `step`, whose default dtype is bf16.
CASES: dict[str, Options] = {
    **dict(_of_every_dtype()),
    "no rows": dict(rows=0),
    "no rows, budget and cache": dict(rows=0, **BUDGET, **CACHE),
    "one row": dict(rows=1),
    "one row, budget and cache": dict(rows=1, **BUDGET, **CACHE),
    "H 1": dict(width=1),
    "H 7, V 5": dict(width=7, vocab=5),
    "H 72": dict(width=72, **BUDGET, **CACHE),
    "V 1": dict(vocab=1),
    "V 50257": dict(rows=20, width=64, vocab=50_257),
    "small workspace": dict(rows=1000, vocab=5000, workspace=1),
    "small workspace, budget": dict(rows=1000, vocab=5000, workspace=1, **BUDGET),
    "unaligned": dict(layout="unaligned"),
    "unaligned, budget and cache": dict(layout="unaligned", **BUDGET, **CACHE),
    "transposed": dict(layout="transposed"),
    "fp32 transposed": dict(layout="transposed", dtype=torch.float32, **BUDGET),
    "padded vocabulary": dict(padding=40),
    "extras and cache": EXTRAS | CACHE,
    "temperature": dict(temperature="scalar", **BUDGET, **CACHE),
    "every term of the loss": dict(objective=Objective(kl_coef=0.1, entropy_coef=0.1, dual_clip=3.0)),
    "ratio of tokens": dict(objective=Objective(ratio="token", kl_coef=0.1)),
    "log-probs": dict(public=False, entropy=True),
    "kept sets": dict(pairs="kept_sets", entropy=True),
    "kept sets, all options": dict(pairs="kept_sets", bias=True, logit_softcap=30.0, temperature="token", width=72),
    "fp32 extra ids": dict(public=False, pairs="extra_ids", dtype=torch.float32),
    "extra ids, cache": dict(public=False, pairs="extra_ids", **CACHE),
    "log-probs, cache": dict(public=False, **CACHE),
}
# A step with these options is captured after a step that has loaded its kernels.
CAPTURED: dict[str, Options] = {
    "exact": {},
    "cache": CACHE,
    "budget": BUDGET,
    "budget and cache": BUDGET | CACHE,
    "fp16 budget and cache": dict(dtype=torch.float16, **BUDGET, **CACHE),
    "fp32 budget and cache": dict(dtype=torch.float32, **BUDGET, **CACHE),
    "H 72, soft-cap, budget": dict(width=72, logit_softcap=30.0, **BUDGET),
    "extras": EXTRAS,
    "temperature, budget and cache": dict(temperature="token", **BUDGET, **CACHE),
}


def step(
    rows: int = 300,
    width: int = 128,
    vocab: int = 601,
    layout: str = "",
    workspace: int = 256,
    public: bool = True,
    objective: Objective = Objective(),  # noqa: B008 - frozen
    gradient_budget: float = 0.0,
    cache_mib: float = 0.0,
    pairs: str = "",  # kept_sets or extra_ids
    **of_head: Any,
) -> Callable[[], object]:
    """Return a function that runs forward and backward. `workspace` is in MiB; `of_head` goes to `random_head`."""
    os.environ["GSPO_WORKSPACE_MIB"] = str(workspace)
    head = take_rows(random_head(max(rows, 1), width, vocab, **of_head), slice(rows))
    if head.adapter_hidden is not None:  # the public functions take adapters from PEFT's modules only
        return partial(by_kernels, head, random_upstream(head))
    head = head._replace(hidden=laid_out(head.hidden, layout), weight=laid_out(head.weight, layout))
    hidden, weight = head.hidden.detach().requires_grad_(), head.weight.detach().requires_grad_()
    bias = None if head.bias is None else head.bias.detach().requires_grad_()
    options: Options = dict(
        bias=bias,
        temperature=1.0 if head.temperature is None else head.temperature,
        **{name: getattr(head, name) for name in ("mask", "logit_scale", "logit_softcap", "vocab_size", "entropy")},
        **dict(gradient_budget=gradient_budget, cache_mib=cache_mib, backend="triton"),
    )
    ids = (head.target_ids[:, None] + 7 * torch.arange(20)) % head.vocab_size
    if pairs:
        options[pairs] = ids if pairs == "extra_ids" else KeptSets.from_padded(ids, fill=-1)
    if public:
        options |= dict(cu_seqlens=torch.tensor([0, rows // 3, rows]), objective=objective)
        options |= dict.fromkeys(["old_log_probs", "ref_log_probs"][: 1 + (objective.kl_coef > 0)], torch.zeros(rows))

    def run() -> object:
        if public:
            loss = gspo_fused_loss(hidden, weight, head.target_ids, torch.ones(2), **options).loss
        else:
            out = linear_log_probs(hidden, weight, head.target_ids, **options)
            loss = torch.stack([x.sum() for x in out if x is not None]).sum()
        return torch.autograd.grad(loss, [x for x in (hidden, weight, bias) if x is not None])

    return run


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the matrix with other strides, or at an address that is not a multiple of 16 bytes."""
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "unaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


class Report(NamedTuple):
    faults: dict[str, str]  # of each case, "" if none
    counts: dict[str, dict[str, int]]  # of each case: modules, descriptors and launches
    kernels: list[str]  # names of those that were launched
    captured: dict[str, str]  # of each captured step, "" if it loaded no kernel


def report(stub: driver.Stub, names: list[str]) -> Report:
    """Run the cases `names`; if it is empty, all cases and captured steps."""
    faults, counts = {}, {}
    with launches() as seen:
        for name in names or CASES:
            before = stub.counts()
            faults[name] = fault_of(lambda name=name: step(**CASES[name])())
            counts[name] = {what: n - before[what] for what, n in stub.counts().items()}
    captured = {name: fault_of(partial(capture, stub, options)) for name, options in CAPTURED.items() if not names}
    kernels = sorted({x.kernel.__name__ for x in seen})
    return Report(faults, counts, kernels, captured)


def fault_of(run: Callable[[], object]) -> str:
    """Run the function, and return its error as text."""
    try:
        run()
    except Exception as error:  # any error: the other cases still run
        return f"{type(error).__name__}: {error}"
    return ""


def capture(stub: driver.Stub, options: Options) -> None:
    """Run a step, then capture it. No kernel is loaded before."""
    stub.forget_kernels()
    run = step(**options)
    run()
    with stub.capture():
        run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    architecture, *chosen = sys.argv[1:]
    the_stub = driver.Stub(architecture, BUILD / triton.__version__)
    print(json.dumps(report(the_stub, chosen)._asdict()))
