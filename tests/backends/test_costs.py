"""Check the counts of `faults/costs.py` (products, bytes, launches, kernels) against the golden file and formulas.

If a count changed for a reason, `PYTHONPATH=tests python -m faults.costs --write` rewrites the golden file. Read the
difference before you commit it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import costs
from torch import Tensor

from gspo_kernels.backends.torch import backward, forward
from gspo_kernels.backends.triton import sequence
from gspo_kernels.ops import loss as operators

ROOT = Path(__file__).parent.parent.parent
GOLDEN = json.loads(costs.GOLDEN.read_text())
MIB = 2**20
# situation -> (share of the tokens that have a gradient, matrix products of the backward for each of these tokens).
# (5 / 8, 3) is for situations that are not listed: two of eight sequences have advantage 0, and one is clipped.
WORK = dict.fromkeys(costs.SITUATIONS, (5 / 8, 3)) | {
    "dense": (1.0, 3), "dense, entropy": (1.0, 3), "no gradient asked": (1.0, 0), "frozen head": (1.0, 2),
    "frozen body": (1.0, 2), "half prompt": (1.0, 3), "half prompt, zero advantages": (6 / 8, 3),
    "rl-like, KL": (1.0, 3), "rl-like, entropy bonus": (1.0, 3), "KL, budget 1e-3": (1.0, 3),
    "dense, all kept": (1.0, 3),
}  # fmt: skip  # a table
# Share of the tokens whose logits the backward recomputes, if not that of live tokens. The cache of the second holds
# two sequences, of which one is clipped.
RECOMPUTED = {"dense, all kept": 0.0, "rl-like, half kept": 4 / 8}
IGNORE_LOG_OF_ZERO = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns in tiles without mass
DROPPING = ("rl-like, budget 1e-3", "KL, budget 1e-3")  # the budget drops cells; for a flat policy it drops none


def expect_golden(counts: Any, golden: Any) -> None:
    """Assert that counts equal the golden ones.

    Peak bytes are compared only under the torch version that wrote the file, because temporaries differ by version.
    """
    same_torch = torch.__version__.split("+")[0] == GOLDEN["torch"]
    changed = costs.differences(counts, golden)
    assert [line for line in changed if same_torch or "peak bytes" not in line] == []


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
    assert ("gradient_tile" in first) == (name != "forward only")
    assert ("weight_product" in first) == name.startswith("budget")
    first.pop("torch")  # launches of PyTorch, in the golden file
    assert set(first.values()) == {1}


@pytest.mark.slow
def test_bytes_and_compiled_kernels_at_real_sizes_are_those_of_the_golden_file() -> None:
    counts = costs.in_new_process("compiled")
    expect_golden(counts, {part: GOLDEN[part] for part in counts})
    assert set(counts) | {"torch", "work", "launches"} == set(GOLDEN)
    for name, options in costs.REAL.items():
        n = options["rows"]
        h = options.get("width", 4096)
        v = options.get("vocab", 151_936)
        gradients = 2 * n * h + 2 * v * h
        limit = gradients + 4 * n * v / 256 * (2 if options.get("entropy") else 1) + 2 * n * h + 256 * MIB
        assert gradients < counts["real sizes"][name]["peak bytes"] <= limit
    one_batch, six_batches = counts["compiled kernels, by batches"].values()
    assert one_batch == six_batches


def test_the_golden_file_has_every_situation_and_no_other() -> None:
    assert set(GOLDEN["work"]) == set(costs.SITUATIONS) == set(WORK)
    assert set(GOLDEN["launches"]) == set(costs.LAUNCHING)
    assert set(GOLDEN["real sizes"]) == set(costs.REAL)


# -- faults that must change a count


def multiply_masked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = forward.Tiles
    monkeypatch.setattr(forward, "Tiles", lambda head, index: tiles(head, torch.arange(len(head.hidden))))


def multiply_rows_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = operators.multiply_no_nan
    monkeypatch.setattr(operators, "multiply_no_nan", lambda coefficient, d_loss: exact(coefficient, d_loss) + 1e-30)


def keep_gradient_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    d_logits = backward.LogitGradients.d_logits
    kept = []

    def leaking(*args: Any) -> Tensor:
        kept.append(d_logits(*args))
        return kept[-1]

    monkeypatch.setattr(backward.LogitGradients, "d_logits", leaking)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("situation", "fault", "count"),
    [
        ("half prompt", multiply_masked_rows, "multiply-adds"),
        ("rl-like", multiply_rows_without_gradient, "multiply-adds"),
        ("dense", keep_gradient_tiles, "peak bytes"),
    ],
)
def test_a_more_expensive_step_changes_a_count(
    situation: str, fault: Callable[[pytest.MonkeyPatch], None], count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = costs.work(**costs.SITUATIONS[situation])
    fault(monkeypatch)
    bad = costs.work(**costs.SITUATIONS[situation])
    assert bad["passes"] == good["passes"]  # this reported metric does not show the extra cost
    assert any(line.startswith(f"{count}: ") for line in costs.differences(bad, good))
    assert bad[count] > good[count]


@IGNORE_LOG_OF_ZERO
def test_one_more_launch_changes_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = sequence.launch

    def launch_twice(kernel: Any, *args: Any, **arguments: Any) -> None:
        launch(kernel, *args, **arguments)
        if kernel is sequence.finish:
            launch(kernel, *args, **arguments)

    monkeypatch.setattr(sequence, "launch", launch_twice)
    counts = {"4 x 8": costs.launched("forward only", 4, 8)}
    golden = {"4 x 8": GOLDEN["launches"]["forward only"]["4 x 8"]}
    assert costs.differences(counts, golden) == ["4 x 8 | finish: 2, was 1"]


@pytest.mark.slow
def test_a_kernel_compiled_anew_for_every_batch_changes_a_count() -> None:
    code = """
import json
from faults import costs
from gspo_kernels.backends.triton import gradient_tile
for parameter in gradient_tile.gradient_tile.params:
    parameter.do_not_specialize = False
print(json.dumps([costs.variants(1), costs.variants(2)]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(costs.TESTS)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    one_batch, two_batches = json.loads(run.stdout)
    assert one_batch["forward_tile"] == two_batches["forward_tile"]
    assert one_batch["gradient_tile"] < two_batches["gradient_tile"]


def test_differences_name_new_and_missing_counts() -> None:
    changed = costs.differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}})
    assert changed == ["a | d: absent, was 3", "a | c: 2, was absent"]
