"""Cases of tests/distributed: bits of log-probs, and the number and bytes of collectives."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.features import make
from helpers.sharded_cases import Context, case
from helpers.sharded_features import H, N, rows, small_tiles
from helpers.sharded_runs import rank_in, shard_rows
from torch import Tensor

from gspo_kernels import gspo_fused_loss, linear_log_probs, memory, policy_loss, validation
from gspo_kernels.backends.torch.tiles import tiling
from gspo_kernels.ranks import agreement

GATHER = ("all_gather_into_tensor", "all_gather_single")

# -- bits


for _ranks in (2, 4, 8):
    for _backend in ("torch", "triton"):

        @case(f"bits tp {_ranks} {_backend}", _ranks)
        def _bits(context: Context, ranks: int = _ranks, backend: str = _backend) -> None:
            group = context.group(ranks)
            kinds = (torch.float32, torch.float64, torch.bfloat16) if backend == "torch" else (torch.float32,)
            with small_tiles(), warnings.catch_warnings():
                validation._warned.discard("unaligned shards")
                warnings.filterwarnings("error", message=".*last bits")  # aligned shards give no warning
                for dtype in kinds:
                    vocab = {torch.float64: 3840}.get(dtype, 8064) if backend == "torch" else 1024
                    options: dict[str, Any] = {"entropy": True, "backend": backend, "vocab_size": vocab - 70}
                    hidden, weight, ids = rows(vocab, dtype)
                    ids = ids.clamp(max=vocab - 71)
                    heads: tuple[dict[str, Any], ...] = ({}, {"logit_softcap": 3.0, "temperature": 0.7})
                    for capped in heads:
                        one = linear_log_probs(hidden, weight, ids, **options, **capped)
                        out = linear_log_probs(
                            hidden, shard_rows(weight, group), ids, tp_group=group, **options, **capped
                        )
                        assert torch.equal(out.log_probs, one.log_probs), dtype
                        assert torch.equal(out.entropy, one.entropy), dtype  # pyright: ignore[reportArgumentType]


@case("unaligned shards are warned of", 2)
def _unaligned(context: Context) -> None:
    group = context.group(2)
    hidden, weight, ids = rows(40)
    validation._warned.discard("unaligned shards")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear_log_probs(hidden, shard_rows(weight, group), ids, tp_group=group)
    assert "last bits" in str([x.message for x in caught])


# -- collectives


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Record (name, bytes that a rank sends) of every collective. Values are not checked, as on a GPU."""
    calls: list[tuple[str, int]] = []
    names = [
        name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "send"))
    ]

    def record(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[1] if name in GATHER else args[0]
            kind = "gather" if name in GATHER else name
            calls.append((kind, tensor.nbytes if isinstance(tensor, Tensor) else -1))
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            if callable(getattr(dist, name)) and not isinstance(getattr(dist, name), type):
                stack.enter_context(mock.patch.object(dist, name, record(name)))
        for module, name in ((validation, "values_are_checked"), (agreement, "compares_every_call")):
            stack.enter_context(mock.patch.object(module, name, lambda device: False))
        yield calls


@case("collectives tp", 2)
def _collectives_tp(context: Context) -> None:
    group = context.group(2)
    vocab = 1024
    hidden, weight, ids = rows(vocab)
    local, tile = shard_rows(weight, group), 128  # the Triton backend's fp32 tiles
    tiles = vocab // 2 // tile

    def run(needs: tuple[bool, bool], backend: str = "triton", **options: Any) -> tuple[list[Any], list[Any]]:
        h, w = hidden.clone().requires_grad_(needs[0]), local.clone().requires_grad_(needs[1])
        with counted() as forward:
            out = linear_log_probs(h, w, ids, tp_group=group, backend=backend, **options)
        with counted() as backward:
            out.log_probs.sum().backward()
        return forward, backward

    run((True, True))  # the first call with a group compares arguments
    table = [("gather", 4 * N * (2 * tiles + 1))]
    with_entropy = [("gather", 4 * N * (3 * tiles + 1))]
    d_hidden = [("all_reduce", 4 * N * H)]
    of_torch = tiling(memory.Batch(N, H, vocab, tp=2).head(torch.float32))
    padded, tiles = -(-N // of_torch.rows) * of_torch.rows, -(-vocab // 2 // of_torch.columns)
    for numbers in (2, 3):
        results = 4 * padded * (numbers * tiles + 1)
        assert run((True, True), backend="torch", entropy=numbers == 3) == ([("gather", results)], d_hidden)
    assert run((True, True)) == (table, d_hidden)
    assert run((True, True), entropy=True) == (with_entropy, d_hidden)
    assert run((True, True), gradient_budget=0.01) == (table, d_hidden)
    assert run((True, True), cache_mib=1.0) == (table, d_hidden)
    assert run((True, True), reduce_hidden="none") == (table, [])
    assert run((True, False)) == (table, d_hidden)  # frozen head
    assert run((False, True)) == (table, [])


@case("collectives cp", 2)
def _collectives_cp(context: Context) -> None:
    sample = make("kl=term")
    group = context.group(2)
    sequences, longest = sample.mask.shape
    half = longest // 2
    mine = slice(0, half) if rank_in(group) == 0 else slice(half, None)

    def run() -> list[Any]:
        options = {name: sample.tokens[name][:, mine] for name in ("mask", "old_log_probs", "ref_log_probs")}
        with counted() as calls:
            log_probs = torch.full_like(options["old_log_probs"], -1.0).requires_grad_()
            out = policy_loss(
                log_probs, sample.tokens["advantages"], objective=sample.objective, cp_group=group, **options
            )
            out.loss.backward()
        return calls

    run()
    assert run() == [("gather", 8 * 3 * sequences), ("gather", 8 * 8 * sequences)]  # 7 sums, and that of the KL
    tokens = rows(64)[0].expand(sequences, -1, -1)
    vocab = rows(64)[1]

    def fused(**options: Any) -> list[Any]:
        with counted() as calls:
            ids = torch.zeros(tokens.shape[:2], dtype=torch.int64)
            hidden = tokens.clone().requires_grad_()
            gspo_fused_loss(hidden, vocab, ids, torch.ones(sequences), cp_group=group, **options).loss.backward()
        return calls

    fused()
    sums = [("gather", 8 * 3 * sequences), ("gather", 8 * 7 * sequences)]
    assert fused() == sums
    assert fused(cache_mib=1.0) == [*sums, ("gather", 8 * 6)]  # the work of the backward
