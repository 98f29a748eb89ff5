"""Log-probs over kept sets, and of extra ids: values and gradients, layouts, samplers, bits, errors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes
from helpers.device import gspo_fused_loss, linear_log_probs, policy_loss
from helpers.marks import by_dtype, slow
from helpers.oracle import DTYPES, HEADS, assert_equals_oracle
from helpers.samples import Sample, make_sample, new_leaves, run_fused
from helpers.tile_choices import small_tiles
from hypothesis import given
from hypothesis import strategies as st
from tolerance import (
    COMPILED_RELATIVE,
    FLOAT64_RELATIVE,
    RELATIVE_RMS,
    check,
)
from torch import Tensor

from gspo_kernels import KeptSets, Objective, metrics, validation
from gspo_kernels.reference import kl_to_reference, token_log_probs

pytestmark = pytest.mark.usefixtures("device")
BONUS = Objective(clip_low=0.2, clip_high=0.2, kl_coef=0.1, entropy_coef=0.05)


# -- values and gradients


@by_dtype
@pytest.mark.parametrize("head", ["plain", slow("scale-softcap"), slow("temperature-per-token"), "all"])
@pytest.mark.parametrize("packed", [slow(False), True])
@pytest.mark.parametrize("empty", [slow("error"), "vocabulary"])
def test_the_loss_over_kept_sets_equals_the_oracle(
    dtype: str, head: str, packed: bool, empty: str, backend: str
) -> None:
    options: dict[str, Any] = dict(packed=packed, kept=empty, objective=BONUS, **HEADS[head])
    sample = make_sample(4, dtype=DTYPES[dtype], **options)
    out = assert_equals_oracle(sample, DTYPES[dtype], backend)
    sizes = sample.options["kept_sets"].sizes[sample.options["mask"].reshape(-1)]
    torch.testing.assert_close(out.metrics["kept_singletons"], (sizes == 1).double().mean())


@given(st.integers(0, 10_000), st.sampled_from(["error", "vocabulary"]), st.sampled_from(sorted(HEADS)), st.booleans())
def test_random_sets_equal_the_oracle(seed: int, empty: str, head: str, cached: bool) -> None:
    sample = make_sample(seed, dtype=torch.float64, kept=empty, objective=BONUS, **HEADS[head])
    assert_equals_oracle(sample, torch.float64, "torch", partial(run_fused, cache_mib=float(cached)))


def extra_sample(head: str, dtype: torch.dtype) -> tuple[Sample, Tensor]:
    sample = make_sample(5, lengths=(7, 1, 0, 4), dtype=dtype, **HEADS[head])
    rng = torch.Generator().manual_seed(0)
    vocab = sample.options.get("vocab_size") or len(sample.leaves["weight"])
    ids = torch.randint(-4, vocab, (*sample.target_ids.shape, 5), generator=rng)
    ids[:, :2, 0] = sample.target_ids[:, :2].clamp(0, vocab - 1)  # the target may be among them
    ids[:, 1:3, 1] = ids[:, 1:3, 2]  # and an id may occur twice
    ids[~sample.options["mask"]] = 10**9
    return sample, ids


def true_extra(sample: Sample, ids: Tensor, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute log-probs of targets and of extra ids from full logits, 0 where masked or absent."""
    mask, options = sample.options["mask"], sample.options
    head = {name: options[name] for name in ("logit_scale", "logit_softcap", "vocab_size") if name in options}
    columns, rows = [], leaves["hidden"][mask]
    temperature = options.get("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = temperature[mask].to(rows.dtype)
    for column in torch.cat([sample.target_ids[..., None], ids], -1)[mask].unbind(1):
        tensors = rows, leaves["weight"], column.clamp(min=0), leaves.get("bias")
        lp, _ = token_log_probs(*tensors, temperature=temperature, **head)
        columns.append(torch.where(column >= 0, lp, 0))
    out = rows.new_zeros(*mask.shape, len(columns)).masked_scatter(mask[..., None], torch.stack(columns, -1))
    return out[..., 0], out[..., 1:]


@by_dtype
@pytest.mark.parametrize("head", ["plain", "all"])
def test_extra_log_probs_equal_those_of_full_logits(dtype: str, head: str, backend: str) -> None:
    sample, ids = extra_sample(head, DTYPES[dtype])
    factors = torch.randn(*ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names = ("mask", "vocab_size", "temperature", "logit_scale", "logit_softcap")
    options = {name: sample.options[name] for name in names if name in sample.options}
    results = []
    for kind in ("ours", torch.float64, DTYPES[dtype]):
        leaves = new_leaves(sample if kind == "ours" else sample.cast(kind))
        if kind == "ours":
            options |= {"bias": leaves.get("bias"), "extra_ids": ids.int(), "backend": backend}
            out = linear_log_probs(leaves["hidden"], leaves["weight"], sample.target_ids, **options)
            log_probs, extra = out.log_probs, out.extra_log_probs
            assert extra is not None and extra.shape == ids.shape
        else:
            log_probs, extra = true_extra(sample.cast(kind), ids, leaves)
        total = (factors * extra).sum() + (factors[..., 0] * log_probs).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()))
        results.append((extra.detach(), dict(zip(leaves, gradients, strict=True))))
    (ours, gradients), (truth, true_gradients), (plain, plain_gradients) = results
    wide = torch.float64 if dtype == "fp64" else torch.float32
    check("extra log-probs", ours.flatten(0, 1), plain.flatten(0, 1), truth.flatten(0, 1), wide)
    for name, gradient in gradients.items():
        flat = [x.reshape(-1, x.shape[-1]) for x in (gradient, plain_gradients[name], true_gradients[name])]
        # The parts of a gradient, of the vocabulary and of the pairs, are rounded before PyTorch adds them.
        rounded = RELATIVE_RMS[DTYPES[dtype]] * flat[2].square().mean().sqrt().item()
        check(f"d_{name}", flat[0], flat[1], flat[2], DTYPES[dtype], more_rms=rounded)


