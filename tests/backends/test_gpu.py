"""Tests that need a GPU: peak memory, CUDA graphs, streams, host synchronisation, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.random_heads import SIZES, assert_same_bits, random_head, relative_rms, take_rows
from tolerance import RELATIVE_RMS
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.backends.rows import HeadRows
from gspo_kernels.backends.triton.cached_tile import cached_tile
from gspo_kernels.backends.triton.gradient_tile import gradient_tile
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.backends.triton.tuning import tile_config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device", "cached_memory_is_returned")]

WORKSPACE = 256 * 2**20  # bytes, the default of GSPO_WORKSPACE_MIB


def step(head: HeadRows, length: int, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward of on-policy GSPO on packed sequences of `length` tokens.

    The function takes no arguments, and returns loss, log-probs, d_hidden and d_weight.
    """
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


@pytest.mark.parametrize("entropy", [False, True])
def test_peak_memory_is_within_the_formula(entropy: bool) -> None:
    """Measure forward and backward of the fused loss, without its inputs."""
    rows = 32_768
    width = SIZES.wide
    head = random_head(rows, width, masked=False)
    step(take_rows(head, slice(512)), 256, entropy=entropy)()  # loads the kernels and allocates cuBLAS's workspace
    run = step(head, 1024, entropy=entropy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tiles = -(-SIZES.vocab // tile_config(head, "forward").block_v)
    gradients = head.hidden.nbytes + head.weight.nbytes
    limit = gradients + 4 * rows * tiles * (1 + entropy) + 2 * rows * width + WORKSPACE
    assert gradients <= peak <= limit, f"{peak / 2**20:.0f} MiB, {limit / 2**20:.0f} allowed"


@pytest.mark.parametrize("cache_mib", [0, None])
@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_step_has_the_bits_of_the_eager_step(
    masked: bool, cache_mib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured graph is replayed with the inputs of the capture, and with new inputs in the same memory."""
    monkeypatch.delenv("GSPO_CACHE_MIB", raising=False)
    head = random_head(SIZES.rows, masked=masked)
    run = step(head, 64, cache_mib=cache_mib)
    on_side_stream(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run()
    for numbers in ("captured", "new"):
        if numbers == "new":
            for x in (head.hidden, head.mask, head.target_ids):
                x.copy_(x.flip(0))
        graph.replay()
        first = [x.clone() for x in held]
        graph.replay()
        assert_same_bits(first, held, f"{numbers}, two replays")
        eager = run()
        # The eager step gathers the rows that have a gradient, the captured step computes all rows. If all rows have a
        # gradient, both make the same matrix products, so their gradients have the same bits.
        bitwise = 2 if masked else 4
        assert_same_bits(first[:bitwise], eager[:bitwise], f"{numbers}, eager")
        for ours, expected in zip(first[2:], eager[2:], strict=True):
            assert relative_rms(ours, expected) <= RELATIVE_RMS[torch.bfloat16]


@pytest.mark.parametrize("cache_mib", [0.0, 64.0])
def test_a_step_with_a_budget_is_captured_after_steps_that_compute_cells(cache_mib: float) -> None:
    """The captured backward computes all cells, with kernels and a cuBLAS handle that the capture cannot load."""
    head = random_head(SIZES.rows)
    options: tuple[dict[str, Any], ...] = ({}, dict(gradient_budget=0.9, cache_mib=cache_mib))
    steps = []
    for option in options:
        torch.manual_seed(0)  # the same advantages
        steps.append(step(head, 64, **option))
    exact, budget = steps
    torch.cuda.synchronize()
    for kernel in (gradient_tile, cached_tile):
        kernel.device_caches.clear()  # other tests may have loaded them
    with launches() as seen:
        on_side_stream(budget)
    assert "hidden_product" in {x.kernel.__name__ for x in seen}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = budget()
    graph.replay()
    expected = exact()
    assert_same_bits(held[:2], expected[:2])
    for ours, truth in zip(held[2:], expected[2:], strict=True):
        assert relative_rms(ours, truth) <= RELATIVE_RMS[torch.bfloat16]


def on_side_stream(run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = run()
    torch.cuda.current_stream().wait_stream(side)
    return results


def test_a_second_stream_gives_the_same_bits() -> None:
    """All kernels must run on the current stream, because this stream is still writing the inputs at their launch."""
    head = random_head(SIZES.batch)
    hidden = head.hidden.clone()
    run = step(head, 512)
    expected = run()
    head.hidden.zero_()

    def refill_and_run() -> tuple[Tensor, ...]:
        torch.cuda._sleep(10**8)  # about 50 ms, during which all other work is enqueued
        head.hidden.copy_(hidden)
        return run()

    assert_same_bits(on_side_stream(refill_and_run), expected)


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_the_forward_and_policy_loss_backward_do_not_synchronise(ratio: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPO_CACHE_MIB", raising=False)  # with the default cache
    objective = Objective(ratio=ratio, kl_coef=0.1, kl_ratio_factor=True, entropy_coef=0.1, dual_clip=2.0)
    head = random_head(SIZES.rows)
    ids = head.target_ids[None]
    mask = head.mask[None]
    hidden = head.hidden[None].requires_grad_()
    old = torch.full(ids.shape, -1.0, device=ids.device)
    options: dict[str, Any] = dict(
        mask=mask,
        old_log_probs=old,
        ref_log_probs=old,
        objective=objective,
        backend="triton",
        normalizer=torch.ones((), device=ids.device),
    )
    advantages = torch.ones(1, device=ids.device)
    try:
        for mode in ("default", "error"):  # the first iteration compiles and loads the kernels
            torch.cuda.set_sync_debug_mode(mode)
            gspo_fused_loss(hidden, head.weight, ids, advantages, **options)
            out = linear_log_probs(hidden, head.weight, ids, mask=mask, entropy=True, backend="triton")
            assert out.entropy is not None
            leaf = out.log_probs.detach().requires_grad_()
            policy_loss(leaf, advantages, entropy=out.entropy.detach(), **options).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_compile_has_no_graph_break_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPO_CACHE_MIB", raising=False)
    head = random_head(SIZES.rows)
    ids, mask = head.target_ids[None], head.mask[None]
    advantages = torch.ones(1, device=ids.device)

    def loss(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = gspo_fused_loss(hidden[None], weight, ids, advantages, mask=mask, backend="triton")
        return out.loss, out.log_probs

    def run(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (head.hidden, head.weight)]
        value, log_probs = function(*leaves)
        return [log_probs, *torch.autograd.grad(value, leaves)]

    torch.compiler.reset()
    assert_same_bits(run(torch.compile(loss, fullgraph=True)), run(loss))
