"""Properties that hold for every batch. Hypothesis draws batches from the table of `helpers.features`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.array import Results, arguments_of, leaves_of, run
from helpers.device import gspo_fused_loss
from helpers.features import BANS, FACTORS, Case, build
from helpers.pair_cover import Rows
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import FLOAT64_RELATIVE

EXACT: dict[str, Any] = {"compile": False, "gradient_budget": 0.0}
ONE_PASS: dict[str, Any] = {"entry": "fused", "head": "linear", "tiles": "one", "kept_sets": None, "cache_mib": 0}
ONE_PASS |= {"autocast": None, "head_precision": None, "products": "wide", "strides": "contiguous", "top_k": 0}
ROWS = Rows(FACTORS, BANS)


def cases(**values: Any) -> st.SearchStrategy[Case]:
    """Draw batches of rows that have these values."""

    def case(seed: int) -> Case:
        row = ROWS.any(random.Random(seed), EXACT | values)
        return build(row, seed)

    return st.integers(0, 10**6).map(case)


def assert_same(ours: Results, expected: Results) -> None:
    """Assert that all bits are equal."""
    for kind in ("outputs", "gradients", "metrics"):
        x, y = getattr(ours, kind), getattr(expected, kind)
        assert x.keys() == y.keys()
        assert not [name for name in x if not torch.equal(x[name], y[name])]


@given(cases(layout="packed", **ONE_PASS))
def test_packing_equals_padding_bitwise_per_token_and_per_sequence(case: Case) -> None:
    inside = case.tokens["inside"]
    padded, packed = run(replace(case, row={**case.row, "layout": "padded"})), run(case)
    for ours, expected in ((packed.outputs, padded.outputs), (packed.gradients, padded.gradients)):
        for name, x in ours.items():
            if name == "loss":
                torch.testing.assert_close(x, expected[name])
            else:
                y = expected[name]
                of_tokens = name not in case.leaves and y.shape[:2] == inside.shape
                assert torch.equal(x, y[inside] if of_tokens else y), name


WIDE = cases(head_precision=None, products="wide", top_k=0)


@given(WIDE, st.integers(0, 99))
def test_masked_tokens_have_exactly_zero_influence(case: Case, seed: int) -> None:
    check_influence_of_masked_tokens(case, seed, "torch")


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 5)  # interpreted kernels are slow
@given(WIDE, st.integers(0, 99))
def test_masked_tokens_have_exactly_zero_influence_on_kernels(case: Case, seed: int) -> None:
    check_influence_of_masked_tokens(case, seed, "triton")


def check_influence_of_masked_tokens(case: Case, seed: int, backend: str) -> None:
    rng = torch.Generator().manual_seed(seed)
    case = replace(case, row={**case.row, "backend": backend})

    def disturb(name: str, x: Any) -> Any:
        if name in ("mask", "inside", "kept_sets", "target_ids") or x.shape[:2] != case.mask.shape:
            return x
        noise = torch.randn(x.shape, generator=rng) * 1e6
        noise[torch.rand(x.shape, generator=rng) < 0.3] = float("nan")
        mask = case.mask.view(*case.mask.shape, *[1] * (x.ndim - 2))
        return torch.where(mask, x, noise.nan_to_num().to(x.dtype) if not x.is_floating_point() else noise.to(x.dtype))

    other = replace(case, tokens={name: disturb(name, x) for name, x in case.tokens.items()})
    other.tokens["extra_factors"] = case.tokens.get("extra_factors")
    assert_same(run(case), run(other))


# This test and the next use wide tiles. In narrow tiles, the order in which BLAS adds may depend on a row's position.
@given(cases(tiles="one"), st.integers(0, 6))
def test_a_sequence_alone_has_the_bits_it_has_in_any_batch(case: Case, i: int) -> None:
    if len(case.mask):
        i %= len(case.mask)
        padded = replace(case, row={**case.row, "layout": "padded", "top_k": 0})
        together, alone = run(padded).outputs, run(padded.take([i])).outputs
        for name in ("log_probs", "log_ratio"):
            assert torch.equal(together[name][i : i + 1], alone[name]), name


@given(cases(tiles="one", old_log_probs=None, kl=None, entry="fused"))
def test_own_log_probs_as_old_ones_give_ratio_exactly_one(case: Case) -> None:
    without = run(case)
    own = run(replace(case, row={**case.row, "entry": "chained"})).outputs["log_probs"]
    case.tokens["old_log_probs"] = torch.zeros(case.mask.shape, dtype=own.dtype)
    case.tokens["old_log_probs"][case.mask] = own[case.lay_out("mask")]
    assert_same(run(case), without)
    assert not without.outputs["log_ratio"].any()
    assert all(without.metrics[f"ratio_{name}"] == 1 for name in ("mean", "min", "max"))


@given(cases(dtype="fp64", frozen="nothing", entry="fused"), st.sampled_from([-2.0, 0.5, 3.0, 1e-3, 0.0]))
def test_gradients_are_linear_in_the_upstream_gradient(case: Case, factor: float) -> None:
    leaves = leaves_of(case)
    loss = gspo_fused_loss(**arguments_of(case, leaves)).loss
    once, scaled = (torch.autograd.grad(x, list(leaves.values()), retain_graph=True) for x in (loss, factor * loss))
    for a, b in zip(once, scaled, strict=True):
        limit = FLOAT64_RELATIVE * max(a.abs().max().item(), 1e-3) if a.numel() else 0
        assert torch.allclose(b, a * factor, rtol=0, atol=limit)