def test_a_budget_and_a_cache_work_with_extra_ids() -> None:
    sample, ids = extra_sample("plain", torch.float32)
    mask = sample.options["mask"]
    leaves = new_leaves(sample)
    exact = None
    for options in ({}, {"cache_mib": 4.0}, {"gradient_budget": 1e-3}):
        arguments = leaves["hidden"], leaves["weight"], sample.target_ids
        out = linear_log_probs(*arguments, mask=mask, extra_ids=ids, backend="torch", **options)
        assert out.extra_log_probs is not None
        gradient = torch.autograd.grad(out.extra_log_probs.sum(), leaves["weight"])[0]
        exact = gradient if exact is None else exact
        assert (gradient - exact).norm() <= 2e-2 * exact.norm()
    assert metrics.last_backward()["dropped_gradient_mass"] <= 1e-3


def test_a_budget_and_a_cache_work_with_empty_sets() -> None:
    """Rows with an empty set take the vocabulary pass. Metrics of the backward are about them alone."""
    hidden, weight, ids, sets = rows_of(24)
    offsets = torch.cat([sets.offsets[:13], sets.offsets[12:13].expand(12)])
    half = KeptSets(sets.ids[: offsets[-1]], offsets, "vocabulary")
    with small_tiles(4, 8):
        for options, metric in (({"gradient_budget": 0.2}, "dropped_gradient_mass"), ({"cache_mib": 4.0}, "passes")):
            results = []
            for rows, given in ((slice(12, 24), None), (slice(0, 24), half)):
                leaf = hidden[rows].requires_grad_()
                out = linear_log_probs(leaf, weight, ids[rows], kept_sets=given, backend="torch", **options)
                (gradient,) = torch.autograd.grad(out.log_probs[-12:].sum(), leaf)
                results.append((gradient[-12:], metrics.last_backward()[metric]))
            torch.testing.assert_close(*results)
            assert metric == "passes" or 0 < results[0][1] <= 0.2


# -- KL over the vocabulary


def test_kl_log_probs_replace_the_log_probs_in_the_kl_term(backend: str) -> None:
    rng = torch.Generator().manual_seed(0)
    randn = lambda: torch.randn(3, 5, generator=rng, dtype=torch.float64)  # noqa: E731
    old, ref, kept = (-randn().square() - 0.1 for _ in range(3))
    full = kept - 0.2 * randn().abs()
    mask = torch.rand(3, 5, generator=rng) > 0.2
    advantages = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    objective = Objective(clip_low=0.5, clip_high=0.5, kl_coef=0.3, kl_aggregation="token-mean")
    leaves = kept.requires_grad_(), full.requires_grad_()
    options: dict[str, Any] = dict(mask=mask, old_log_probs=old, backend=backend)
    out = policy_loss(kept, advantages, ref_log_probs=ref, kl_log_probs=full, objective=objective, **options)
    without = policy_loss(kept, advantages, objective=replace(objective, kl_coef=0.0), **options)
    kl = kl_to_reference(full[mask], ref[mask], full[mask], "k3").mean()
    torch.testing.assert_close(out.loss, without.loss + 0.3 * kl)
    torch.testing.assert_close(out.metrics["kl"], kl.detach())
    torch.testing.assert_close(out.metrics["kept_mass"], (full - kept)[mask].exp().mean().detach())
    expected = torch.autograd.grad(without.loss + 0.3 * kl, leaves)
    torch.testing.assert_close(torch.autograd.grad(out.loss, leaves), expected)


