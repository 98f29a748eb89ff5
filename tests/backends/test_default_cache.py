"""The default of `cache_mib`: at most 1/64 of a GPU's memory, and no more than the loss saves; 0 on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.compile_cases import meta_head
from helpers.counters import LiveBytes
from helpers.head_rows import head_rows
from torch._subclasses.fake_tensor import FakeTensorMode

from gspo_kernels import gspo_fused_loss, linear_log_probs, memory, metrics
from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends import workspace
from gspo_kernels.backends.rows import Cache, NeedsGradient
from gspo_kernels.backends.triton import tuning
from gspo_kernels.backends.workspace import cache_limit
from gspo_kernels.validation import Checks

MIB = 2**20
CALL = Checks("test")
H100, H200 = 85_017_624_576, 150_110_011_392  # total memory in bytes


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GSPO_CACHE_MIB", raising=False)


def see_gpus(monkeypatch: pytest.MonkeyPatch, *memories: int) -> None:
    """Let torch see GPUs with these total memories, all but 1 MiB of them in use. The first is the current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (MIB, memories[0]))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memories[device.index or 0])
    )


def test_the_default_is_a_64th_of_the_total_memory_of_the_operands_device(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, H100, H200)
    for device, expected in (("cuda", 1266), ("cuda:0", 1266), ("cuda:1", 2236), ("cpu", 0), ("meta", 0)):
        assert cache_limit(CALL, None, torch.device(device)) == expected * MIB


@pytest.mark.parametrize(
    ("variable", "argument", "expected"), [("7", None, 7), ("7", 0, 0), ("0", None, 0), ("7", 3, 3)]
)
def test_the_variable_replaces_the_default_and_the_argument_replaces_both(
    variable: str, argument: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, H100)
    monkeypatch.setenv("GSPO_CACHE_MIB", variable)
    for device in ("cuda", "cpu"):
        assert cache_limit(CALL, argument, torch.device(device)) == expected * MIB


def test_fake_tensors_on_a_gpu_that_does_not_exist_have_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        head = memory.Batch(8, 16, 32).head(torch.bfloat16, "cuda")
        assert cache_limit(CALL, None, head.hidden.device) == 0


def test_the_public_functions_keep_the_default_if_there_is_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_rows(6, 8, 20)
    hidden = head.hidden.view(2, 3, 8).requires_grad_()
    weight = head.weight.requires_grad_()
    ids = head.target_ids.view(2, 3)
    advantages = torch.tensor([1.0, -1.0])
    seen: list[torch.device] = []

    def of_device(device: torch.device) -> int:
        seen.append(device)
        return 1

    monkeypatch.setattr(workspace, "cache_of_device", of_device)
    monkeypatch.setattr(memory, "largest_default_cache", lambda *head: MIB)
    options: dict[str, Any] = dict(backend="torch")
    for argument, passes in (({}, 3.0), ({"cache_mib": 0}, 4.0)):
        out = gspo_fused_loss(hidden, weight, ids, advantages, **argument, **options)
        assert out.metrics["passes"] == passes
        linear_log_probs(hidden, weight, ids, **argument, **options).log_probs.sum().backward()
        assert metrics.last_backward()["passes"] == passes
    assert seen == [hidden.device] * 2
    with torch.no_grad():
        assert gspo_fused_loss(hidden, weight, ids, advantages, **options).metrics["passes"] == 1
    # A batch that is too small for its cache has none, but neither the argument nor the variable is bounded.
    monkeypatch.undo()
    monkeypatch.setattr(workspace, "cache_of_device", of_device)
    monkeypatch.delenv("GSPO_CACHE_MIB", raising=False)
    for argument, passes in (({}, 4.0), ({"cache_mib": 0.5}, 3.0)):
        assert gspo_fused_loss(hidden, weight, ids, advantages, **argument, **options).metrics["passes"] == passes
    monkeypatch.setenv("GSPO_CACHE_MIB", "1")
    assert gspo_fused_loss(hidden, weight, ids, advantages, **options).metrics["passes"] == 3


