"""Properties that hold for every batch, tested with batches drawn by Hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.samples import Sample, make_sample, run_fused
from hypothesis import given
from hypothesis import strategies as st
from tolerance import FLOAT64_BOUND, FLOAT64_RELATIVE
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs

OBJECTIVES = st.sampled_from(
    [
        Objective(),
        Objective(ratio="sequence-token"),
        Objective.preset("grpo"),
        Objective.preset("dapo"),
        Objective(clip_low=0.2, clip_high=0.2, dual_clip=1.5),
        Objective(kl_coef=0.1, kl_ratio_factor=True),
        Objective(entropy_coef=0.05),
    ]
)
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7).map(tuple)
HEADS = st.fixed_dictionaries(
    {"bias": st.booleans()},
    optional={
        "logit_scale": st.sampled_from([0.5, 2.0]),
        "logit_softcap": st.sampled_from([3.0, 30.0]),
        "temperature": st.sampled_from([0.6, "per-token"]),
        "padded_vocab": st.integers(1, 5),
    },
)


@st.composite
def samples(draw: st.DrawFn, dtype: torch.dtype = torch.float32, **fixed: Any) -> Sample:
    options: dict[str, Any] = {
        "lengths": draw(LENGTHS),
        "hidden_size": draw(st.integers(1, 24)),
        "vocab": draw(st.integers(1, 60)),
        "holes": draw(st.booleans()),
        "per_token_advantages": draw(st.booleans()),
        "token_weights": draw(st.booleans()),
        "on_policy": draw(st.booleans()),
        "objective": draw(OBJECTIVES),
        "dtype": dtype,
        **draw(HEADS),
        **fixed,
    }
    return make_sample(draw(st.integers(0, 10_000)), **options)


def same(a: Tensor, b: Tensor, scale: Tensor | None = None) -> None:
    """Assert equality in float64, up to the rounding of sums in another order, relative to the largest `scale`."""
    largest = (b if scale is None else scale).abs().max().item() if b.numel() else 0.0
    assert torch.allclose(a, b, rtol=0, atol=FLOAT64_RELATIVE * max(largest, 1e-3))


def lengths_of(sample: Sample) -> list[int]:
    """Return the length of each sequence up to its last unmasked token."""
    mask = sample.options["mask"]
    return [int(row.nonzero().max()) + 1 if row.any() else 0 for row in mask]


def packed(sample: Sample) -> tuple[Sample, Tensor]:
    """Return the same tokens packed, and a bool mask [B, T] of their positions in the padded batch."""
    lengths = lengths_of(sample)
    _, longest = sample.target_ids.shape
    inside = torch.arange(longest)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]

    def cut(x: Any) -> Any:
        return x.detach()[inside] if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == inside.shape else x

    options = {name: cut(x) for name, x in sample.options.items()}
    options["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    leaves = dict(sample.leaves, hidden=cut(sample.leaves["hidden"]))
    return Sample(leaves, cut(sample.target_ids), cut(sample.advantages), sample.objective, options), inside


@given(samples(hidden_size=8))
def test_packing_equals_padding_bitwise_per_token_and_per_sequence(sample: Sample) -> None:
    flat, inside = packed(sample)
    if flat.advantages.shape[0] == inside.shape[0] == flat.target_ids.shape[0] and sample.advantages.ndim == 2:
        return  # with N == S, advantages [N] are read per sequence
    a, grads = run_fused(sample)
    b, flat_grads = run_fused(flat)
    assert torch.equal(a.log_probs[inside], b.log_probs)
    if sample.objective.ratio == "token":
        assert torch.equal(a.log_ratio[inside], b.log_ratio)
    else:
        assert torch.equal(a.log_ratio, b.log_ratio)
    assert torch.equal(grads["hidden"][inside], flat_grads["hidden"])
    assert torch.equal(grads["weight"], flat_grads["weight"])
    torch.testing.assert_close(a.loss, b.loss)


@given(samples(), st.integers(0, 99))
def test_masked_tokens_have_exactly_zero_influence(sample: Sample, seed: int) -> None:
    mask = sample.options["mask"]
    rng = torch.Generator().manual_seed(seed)

    def disturb(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == mask.shape) or x is mask:
            return x
        x = x.detach().clone()
        noise = torch.randn(x.shape, generator=rng) * 1e6
        noise[torch.rand(x.shape, generator=rng) < 0.3] = float("nan")
        x[~mask] = noise.to(x.dtype)[~mask] if x.is_floating_point() else torch.randint(-99, 10**6, x.shape)[~mask]
        return x

    other = Sample(
        # The weight is not disturbed: it has the mask's shape if V = B and H = T.
        dict(sample.leaves, hidden=disturb(sample.leaves["hidden"])),
        disturb(sample.target_ids),
        disturb(sample.advantages),
        sample.objective,
        {name: disturb(x) for name, x in sample.options.items()},
    )
    (a, grads), (b, other_grads) = run_fused(sample), run_fused(other)
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.log_probs, b.log_probs) and not a.log_probs[~mask].any()
    assert torch.equal(a.log_ratio, b.log_ratio)
    for name in grads:
        assert torch.equal(grads[name], other_grads[name]), name
    assert not grads["hidden"][~mask].any()


@given(samples(), st.integers(0, 99))
def test_permuting_sequences_permutes_results(sample: Sample, seed: int) -> None:
    batch = sample.target_ids.shape[0]
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))

    def shuffle(x: Any) -> Any:
        per_sequence = isinstance(x, Tensor) and x.ndim >= 1 and x.shape[0] == batch
        return x.detach()[order] if per_sequence else x

    shuffled = Sample(
        dict(sample.leaves, hidden=shuffle(sample.leaves["hidden"])),
        shuffle(sample.target_ids),
        shuffle(sample.advantages),
        sample.objective,
        {name: shuffle(x) for name, x in sample.options.items()},
    )
    (a, grads), (b, other) = run_fused(sample), run_fused(shuffled)
    assert torch.equal(a.log_probs[order], b.log_probs)
    assert torch.equal(a.log_ratio[order], b.log_ratio)
    torch.testing.assert_close(grads["hidden"][order], other["hidden"])
    torch.testing.assert_close(a.loss, b.loss)


@given(samples(), st.integers(0, 6))
def test_a_sequence_alone_has_the_bits_it_has_in_any_batch(sample: Sample, i: int) -> None:
    batch = sample.target_ids.shape[0]
    i %= batch

    def pick(x: Any) -> Any:
        return x.detach()[i : i + 1] if isinstance(x, Tensor) and x.ndim >= 1 and x.shape[0] == batch else x

    alone = Sample(
        dict(sample.leaves, hidden=pick(sample.leaves["hidden"])),
        pick(sample.target_ids),
        pick(sample.advantages),
        sample.objective,
        {name: pick(x) for name, x in sample.options.items()},
    )
    if "bias" in sample.leaves and sample.leaves["bias"].shape[0] == batch:
        alone.leaves["bias"] = sample.leaves["bias"]
    if sample.leaves["weight"].shape[0] == batch:
        alone.leaves["weight"] = sample.leaves["weight"]
    a, b = run_fused(sample)[0], run_fused(alone)[0]
    assert torch.equal(a.log_probs[i : i + 1], b.log_probs)
    assert torch.equal(a.log_ratio[i : i + 1], b.log_ratio)


@given(samples(on_policy=True, per_token_advantages=False, token_weights=False, objective=Objective()))
def test_equal_policies_give_ratio_exactly_one_and_the_reinforce_gradient(sample: Sample) -> None:
    head = {k: v for k, v in sample.options.items() if k not in ("ref_log_probs", "mask")}
    lp = linear_log_probs(
        sample.leaves["hidden"],
        sample.leaves["weight"],
        sample.target_ids,
        mask=sample.options["mask"],
        bias=sample.leaves.get("bias"),
        **head,
    ).log_probs
    out, grads = run_fused(sample.with_options(old_log_probs=lp.detach()))
    without_old, without_old_grads = run_fused(sample)
    for result in (out, without_old):
        assert torch.equal(result.log_ratio, torch.zeros_like(result.log_ratio))
        for name in ("ratio_mean", "ratio_min", "ratio_max"):
            assert result.metrics[name] == 1, name
    mask = sample.options["mask"]
    lengths = mask.sum(1)
    weight = mask * (-sample.advantages / lengths.clamp(min=1))[:, None] / (lengths > 0).sum().clamp(min=1)
    reinforce = torch.autograd.grad((lp * weight).sum(), list(sample.leaves.values()))
    for name, expected in zip(sample.leaves, reinforce, strict=True):
        torch.testing.assert_close(grads[name], expected)
        assert torch.equal(grads[name], without_old_grads[name])


@given(samples(dtype=torch.float64, bias=False, vocab=12, padded_vocab=0))
def test_with_an_identity_head_each_row_of_d_hidden_sums_to_zero(sample: Sample) -> None:
    """Each row of d_logits sums to 0, and d_hidden equals d_logits if the weight is the identity."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(*sample.target_ids.shape, 12, generator=rng, dtype=torch.float64)
    options = {k: v for k, v in sample.options.items() if k not in ("logit_softcap", "vocab_size")}
    leaves = {"hidden": hidden, "weight": torch.eye(12, dtype=torch.float64)}
    _, grads = run_fused(Sample(leaves, sample.target_ids, sample.advantages, sample.objective, options))
    same(grads["hidden"].sum(-1), torch.zeros(sample.target_ids.shape, dtype=torch.float64), grads["hidden"])