def test_shares_of_singletons_are_weighted_by_tokens() -> None:
    hidden, weight, ids, sets = rows_of(24)  # the second half are singletons
    parts = []
    for first, end in ((0, 13), (13, 24)):
        rows, offsets = slice(first, end), torch.tensor([0, 2, end - first])
        options: dict[str, Any] = dict(cu_seqlens=offsets, kept_sets=sets.select(torch.arange(first, end)))
        out = gspo_fused_loss(hidden[rows], weight, ids[rows], torch.ones(2), backend="torch", **options)
        parts.append(out.metrics)
    assert metrics.combine(parts)["kept_singletons"] == 0.5


# -- bits and work


def rows_of(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, KeptSets]:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, 40, generator=rng), torch.randn(90, 40, generator=rng)
    ids = torch.randint(90, (n,), generator=rng)
    kept = torch.rand(n, 90, generator=rng) < 0.3
    kept[torch.arange(n), ids] = True
    kept[n // 2 :] &= torch.arange(90) == ids[n // 2 :, None]  # sets of one id
    return hidden.to(dtype), weight.to(dtype), ids, KeptSets.from_mask(kept)


@by_dtype
def test_bits_of_a_row_do_not_depend_on_the_batch(dtype: str, backend: str) -> None:
    hidden, weight, ids, sets = rows_of(24, DTYPES[dtype])
    every = []
    for tokens in (torch.arange(24), torch.tensor([7, 3, 20]), torch.tensor([3])):
        leaf = hidden[tokens].requires_grad_()
        out = linear_log_probs(leaf, weight, ids[tokens], kept_sets=sets.select(tokens), backend=backend)
        (gradient,) = torch.autograd.grad(out.log_probs.sum(), leaf)
        at = tokens.tolist().index(3)
        every.append((out.log_probs[at], gradient[at]))
    for result in every[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, every[0], strict=True))


def test_sets_of_one_id_have_log_prob_0_and_are_not_read(backend: str) -> None:
    hidden, weight, ids, sets = rows_of(24)
    hidden[12:] = torch.nan
    hidden.requires_grad_()
    out = linear_log_probs(hidden, weight, ids, kept_sets=sets, entropy=True, backend=backend)
    assert out.entropy is not None and not out.log_probs[12:].any() and not out.entropy[12:].any()
    (gradient,) = torch.autograd.grad(out.log_probs.sum(), hidden)
    assert not gradient[12:].any() and gradient[:12].all(1).all()


def test_gathered_rows_are_not_stored() -> None:
    hidden, weight, ids, _ = rows_of(64)
    hidden, weight = (x.repeat(1, 100).requires_grad_() for x in (hidden, weight))  # H = 4,000
    kept = torch.ones(64, 90, dtype=torch.bool)
    sets = KeptSets.from_mask(kept)
    with LiveBytes() as live:
        out = linear_log_probs(hidden, weight, ids, kept_sets=sets, backend="torch").log_probs
        out.sum().backward()
    gathered = 4 * len(sets.ids) * 4000
    assert live.peak < gathered / 4


# -- layouts of engines and trainers, and samplers

SETS = [[[3, 1], [2], [5, 0, 4]], [[6, 2], [1]]]  # of two answers


def assert_sets(sets: KeptSets, expected: list[list[int]]) -> None:
    found = [sets.ids[a:b].tolist() for a, b in zip(sets.offsets[:-1], sets.offsets[1:], strict=True)]
    assert [sorted(x) for x in found] == [sorted(x) for x in expected]


