"""The cases of the compile gate: heads and objectives that together launch every kernel with every flag.

The gate (`compile_gate.py`) compiles kernels without a GPU. It runs the host code on meta tensors with the sizes of a
real model, and records the same launches as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.pairs import gradients_at, logits_at
from gspo_kernels.backends.rows import Cache, HeadRows, NeedsGradient, Pairs, PolicyRows
from gspo_kernels.backends.triton.backward import head_backward
from gspo_kernels.backends.triton.cells.backward import CellPlan, cell_backward, lists_of
from gspo_kernels.backends.triton.cells.lists import cell_lists
from gspo_kernels.backends.triton.forward import cache_rows, cell_shape, forward_and_cache
from gspo_kernels.backends.triton.gradient_rows import gradient_rows
from gspo_kernels.backends.triton.logit_tile import straighten
from gspo_kernels.backends.triton.sequence import policy_forward
from gspo_kernels.backends.triton.tuning import tile_config
from gspo_kernels.objective import Objective

# Options of `meta_head`, in addition to hidden states and weight in Qwen3-8B's shape.
_LOGIT_OPTIONS = dict(bias=True, logit_softcap=30.0, temperature=True)
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16 entropy": dict(entropy=True),
    "bf16 temperature": dict(entropy=True, temperature=True),
    "bf16 tail": dict(entropy=True, **_LOGIT_OPTIONS),
    "bf16 adapter": dict(rank=64),
    "bf16 everything": dict(entropy=True, rank=64, **_LOGIT_OPTIONS),
    "bf16 ragged": dict(width=2881, vocab=50_257),
    "bf16x3": dict(dtype=torch.float32, split="both"),  # the kernels of bf16 heads, as is the next
    "bf16x3 everything": dict(dtype=torch.float32, split="both", entropy=True, rank=64, **_LOGIT_OPTIONS),
    "fp16": dict(dtype=torch.float16),
    "fp16 everything": dict(dtype=torch.float16, entropy=True, rank=64, **_LOGIT_OPTIONS),
    "fp32": dict(dtype=torch.float32),
    "fp32 everything": dict(dtype=torch.float32, entropy=True, rank=64, **_LOGIT_OPTIONS),
    "fp64": dict(dtype=torch.float64),
    "fp64 everything": dict(dtype=torch.float64, entropy=True, rank=64, **_LOGIT_OPTIONS),
}
# Options of `meta_head` for the cases that run the sparse backward.
CELL_CASES: dict[str, dict[str, Any]] = {
    "bf16 cells": {},
    "bf16 cells tail": dict(logit_softcap=30.0, temperature=True),
    "bf16x3 cells": dict(dtype=torch.float32, split="both"),
    "fp16 cells": dict(dtype=torch.float16),
    "fp32 cells": dict(dtype=torch.float32),
    "fp64 cells": dict(dtype=torch.float64),
}
# Options of `meta_head` for the cases that keep the exponentials of all rows.
CACHE_CASES: dict[str, dict[str, Any]] = {
    "bf16 cache": {},
    "bf16 cache tail": dict(entropy=True, **_LOGIT_OPTIONS),
    "bf16x3 cache": dict(dtype=torch.float32, split="both"),
    "fp16 cache": dict(dtype=torch.float16),
    "fp32 cache": dict(dtype=torch.float32),
    "fp64 cache": dict(dtype=torch.float64),
}
# Options of `meta_head` for the cases of (row, id) pairs.
PAIR_CASES: dict[str, dict[str, Any]] = {
    "bf16 pairs": {},
    "bf16 pairs everything": dict(rank=64, **_LOGIT_OPTIONS),
    "bf16 pairs ragged": dict(width=2881, vocab=50_257),
    "fp16 pairs": dict(dtype=torch.float16),
    "fp32 pairs": dict(dtype=torch.float32),
    "fp64 pairs": dict(dtype=torch.float64),
}
OBJECTIVES: dict[str, Objective] = {
    "gspo": Objective(),
    "gspo everything": Objective(kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.1, dual_clip=3.0),
    "grpo everything": Objective(ratio="token", kl_coef=0.1, entropy_coef=0.1, aggregation="token-mean", delta=2.0),
    "gmpo": Objective(surrogate="gmpo", kl_coef=0.1),
    "cispo": Objective(ratio="token", surrogate="cispo", kl_coef=0.1, kl_estimator="unbiased"),
    "sapo": Objective(ratio="token", surrogate="sapo", kl_coef=0.1, kl_estimator="k3+"),
    "reinforce": Objective(ratio="token", surrogate="reinforce", kl_coef=0.1, kl_estimator="abs"),
    "none": Objective(ratio="sequence-token", surrogate="none", kl_coef=0.1, kl_estimator="k2"),
    "dppo_tv": Objective(ratio="token", surrogate="dppo_tv", kl_coef=0.1, kl_estimator="k2"),
    "dppo_kl": Objective(ratio="token", surrogate="dppo_kl", dual_clip=3.0),
    "vespo": Objective.preset("vespo", kl_coef=0.1, kl_estimator="unbiased"),
    "topr": Objective.preset("topr"),
}


# The heads compiled for each (H, V) of Llama 2, GPT-2, Llama 3, Qwen (small and large models) and Gemma. All shapes
# share their tile kernels, because H and V are ordinary arguments. The block-sparse products differ, and are compiled
# in bf16 only.
SHAPE_CASES = (
    "bf16",
    "bf16 entropy",
    "bf16 temperature",
    "fp16",
    "fp32",
    "bf16 cells",
    "bf16 cells added",
    "bf16 pairs",
)
SHAPES = [(h, v) for v in (32_000, 50_257, 128_256, 151_936, 152_064, 262_144) for h in (896, 2560, 4096)]


def runs(shape: tuple[int, int] | None = None) -> Iterator[tuple[str, torch.dtype, Callable[[], object]]]:
    """Yield (name, dtype, host call on meta tensors) for every case; with `shape` (H, V), for those in SHAPE_CASES."""
    heads = [(name, options, forward_and_backward) for name, options in CASES.items()]
    for ending, added in (("", False), (" added", True)):
        heads += [(name + ending, options, partial(live_cells, added=added)) for name, options in CELL_CASES.items()]
    heads += [(name, options, partial(forward_and_backward, with_cache=True)) for name, options in CACHE_CASES.items()]
    cached = partial(live_cells, added=False, with_cache=True)
    heads += [(name + " cache", options, cached) for name, options in CELL_CASES.items()]
    heads += [(name, options, pairs_of_head) for name, options in PAIR_CASES.items()]
    if shape is not None:
        sizes: dict[str, Any] = dict(width=shape[0], vocab=shape[1], rows=256)  # few rows: few slabs
        heads = [(name, options | sizes, run) for name, options, run in heads if name in SHAPE_CASES]
    for name, options, run in heads:
        head = meta_head(**options)
        yield name, head.hidden.dtype, partial(run, head)
    for name, objective in OBJECTIVES.items() if shape is None else ():
        for kind, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
            yield f"{name} {kind}", dtype, partial(loss, objective, dtype)


def meta_head(
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 8192,
    width: int = 4096,
    vocab: int = 151_936,
    rank: int = 0,
    bias: bool = False,
    temperature: bool = False,
    logit_softcap: float | None = None,
    entropy: bool = False,
    split: str = "",
) -> HeadRows:
    """Make a head on meta tensors. `rank`: rank of the LoRA adapter; 0: no adapter."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return HeadRows(
        empty(rows, width),
        empty(vocab, width),
        empty(vocab) if bias else None,
        empty(rows, rank, of=wide) if rank else None,
        empty(vocab, rank, of=wide) if rank else None,
        empty(rows, of=torch.int64),
        empty(rows, of=torch.bool),
        empty(rows, of=wide) if temperature else None,
        1.0,
        logit_softcap,
        vocab,
        entropy,
        split=split,
    )