# H, V: Qwen2.5-0.5B, a small vocabulary, Qwen3-8B
HEADS = [(896, 151_936), (1536, 32_000), (4096, 151_936)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "vocab"), HEADS)
def test_the_default_takes_no_more_memory_than_what_it_replaces(
    width: int, vocab: int, dtype: torch.dtype, frozen: bool
) -> None:
    """Count the bytes of a step with entropies, as in TRL. TRL's head is called with half of the rows, and copies them.

    Without room for a cache there is none, so that the bound is then the memory without one.
    """
    needs = NeedsGradient(True, not frozen, False, False, False)
    item = dtype.itemsize
    kept_rows = []
    for n in (1000, 4096, 9000):
        head = meta_head(dtype=dtype, rows=n, width=width, vocab=vocab, entropy=True)
        stock = memory.trl_head_bytes(n // 2, width, vocab, item, frozen) + n // 2 * width * item
        most = min(stock, memory.full_logits_bytes(n, width, vocab, item, frozen))
        with tuning.assume("sm_90"):
            rows = kernels.cache_rows(head, memory.largest_default_cache(head, needs, "triton"))
            kept_rows.append(rows / n)
            with LiveBytes() as live:
                result, cached = kernels.forward_and_cache(head, cache=Cache(rows, head.mask) if rows else None)
                kernels.head_backward(head, result, torch.empty_like(result.log_probs), None, needs, cached=cached)
            assert live.peak <= (most if rows else memory.bound(head, "triton", 0, frozen).peak)
    if (width, dtype, frozen) == (4096, torch.bfloat16, False):
        assert kept_rows[1] == 1 and kept_rows[2] > 0.8  # 3 passes, and 3.1 with H200's 1/64
    assert not any(kept_rows) or dtype == torch.float32 or not frozen


def test_full_logits_take_three_copies_or_the_gradients_of_the_operands() -> None:
    assert memory.full_logits_bytes(10, 4, 100, 2) == 3 * 2 * 10 * 100
    assert memory.full_logits_bytes(10, 400, 100, 2) == 2 * (10 * 100 + 400 * (10 + 100))
    assert memory.full_logits_bytes(10, 400, 100, 2, frozen=True) == 2 * (10 * 100 + 400 * 10)


def test_a_sharded_head_replaces_full_logits() -> None:
    """TRL's head would take less memory than full logits here, but it cannot be sharded."""
    needs = NeedsGradient(True, True, False, False, False)
    head = memory.Batch(16_384, 4096, 152_064, tp=2).head(torch.bfloat16, "meta")
    with tuning.assume("sm_90"):
        ours = memory.bound(head, "triton", 0, tile_width=memory.NARROWEST_TILE).total
        full = memory.full_logits_bytes(16_384, 4096, 152_064 // 2, 2)
        assert memory.largest_default_cache(head, needs, "triton") == full - ours


@pytest.mark.parametrize(("autocast", "item"), [(False, 0), (True, 4)])
def test_the_default_knows_the_bytes_of_the_weight_that_autocast_casts(
    autocast: bool, item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(workspace, "cache_of_device", lambda device: 1)
    monkeypatch.setattr(memory, "largest_default_cache", lambda *head: seen.append(head[-1]) or MIB)
    head = head_rows(6, 8, 20)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_log_probs(head.hidden.requires_grad_(), head.weight, head.target_ids, backend="torch")
    assert seen == [item]


def test_the_bound_of_the_default_counts_the_copies_of_autocast() -> None:
    """Both casts of operands count, and autograd's fp32 copy of the weight's gradient, which is the peak here."""
    n, h, v = 5001, 2880, 200_000
    head = meta_head(rows=n, width=h, vocab=v)
    needs = NeedsGradient(True, True, False, False, False)
    ours = 4 * h * (n + v) + 2 * h * n + 4 * n * -(-v // 128) + 256 * MIB
    assert memory.largest_default_cache(head, needs, "triton", 4) == 2 * h * n + 6 * h * v - ours
    # Without a gradient of the weight there is no such copy. TRL's head casts only parts of the weight, so it takes
    # less memory than ours, and the bound leaves no room for a cache.
    assert memory.largest_default_cache(head, needs._replace(weight=False), "triton", 4) == 1
