"""Log-probs over kept sets, and of extra ids: values and gradients, layouts, samplers, bits, errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.counters import LiveBytes
from helpers.device import gspo_fused_loss, linear_log_probs
from helpers.features import DTYPES
from helpers.marks import by_dtype
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gspo_kernels import KeptSets, validation

pytestmark = pytest.mark.usefixtures("device")

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


def assert_sets(sets: KeptSets, expected: list[list[int]], empty: str = "error") -> None:
    found = [sets.ids[a:b].tolist() for a, b in zip(sets.offsets[:-1], sets.offsets[1:], strict=True)]
    assert [sorted(x) for x in found] == [sorted(x) for x in expected] and sets.empty == empty


ID_SETS = st.lists(st.lists(st.sets(st.integers(0, 8), max_size=4), max_size=4), min_size=1, max_size=3)  # of answers


@given(ID_SETS, st.sampled_from([-1, -5, 6, 99]), st.sampled_from(["error", "vocabulary"]), st.data())
def test_layouts_of_engines_and_trainers(answers: list[Any], fill: int, empty: str, data: st.DataObject) -> None:
    sets = [[data.draw(st.permutations(sorted(x))) for x in answer] for answer in answers]
    length = max(map(len, sets)) + data.draw(st.integers(0, 2))
    packed = [x for answer in sets for x in answer]
    padded = [x for answer in sets for x in [*answer, *([[]] * (length - len(answer)))]]
    named: dict[str, Any] = {"empty": empty}

    def flat(of_tokens: list[list[int]], dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
        ids, sizes = [i for x in of_tokens for i in x], [len(x) for x in of_tokens]
        return torch.tensor(ids, dtype=dtype), torch.tensor(sizes, dtype=dtype)

    # vLLM: sampling_mask.token_ids; SGLang: output_token_sampling_mask
    lists = KeptSets.from_lists(sets, length=length, **named)
    assert_sets(lists, padded, empty)
    assert_sets(KeptSets.from_lists(sets, **named), packed, empty)
    # slime: rollout_top_p_token_ids, rollout_top_p_token_offsets; miles
    csr = [(ids, torch.nn.functional.pad(sizes.cumsum(0), (1, 0))) for ids, sizes in map(flat, sets)]
    assert_sets(KeptSets.from_samples(csr, length=length, **named), padded, empty)
    # prime-rl: SamplingMask(ids, counts)
    assert_sets(KeptSets.from_counts(*flat(packed, torch.int32), **named), packed, empty)
    width = 5
    rows = torch.full((len(padded), width), -7)
    mask = torch.zeros(len(padded), 9, dtype=torch.bool)
    for i, x in enumerate(padded):
        rows[i, : len(x)] = torch.tensor(x, dtype=torch.long)
        mask[i, x] = True
    sizes = flat(padded)[1]
    shape = len(sets), length, width
    of_counts = KeptSets.from_counts(flat(padded)[0], sizes.view(shape[:2]), **named)
    assert of_counts.offsets.ndim == 1
    assert_sets(of_counts, padded, empty)
    # NeMo RL: sampling_mask_token_ids, sampling_mask_sizes
    of_sizes = KeptSets.from_padded(rows.view(shape), sizes=sizes.view(shape[:2]), **named)
    assert_sets(of_sizes, padded, empty)
    assert_sets(KeptSets.from_mask(mask.view(*shape[:2], 9), **named), padded, empty)
    order = torch.rand(rows.shape, generator=torch.Generator().manual_seed(len(packed))).argsort(1)
    anywhere = rows.masked_fill(rows < 0, fill).gather(1, order)  # SkyRL: sample_support_ids
    kept = [[i for i in x if i != fill] for x in padded]
    assert_sets(KeptSets.from_padded(anywhere.view(shape), fill=fill, **named), kept, empty)
    if fill == -1:
        assert_sets(KeptSets.from_padded(rows, fill=-1, **named), padded, empty)  # all negative values are padding
    some = data.draw(st.lists(st.integers(0, max(len(padded) - 1, 0)), max_size=4 * bool(padded)))
    assert_sets(lists.select(torch.tensor(some, dtype=torch.long)), [padded[i] for i in some], empty)
    assert_sets(lists.select(lists.sizes > 0), [x for x in padded if x], empty)
    assert_sets(lists.to("cpu"), padded, empty)
    targets = data.draw(st.lists(st.integers(0, 8), min_size=len(padded), max_size=len(padded)))
    with_targets = [[*x, *({i} - {*x})] if x else [] for x, i in zip(padded, targets, strict=True)]  # as in slime
    assert_sets(lists.including(torch.tensor(targets, dtype=torch.long).view(shape[:2])), with_targets, empty)


@pytest.mark.parametrize("top_k", [None, 5, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.75])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_sets_of_logits_are_those_of_transformers(top_k: int | None, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[0, :32], logits[0, 32:] = 1, -torch.inf  # top_p is reached by exactly 24 of 32 equal ids
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

    def loss(kept_sets: KeptSets | None, rounding: float = 0.0, **options: Any) -> None:
        old = linear_log_probs(hidden, weight, ids, kept_sets=kept_sets).log_probs - rounding
        gspo_fused_loss(hidden, weight, ids, torch.ones(2), old_log_probs=old, kept_sets=sets, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(sets)
        loss(sets, rounding=9e-4)
        mask[:, 1] = False
        loss(None, mask=mask)
    with pytest.warns(UserWarning, match="gspo_fused_loss: old_log_probs .* over the vocabulary") as caught:
        for _ in range(2):
            loss(None)
    assert len(caught) == 1


def test_logits_of_minus_infinity() -> None:
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
