"""Pairs of all settings, and triples of those that share a backward, equal float64 formulas: see `helpers.features`."""

from __future__ import annotations

import dataclasses
import inspect
import random
from typing import Any

import pytest
from helpers.array import assert_right
from helpers.device import on_device
from helpers.features import BANS, FACTORS, OF_TRITON, PARAMETERS, SHARDED, TRIPLES_OF, build, repeatable, row_of
from helpers.pair_cover import Ban, Rows, banned_values, pair_cover, seed_of_the_week

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, policy_loss
from gspo_kernels.distillation import linear_top_k

SEED = seed_of_the_week()
# Interpreted kernels are slow, so their array has pairs only.
ARRAYS = {
    "torch": pair_cover(FACTORS, seed=SEED, bans=BANS, triples_of=TRIPLES_OF),
    "triton": pair_cover({**FACTORS, **OF_TRITON}, seed=SEED, bans=BANS),
}
SHARE_OF_MAKE_TEST = {"torch": 1, "triton": 6}  # every row, or every sixth


def rows_of_the_week() -> list[Any]:
    rows = []
    for backend, array in ARRAYS.items():
        for i, row in enumerate(array):
            is_slow = row["compile"] or i % SHARE_OF_MAKE_TEST[backend]
            rows.append(pytest.param(row, id=f"{backend}-{i}", marks=pytest.mark.slow if is_slow else ()))
    return rows


def check_row(row: dict[str, Any], seed: int) -> None:
    if "lora" in row["head"]:
        pytest.importorskip("peft")
    with repeatable(row, seed):
        assert_right(build(row, seed))


@on_device
@pytest.mark.parametrize("row", rows_of_the_week())
def test_a_row_of_the_week_equals_float64(row: dict[str, Any]) -> None:
    check_row(row, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_fifty_random_rows_of_the_week_equal_float64(part: int) -> None:
    """Rows are drawn as in tests/attack.py. They combine three or more values that the array need not combine."""
    rows = Rows({**FACTORS, "compile": (False,)}, BANS)
    for seed in range(10**7 * SEED + 50 * part, 10**7 * SEED + 50 * part + 50):
        check_row(rows.any(random.Random(seed)), seed)


# These rows always run, because each detects a fault that few of the week's rows detect.
PINNED = [
    "",
    "autocast=bf16",
    "autocast=fp16",
    "entry=chained extra_ids=3",
    "ceiling=delta_above_dual_clip window=wide",
    "ceiling=dual_clip_above_delta window=wide",
    "entropy_coef=0.02 cache_mib=all_rows",
    "gradient_budget=0.3 tiles=many policy=peaked",
    "gradient_budget=0.001 tiles=parts cache_mib=all_rows ratio=token surrogate=dppo_tv window=wide",
    "gradient_budget=0.001 tiles=many policy=flat",
    "gradient_budget=0.3 tiles=many logit_softcap=5.0 temperature=per_token",
    "cache_mib=all_rows tiles=many",
    "cache_mib=all_rows dtype=fp16",
    "head=lora",
    "head=lora frozen=weight kept_sets=offsets",
    "kept_sets=offsets entropy=True",
    "kl=term cache_mib=all_rows",
    "kl=term kl_aggregation=token-mean normalizer=number",
    "products=half dtype=fp16 logit_scale=0.015625 aggregation=token-mean tiles=parts",
    "products=half dtype=fp16 logit_scale=-0.015625 aggregation=token-mean tiles=parts",
    "ratio=token",
    "rollout_correction=two",
    "token_weights=per_token kl=term",
    "top_k=3 tiles=many",
    "backend=triton cache_mib=all_rows logit_softcap=5.0",
    "backend=triton dtype=fp16",
    "backend=triton dtype=fp16 layout=packed kl=term entropy_coef=0.02",  # all rows have a gradient
    "backend=triton head_precision=bf16x3 window=wide cache_mib=all_rows head=lora",
    "backend=triton entropy_coef=0.02",
    "backend=triton kept_sets=offsets",
    "backend=triton kl=term kl_aggregation=token-mean tokens=masked_sequences",
    "backend=triton logit_softcap=5.0",
    "backend=triton strides=tokens",
    "backend=triton surrogate=cispo advantages=per_token",
    "backend=triton tiles=parts",
    "backend=triton tiles=parts dtype=bf16",
    "backend=triton tiles=parts gradient_budget=0.001",
]


@on_device
@pytest.mark.parametrize("settings", PINNED)
def test_a_pinned_row_equals_float64(settings: str) -> None:
    check_row(row_of(settings), 1)


@pytest.mark.parametrize("ban", [pytest.param(ban, id=f"{', '.join(ban.factors)}: {ban.reason}") for ban in BANS])
def test_a_ban_with_an_error_raises_it(ban: Ban) -> None:
    if ban.error is None:
        pytest.skip("the combination has no meaning")
    others = Rows(FACTORS, [x for x in BANS if x is not ban and x.factors != ban.factors])
    rng = random.Random(0)
    for values in banned_values(ban, FACTORS):
        banned = dict(zip(ban.factors, values, strict=True))
        start = {"compile": False, "tokens": "holes", "frozen": "nothing", "kept_sets": None, "ones": None, **banned}
        row = others.any(rng, start)
        with pytest.raises((ValueError, TypeError), match=ban.error):
            assert_right(build(row, 0))


def test_every_parameter_is_a_factor() -> None:
    """A new parameter of a public function, or field of `Objective`, must enter the table."""
    functions = (gspo_fused_loss, linear_log_probs, policy_loss, linear_top_k)
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    parameters |= {field.name for field in dataclasses.fields(Objective)}
    known = {*FACTORS, *SHARDED, *(name for names in PARAMETERS.values() for name in names)}
    assert parameters <= known and {*SHARDED, *PARAMETERS} <= {*parameters, *FACTORS}
