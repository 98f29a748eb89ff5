"""Check the counts of `faults/costs.py` (products, bytes, launches, kernels) against the golden file and formulas.

If a count changed for a reason, `PYTHONPATH=tests python -m faults.costs` rewrites the golden file. Read the
difference before you commit it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from faults import costs

GOLDEN = json.loads(costs.GOLDEN.read_text())
MIB = 2**20
# situation -> (share of the tokens that have a gradient, matrix products of the backward for each of these tokens).
# (5 / 8, 3) is for situations that are not listed: two of eight sequences have advantage 0, and one is clipped.
WORK = dict.fromkeys(costs.SITUATIONS, (5 / 8, 3)) | {
    "dense": (1.0, 3), "dense, entropy": (1.0, 3), "no gradient asked": (1.0, 0), "frozen head": (1.0, 2),
    "frozen body": (1.0, 2), "half prompt": (1.0, 3), "half prompt, zero advantages": (6 / 8, 3),
    "rl-like, KL": (1.0, 3), "rl-like, entropy bonus": (1.0, 3), "KL, budget 1e-3": (1.0, 3),
    "dense, all cached": (1.0, 3),
}  # fmt: skip  # a table
# Share of the tokens whose logits the backward recomputes, if not that of live tokens. The cache of the second holds
# two sequences, of which one is clipped.
RECOMPUTED = {"dense, all cached": 0.0, "rl-like, half cached": 4 / 8}
IGNORE_LOG_OF_ZERO = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns in tiles without mass
DROPPING = ("rl-like, budget 1e-3", "KL, budget 1e-3")  # the budget drops cells; for a flat policy it drops none


def expect_golden(counts: Any, golden: Any) -> None:
    """Assert that counts equal the golden ones.

    Peak bytes are compared only under the torch version that wrote the file, because temporaries differ by version.
    """
    assert comparable(counts) == comparable(golden)


def comparable(counts: Any) -> Any:
    same_torch = torch.__version__.split("+")[0] == GOLDEN["torch"]
    if not isinstance(counts, dict):
        return counts
    return {name: comparable(x) for name, x in counts.items() if same_torch or name != "peak bytes"}


@pytest.mark.parametrize("name", costs.SITUATIONS)
def test_products_and_bytes_of_a_step_are_those_of_the_golden_file(name: str) -> None:
    options = costs.SITUATIONS[name]
    counts = costs.work(**options)
    expect_golden(counts, GOLDEN["work"][name])
    live, products = WORK[name]
    rows = options.get("rows", costs.ROWS)
    tokens = rows - costs.SEQUENCES * options.get("prompt", 0)
    live_logits = live * tokens * costs.VOCAB
    assert counts["live rows"] == live * tokens
    assert counts["live logits"] < live_logits if name in DROPPING else counts["live logits"] == live_logits
    share = counts["live logits"] / (tokens * costs.VOCAB)
    expected = 1 + (products - 1) * share + RECOMPUTED.get(name, share)
    assert counts["passes"] == pytest.approx(expected, rel=1e-6)
    # The reported passes equal the counted products. Only the counted products include padding to tiles of 128 rows.
    padded = [-(-n // 128) * 128 for n in (tokens, round(live * tokens))]
    if name == "padded tiles":
        assert counts["multiply-adds"] == (padded[0] + 3 * padded[1]) * costs.WIDTH * costs.VOCAB
    else:
        assert counts["multiply-adds"] == counts["passes"] * tokens * costs.WIDTH * costs.VOCAB
    # The README's limit: gradients, 4 N V / 256 bytes (twice as many with entropy), gathered rows (here 4 N H bytes, in
    # fp32), the workspace, and the cache.
    frozen = options.get("frozen", ())
    gradients = 4 * costs.WIDTH * (("hidden" not in frozen) * rows + ("weight" not in frozen) * costs.VOCAB)
    entropy = options.get("entropy", False) or options.get("objective", costs.GSPO).entropy_coef != 0
    partial_sums = 4 * rows * costs.VOCAB / 256 * (2 if entropy else 1)
    limit = gradients + partial_sums + 4 * rows * costs.WIDTH + costs.WORKSPACE_MIB * MIB
    assert gradients < counts["peak bytes"] <= limit + options.get("cache_mib", 0) * MIB
    assert limit < gradients + 4 * rows * costs.VOCAB


@pytest.mark.slow
@pytest.mark.parametrize("name", costs.LAUNCHING)
@IGNORE_LOG_OF_ZERO
def test_launches_do_not_grow_with_the_batch(name: str) -> None:
    by_batch = [costs.launched(name, *batch) for batch in costs.BATCHES]
    first = by_batch[0]
    assert first == by_batch[1] == by_batch[2]
    named = {f"{s} x {n}": x for (s, n), x in zip(costs.BATCHES, by_batch, strict=True)}
    expect_golden(named, GOLDEN["launches"][name])
    assert ("gradient_tile" in first) == (name not in ("forward only", "kept sets"))
    sums = first.pop("sum_pairs", 0)  # of d_hidden and d_weight
    assert (sums, first.get("multiply_pairs", 0)) == ((2, 1) if name == "kept sets" else (0, 0))
    assert ("weight_product" in first) == name.startswith("budget")
    first.pop("torch")  # launches of PyTorch, in the golden file
    assert set(first.values()) == {1}


@pytest.mark.slow
def test_compiled_kernels_are_those_of_the_golden_file_and_do_not_depend_on_the_batch() -> None:
    counts = costs.in_new_process("compiled")
    expect_golden(counts, {part: GOLDEN[part] for part in counts})
    assert set(counts) | {"torch", "work", "launches"} == set(GOLDEN)
    one_batch, six_batches = counts["compiled kernels, by batches"].values()
    assert one_batch == six_batches