def forward_and_backward(head: HeadRows, with_cache: bool = False) -> None:
    """Run forward and dense backward. If `with_cache`, cache the exponentials of all rows."""
    result, cached = forward_and_cache(head, cache=cache_of(head) if with_cache else None)
    d_entropy = torch.ones_like(result.entropy) if head.entropy else None
    head_backward(head, result, torch.ones_like(result.log_probs), d_entropy, _needs(head), cached=cached)


def _needs(head: HeadRows) -> NeedsGradient:
    return NeedsGradient(*(getattr(head, name) is not None for name in NeedsGradient._fields))


def cache_of(head: HeadRows) -> Cache:
    """Make a cache that is large enough for the exponentials of all rows."""
    size = (head.hidden.shape[0] + 127) * (head.vocab_size + 255) * head.hidden.dtype.itemsize  # with padding
    return Cache(cache_rows(head, size), head.mask)


def live_cells(head: HeadRows, added: bool, with_cache: bool = False) -> None:
    """Run forward and sparse backward. If `added`, two parts add their products; otherwise there is one part."""
    backward_of_cells(head, all_cells=added, chunks=1 + added, with_cache=with_cache)


def backward_of_cells(head: HeadRows, all_cells: bool, chunks: int | None = None, with_cache: bool = False) -> None:
    """Run forward and sparse backward, of all cells or of one cell.

    `chunks`: number of chunks of rows; None: as many as the library makes. If `with_cache`, cache the exponentials of
    all rows.
    """
    result, cached = forward_and_cache(head, tile_mass=True, cache=cache_of(head) if with_cache else None)
    cell = cell_shape(head)
    assert cell is not None
    config = tile_config(head, "gradient")
    device = head.hidden.device
    cells = torch.ones(-(-head.hidden.shape[0] // cell[0]), cached.tile_mass.shape[0], dtype=torch.bool)
    lists, _ = lists_of(head, cells.to(device), config)
    if chunks is not None:
        lists = cell_lists(cells.to(device), -(-cells.shape[0] // chunks))
    begin = [[0] + [1] * lists.tiles]
    first = 0
    for i, of_chunk in enumerate(cells.split(lists.row_blocks) if all_cells else ()):
        begin[i:] = [[first + len(of_chunk) * tile for tile in range(lists.tiles + 1)]]
        first = begin[i][-1]
    n = head.hidden.shape[0] if all_cells else min(config.block_n, head.hidden.shape[0])  # rows with a gradient
    order = torch.arange(n, device=device)
    d_log_probs = torch.ones_like(result.log_probs)
    rows = gradient_rows(straighten(head, config), result, d_log_probs, None, order, False, cached)
    needs = NeedsGradient(True, True, False, False, False)
    plan = CellPlan(n, True, lists, begin, lists.row_blocks * config.block_n)
    cell_backward(rows, head.vocab_size, config, needs, plan)


def pairs_of_head(head: HeadRows, ids_per_row: int = 16) -> None:
    """Compute the logits of (row, id) pairs, and the gradients of all operands."""
    n, device = head.hidden.shape[0], head.hidden.device
    empty = torch.empty(n * ids_per_row, dtype=torch.int64, device=device)
    pairs = Pairs(torch.empty(n + 1, dtype=torch.int64, device=device), empty, empty, empty > 0)
    logits, slope = logits_at(kernels, head, pairs)
    gradients_at(kernels, head, pairs, slope, logits, _needs(head))


def loss(objective: Objective, dtype: torch.dtype, rows: int = 8192, sequences: int = 16) -> None:
    """Run the loss kernels of an objective."""
    per_row = torch.empty(rows, dtype=dtype, device="meta")
    offsets = torch.empty(sequences + 1, dtype=torch.int64, device="meta")
    ref = weights = per_row if objective.kl_coef else None
    invalid = torch.empty((), dtype=torch.int64, device="meta")
    policy = PolicyRows(offsets, per_row, per_row, ref, weights, None, None, invalid)
    policy_forward(per_row, per_row if objective.entropy_coef else None, per_row > 0, policy, objective)