@given(samples(dtype=torch.float64), st.sampled_from([-2.0, 0.5, 3.0, 1e-3, 0.0]))
def test_gradients_are_linear_in_the_upstream_gradient(sample: Sample, factor: float) -> None:
    leaves = {name: x.detach().requires_grad_() for name, x in sample.leaves.items()}
    out = gspo_fused_loss(
        leaves["hidden"],
        leaves["weight"],
        sample.target_ids,
        sample.advantages,
        bias=leaves.get("bias"),
        objective=sample.objective,
        **sample.options,
    )
    once = torch.autograd.grad(out.loss, list(leaves.values()), retain_graph=True)
    scaled = torch.autograd.grad(out.loss * factor, list(leaves.values()))
    for a, b in zip(once, scaled, strict=True):
        same(b, a * factor)


@given(samples(dtype=torch.float64, bias=True), st.floats(-50, 50))
def test_shifting_all_logits_changes_nothing(sample: Sample, shift: float) -> None:
    if "logit_softcap" in sample.options:
        sample = Sample(
            sample.leaves,
            sample.target_ids,
            sample.advantages,
            sample.objective,
            {k: v for k, v in sample.options.items() if k != "logit_softcap"},
        )
    shifted = dict(sample.leaves, bias=(sample.leaves["bias"] + shift).detach())
    (a, grads), (b, other) = (
        run_fused(sample),
        run_fused(Sample(shifted, sample.target_ids, sample.advantages, sample.objective, sample.options)),
    )
    scale = torch.tensor(1.0 + abs(shift) * 10)
    mask = sample.options["mask"]
    same(b.log_probs[mask], a.log_probs[mask], scale)
    if not near_a_bound(sample, a.log_ratio):
        for name in grads:
            same(
                other[name], grads[name], scale * max(1.0, grads[name].abs().max().item() if grads[name].numel() else 0)
            )