def test_layouts_of_engines_and_trainers() -> None:
    packed = [x for answer in SETS for x in answer]
    padded = [*SETS[0], *SETS[1], []]
    lists = KeptSets.from_lists(SETS, length=3)  # vLLM: sampling_mask.token_ids; SGLang: output_token_sampling_mask
    assert_sets(lists, padded)
    assert_sets(KeptSets.from_lists(SETS), packed)
    csr = [
        (torch.tensor([3, 1, 2, 5, 0, 4]), torch.tensor([0, 2, 3, 6])),
        (torch.tensor([6, 2, 1]), torch.tensor([0, 2, 3])),
    ]
    assert_sets(KeptSets.from_samples(csr, length=3), padded)  # slime: rollout_top_p_token_ids, _offsets; miles
    counts = torch.tensor([2, 1, 3, 2, 1], dtype=torch.int32)
    ids = torch.tensor([3, 1, 2, 5, 0, 4, 6, 2, 1], dtype=torch.int32)
    assert_sets(KeptSets.from_counts(ids, counts), packed)  # prime-rl: SamplingMask(ids, counts)
    absent = torch.tensor([[[3, 1, -1], [2, -1, -1], [5, 0, 4]], [[6, 2, -1], [-1, 1, -1], [-1, -1, -1]]])
    assert_sets(KeptSets.from_padded(absent, fill=-1), padded)  # SkyRL: sample_support_ids
    sizes = torch.tensor([[2, 1, 3], [2, 1, 0]])
    ids = torch.tensor([[[3, 1, 0], [2, 0, 0], [5, 0, 4]], [[6, 2, 0], [1, 0, 0], [0, 0, 0]]])
    assert_sets(KeptSets.from_padded(ids, sizes=sizes), padded)  # NeMo RL: sampling_mask_token_ids, _sizes
    assert_sets(KeptSets.from_padded(torch.where(ids == 0, 6, ids), fill=6), [[3, 1], [2], [5, 4], [2], [1], []])
    assert_sets(lists.select(torch.tensor([4, 0])), [[1], [3, 1]])
    assert_sets(lists.select(lists.sizes > 0), packed)
    targets = torch.tensor([[1, 7, 4], [6, 2, 5]])  # slime: an empty set stays empty
    assert_sets(lists.including(targets), [[3, 1], [2, 7], [5, 0, 4], [6, 2], [1, 2], []])


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_sets_of_logits_are_those_of_transformers(top_k: int | None, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps: list[Any] = [TemperatureLogitsWarper(0.7)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    scores = logits
    for step in steps:
        scores = step(None, scores)
    options: dict[str, Any] = dict(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = KeptSets.from_logits(logits, order="transformers", **options)
    assert_sets(ours, [row.nonzero()[:, 0].tolist() for row in scores > -torch.inf])
    if min_p and top_p < 1:  # vLLM applies min_p first, so top_p sees fewer ids
        after = KeptSets.from_logits(logits, **options)
        assert (after.sizes <= ours.sizes).all() and (after.sizes < ours.sizes).any()


def test_old_log_probs_over_the_vocabulary_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at sets with one id, where log-probs over the set are 0."""
    monkeypatch.setattr(validation, "_warned", set())
    hidden, weight = torch.randn(2, 4, 8), torch.randn(20, 8)
    ids = torch.arange(8).view(2, 4)
    sets = KeptSets.from_lists([[[i, i + 1], [i + 1], [i + 2, 19], [i + 3, 19]] for i in (0, 4)])
    mask = torch.ones(2, 4, dtype=torch.bool)

    def loss(kept_sets: KeptSets | None, **options: Any) -> None:
        old = linear_log_probs(hidden, weight, ids, kept_sets=kept_sets).log_probs
        gspo_fused_loss(hidden, weight, ids, torch.ones(2), old_log_probs=old, kept_sets=sets, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(sets)
        mask[:, 1] = False
        loss(None, mask=mask)
    with pytest.warns(UserWarning, match="gspo_fused_loss: old_log_probs .* over the vocabulary") as caught:
        for _ in range(2):
            loss(None)
    assert len(caught) == 1


def test_logits_of_minus_infinity_and_batches_without_tokens() -> None:
    bias = torch.zeros(8)
    bias[2] = -torch.inf
    hidden, weight = torch.ones(1, 4, requires_grad=True), torch.zeros(8, 4)
    for kept, share in (([1, 2], 1.0), ([1, 2, 3], 0.5)):
        arguments = hidden, weight, torch.tensor([1])
        sets = KeptSets.from_lists([[kept]])
        out = linear_log_probs(*arguments, bias=bias, entropy=True, kept_sets=sets, backend="torch")
        assert out.entropy is not None
        torch.testing.assert_close(out.log_probs.exp(), torch.tensor([share]))
        torch.testing.assert_close(out.entropy, -torch.tensor([share]).log())
        assert torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), hidden)[0].isfinite().all()
    for shape in ((0,), (2, 0)):
        empty = torch.zeros(shape, dtype=torch.int64)
        arguments = torch.zeros(*shape, 4), weight, empty
        extra = linear_log_probs(*arguments, extra_ids=empty[..., None].expand(*shape, 3)).extra_log_probs
        assert extra is not None and extra.shape == (*shape, 3)


def test_torch_compile_traces_kept_sets_and_extra_ids() -> None:
    hidden, weight, ids, sets = rows_of(8)
    hidden.requires_grad_()

    def total(hidden: Tensor, ids: Tensor, of_sets: Tensor, offsets: Tensor) -> Any:
        kept: Any = linear_log_probs(
            hidden, weight, ids, kept_sets=KeptSets(of_sets, offsets), entropy=True, backend="torch"
        )
        extra: Any = linear_log_probs(hidden, weight, ids, extra_ids=ids[:, None] - 1, backend="torch")
        return kept.log_probs.sum() + kept.entropy.sum() + extra.extra_log_probs.sum()

    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    results = []
    for function in (total, compiled):
        value = function(hidden, ids, sets.ids, sets.offsets)
        results.append((value, *torch.autograd.grad(value, hidden)))
    for ours, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, eager, rtol=COMPILED_RELATIVE, atol=FLOAT64_RELATIVE)
