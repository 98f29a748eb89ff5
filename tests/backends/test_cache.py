"""`cache_mib`: exponentials that the forward keeps, and log-probs with a gradient budget."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.array import arguments_of, leaves_of, of_function
from helpers.device import DEVICE, gspo_fused_loss, linear_log_probs, on_device
from helpers.features import DTYPES, make
from helpers.head_rows import NEEDS
from helpers.random_heads import assert_law, by_torch, random_head, random_upstream
from helpers.tile_choices import small_tiles
from torch import Tensor

from gspo_kernels import memory, metrics
from gspo_kernels.backends import dispatch
from gspo_kernels.backends.rows import Cache, Cached
from gspo_kernels.backends.triton import backward, gradient_rows
from gspo_kernels.ops.head import linear_log_probs_op
from gspo_kernels.ranks.shards import Shard

HEADS: dict[str, dict[str, Any]] = {
    "tail": dict(entropy=True, bias=True, logit_softcap=6.0, temperature="token", logit_scale=0.5, padding=7),
    "adapter": dict(rank=4),
}


def log_probs_and_gradients(head: Any, upstream: Any, backend: str, cache_bytes: int) -> dict[str, Tensor]:
    names = [
        n for n in ("hidden", "weight", "bias", "adapter_hidden", "adapter_weight") if getattr(head, n) is not None
    ]
    leaves = {n: getattr(head, n).detach().requires_grad_() for n in names}
    result = linear_log_probs_op(head._replace(**leaves), 0.0, cache_bytes, backend).head
    outputs = {"log_probs": result.log_probs} | ({"entropy": result.entropy} if head.entropy else {})
    gradients = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), [x for x in upstream if x is not None]
    )
    return {n: x.detach() for n, x in outputs.items()} | {f"d_{n}": g for n, g in zip(names, gradients, strict=True)}


@on_device
@pytest.mark.parametrize(("dtype", "options"), [("bf16", "tail"), ("bf16x3", "tail"), ("bf16x3", "adapter")])
@small_tiles(128, 4032)  # as on a CPU: the torch backend's tiles on a GPU have more rows than this batch
def test_every_cache_size_keeps_bits_of_log_probs_and_the_law_of_gradients(
    dtype: str, options: str, backend: str
) -> None:
    head = random_head(300, 24, 410, DTYPES.get(dtype, torch.float32), **HEADS[options])
    head = head._replace(split="both" if dtype == "bf16x3" and backend == "triton" else "")
    upstream = random_upstream(head)
    none = log_probs_and_gradients(head, upstream, backend, 0)
    truth = by_torch(head, upstream, torch.float64)
    same = by_torch(head, upstream, head.kernel_dtype)
    kernels = dispatch.implementation(backend)
    itemsize = head.kernel_dtype.itemsize
    for size in (140 * 512 * itemsize, 1 << 24):  # a row block or two, and all rows
        assert 0 < kernels.cache_rows(head, size)
        ours = log_probs_and_gradients(head, upstream, backend, size)
        for name in ("log_probs", "entropy"):
            assert name not in ours or torch.equal(ours[name], none[name])
        assert_law(head, ours, same, truth)
        assert (metrics.last_backward()["passes"] == 1 + 2 * metrics.last_backward()["live_row_share"]) == (
            size == 1 << 24
        )


def test_all_ranks_of_a_vocabulary_keep_equally_many_rows(backend: str) -> None:
    """The three ranks hold 256, 154 and 0 of the 410 columns."""
    batch, kept = memory.Batch(3000, 24, 410, tp=3), set()
    for rank in range(3):
        shard = Shard("", rank, 3, batch.rows_of_weight, 410)
        head = batch.head(torch.bfloat16, DEVICE)._replace(shard=shard.text, vocab_size=shard.columns())
        kept.add(dispatch.implementation(backend).cache_rows(head, 2**19))
    assert len(kept) == 1 and 0 < kept.pop() < 3000


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_captured_backward_uses_the_cache(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured, all rows are gathered. NaN hidden states of rows without a gradient do no harm."""
    head = random_head(300, 24, 410, DTYPES[dtype])
    kernels: Any = dispatch.implementation("triton")
    d = torch.where(head.mask & (torch.arange(300) % 3 != 0), torch.linspace(-1, 1, 300), 0)
    head.hidden[d == 0] = torch.nan
    cache = Cache(kernels.cache_rows(head, 140 * 512 * head.hidden.itemsize), head.mask)
    result, of_forward = kernels.forward_and_cache(head, cache=cache)
    expected = kernels.head_backward(head, result, d, None, NEEDS, None, of_forward)
    for module in (gradient_rows, backward):
        monkeypatch.setattr(module, "may_read", lambda x: False)
    captured = kernels.head_backward(head, result, d, None, NEEDS, None, of_forward)
    for ours, eager in zip(captured[:2], expected[:2], strict=True):
        assert eager.isfinite().all() and (ours - eager).float().norm() <= 1e-2 * eager.float().norm()