def near_a_bound(sample: Sample, log_ratio: Tensor) -> bool:
    """Return whether rounding may change a clip decision, and thereby gradients."""
    bounds = [1 - sample.objective.clip_low, 1 + sample.objective.clip_high, sample.objective.ceiling]
    return any(bool(((log_ratio.exp() - bound).abs() < FLOAT64_BOUND).any()) for bound in bounds)


@given(samples(dtype=torch.float64))
def test_a_temperature_equals_a_smaller_head(sample: Sample) -> None:
    options = {k: v for k, v in sample.options.items() if k not in ("logit_softcap", "temperature", "logit_scale")}
    warm = Sample(
        sample.leaves, sample.target_ids, sample.advantages, sample.objective, {**options, "temperature": 2.0}
    )
    halved = {n: x.detach() / 2 if n in ("weight", "bias") else x.detach() for n, x in sample.leaves.items()}
    small = Sample(halved, sample.target_ids, sample.advantages, sample.objective, options)
    (a, grads), (b, other) = run_fused(warm), run_fused(small)
    assert torch.equal(a.log_probs, b.log_probs)  # a factor of 2 is exact
    assert torch.equal(grads["hidden"], other["hidden"])


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000])
def test_a_zero_head_is_the_uniform_distribution(vocab: int, backend: str) -> None:
    hidden = torch.randn(2, 3, 5)
    ids = torch.randint(0, vocab, (2, 3))
    out = linear_log_probs(hidden, torch.zeros(vocab, 5), ids, entropy=True, backend=backend)
    expected = torch.full((2, 3), -float(torch.tensor(float(vocab)).log()))
    torch.testing.assert_close(out.log_probs, expected)
    torch.testing.assert_close(out.entropy, -expected)
