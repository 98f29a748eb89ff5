"""Properties that hold for every batch, tested with batches drawn by Hypothesis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from helpers.marks import triton_is_slow
from helpers.samples import Sample, call_fused, make_sample, new_leaves, run_fused
from hypothesis import given
from hypothesis import strategies as st
from tolerance import FLOAT64_RELATIVE
from torch import Tensor

from gspo_kernels import Objective, linear_log_probs

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


def of_tokens(sample: Sample, change: Any) -> Sample:
    """Apply `change` to every tensor with a value or a hidden state per token, or per sequence, but not to the head."""
    return replace(
        sample,
        leaves={**sample.leaves, "hidden": change(sample.leaves["hidden"])},
        target_ids=change(sample.target_ids),
        advantages=change(sample.advantages),
        options={name: change(x) for name, x in sample.options.items()},
    )


def packed(sample: Sample) -> tuple[Sample, Tensor]:
    """Return the same tokens packed, and a bool mask [B, T] of their positions in the padded batch."""
    lengths = lengths_of(sample)
    _, longest = sample.target_ids.shape
    inside = torch.arange(longest)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]

    def cut(x: Any) -> Any:
        return x.detach()[inside] if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == inside.shape else x

    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return of_tokens(sample, cut).with_options(cu_seqlens=offsets), inside


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


def without(sample: Sample, *options: str) -> Sample:
    return replace(sample, options={name: x for name, x in sample.options.items() if name not in options})


@triton_is_slow
@given(sample=samples(), seed=st.integers(0, 99))
def test_masked_tokens_have_exactly_zero_influence(backend: str, sample: Sample, seed: int) -> None:
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

    a, grads = run_fused(sample, backend, entropy=True)
    b, other_grads = run_fused(of_tokens(sample, disturb), backend, entropy=True)
    for x, y in zip((*a[:4], *a.metrics.values()), (*b[:4], *b.metrics.values()), strict=True):
        assert x is not None and y is not None and torch.equal(x, y)
    for name in grads:
        assert torch.equal(grads[name], other_grads[name]), name
    for x in (a.log_probs, a.entropy, grads["hidden"]):
        assert not x[~mask].any()


@given(samples(), st.integers(0, 6))
def test_a_sequence_alone_has_the_bits_it_has_in_any_batch(sample: Sample, i: int) -> None:
    batch = sample.target_ids.shape[0]
    i %= batch

    def pick(x: Any) -> Any:
        return x.detach()[i : i + 1] if isinstance(x, Tensor) and x.ndim >= 1 and x.shape[0] == batch else x

    a, b = run_fused(sample)[0], run_fused(of_tokens(sample, pick))[0]
    assert torch.equal(a.log_probs[i : i + 1], b.log_probs)
    assert torch.equal(a.log_ratio[i : i + 1], b.log_ratio)


@given(samples(on_policy=True, per_token_advantages=False, token_weights=False, objective=Objective()))
def test_equal_policies_give_ratio_exactly_one_and_the_reinforce_gradient(sample: Sample) -> None:
    leaves, options = new_leaves(sample), without(sample, "ref_log_probs").options
    lp = linear_log_probs(
        leaves["hidden"], leaves["weight"], sample.target_ids, bias=leaves.get("bias"), **options
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
    reinforce = torch.autograd.grad((lp * weight).sum(), list(leaves.values()))
    for name, expected in zip(sample.leaves, reinforce, strict=True):
        torch.testing.assert_close(grads[name], expected)
        assert torch.equal(grads[name], without_old_grads[name])


@given(samples(dtype=torch.float64), st.sampled_from([-2.0, 0.5, 3.0, 1e-3, 0.0]))
def test_gradients_are_linear_in_the_upstream_gradient(sample: Sample, factor: float) -> None:
    leaves = new_leaves(sample)
    out = call_fused(sample, leaves)
    once = torch.autograd.grad(out.loss, list(leaves.values()), retain_graph=True)
    scaled = torch.autograd.grad(out.loss * factor, list(leaves.values()))
    for a, b in zip(once, scaled, strict=True):
        same(b, a * factor)