def record_cached(backend: str, monkeypatch: pytest.MonkeyPatch) -> list[Cached]:
    implementation: Any = dispatch.implementation(backend)
    forward = implementation.forward_and_cache
    found = list[Cached]()

    def record(*args: Any, **options: Any) -> Any:
        result, of_call = forward(*args, **options)
        found.append(of_call)
        return result, of_call

    monkeypatch.setattr(implementation, "forward_and_cache", record)
    return found


@on_device
def test_the_cache_is_free_after_the_backward_and_absent_without_autograd(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(f"backend={backend} tiles=many cache_mib=all_rows")
    arguments = arguments_of(case, leaves_of(case))
    of_head = of_function(linear_log_probs, arguments)
    found = record_cached(backend, monkeypatch)
    out = linear_log_probs(**of_head)
    assert found[0].exponentials.numel() >= case.mask.sum() * case.vocab
    storage = weakref.ref(found.pop().exponentials.untyped_storage())
    out.log_probs.sum().backward()
    gc.collect()
    assert storage() is None and out.log_probs is not None
    with torch.no_grad():
        linear_log_probs(**of_head)
    gspo_fused_loss(**arguments | {name: arguments[name].detach() for name in ("hidden", "lm_head")})
    assert [x.exponentials.numel() for x in found] == [0, 0]


@on_device
def test_a_nan_column_makes_kept_and_recomputed_gradients_nan(backend: str) -> None:
    """Column 0 is NaN, so all probabilities are. The cached exponentials of other tiles are finite."""
    head = random_head(150, 24, 601, torch.float32)
    head.weight[0] = torch.nan
    d = torch.ones(150, device=DEVICE)
    for size in (0, 2**20):
        results = log_probs_and_gradients(head, (d, None), backend, size)
        assert results["d_hidden"][head.mask].isnan().all() and results["d_weight"].isnan().all()


# -- a budget at the log-probs


@on_device
def test_a_budget_refuses_a_gradient_of_the_entropies(backend: str) -> None:
    case = make(f"backend={backend} gradient_budget=0.3 entropy=True")
    out = linear_log_probs(**of_function(linear_log_probs, arguments_of(case, leaves_of(case))))
    assert out.entropy is not None
    (out.log_probs + out.entropy.detach()).sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match=r"gradient_budget must be 0 if the entropies have a gradient.*got 0\.3"):
        out.entropy.sum().backward()


def test_the_backward_uses_the_workspace_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend keeps exponentials in slabs, whose width depends on the workspace."""
    hidden, weight = torch.randn(128, 4, requires_grad=True), torch.randn(20_000, 4)  # a chunk, used without a copy
    ids = torch.zeros(1, 128, dtype=torch.int64)
    log_probs = linear_log_probs(hidden[None], weight, ids, cache_mib=100, logit_softcap=9.0, backend="torch").log_probs
    (expected,) = torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)
    monkeypatch.setenv("GSPO_WORKSPACE_MIB", "1")
    log_probs.sum().backward()
    assert hidden.grad is not None and hidden.grad.equal(expected)
