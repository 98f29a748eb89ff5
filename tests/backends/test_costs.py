"""The gate on what a step costs on any machine: `python -m gspo_kernels.benchmarks costs`, exactly, and by formula.

Where a number changed for a reason, `python -m gspo_kernels.benchmarks costs --write` writes it: read the difference
first. The last tests run `python -m gspo_kernels.benchmarks overhead`, which measures what depends on the machine.
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
from torch import Tensor

from gspo_kernels import ops
from gspo_kernels.backends.torch import backward, forward
from gspo_kernels.backends.triton import sequence
from gspo_kernels.benchmarks.suites import costs, overhead

ROOT = Path(__file__).parent.parent.parent
GOLDEN = json.loads(costs.GOLDEN.read_text())
MIB = 2**20
# Share of the tokens that have a gradient, and matrix products that the backward makes for each of them.
WORK = {
    "dense": (1.0, 3),
    "dense, entropy": (1.0, 3),
    "no gradient asked": (1.0, 0),
    "frozen head": (1.0, 2),
    "frozen body": (1.0, 2),
    "half prompt": (1.0, 3),
    "half prompt, zero advantages": (6 / 8, 3),
    "rl-like": (5 / 8, 3),
    "rl-like, KL": (1.0, 3),
    "rl-like, entropy bonus": (1.0, 3),
    "rl-like, budget 1e-3": (5 / 8, 3),
    "KL, budget 1e-3": (1.0, 3),
    "flat policy, budget 1e-3": (5 / 8, 3),
    "padded tiles": (5 / 8, 3),
}
OF_THE_INTERPRETER = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # logarithms of tiles with no mass
CHEAPER = ("rl-like, budget 1e-3", "KL, budget 1e-3")  # a budget drops cells here; of the flat policy nothing can go


def expect_golden(found: Any, golden: Any) -> None:
    """Equal; bytes only with the torch that wrote the golden file, another may need other temporaries."""
    same_torch = torch.__version__.split("+")[0] == GOLDEN["torch"]
    changed = costs.differences(found, golden)
    assert [line for line in changed if same_torch or "peak bytes" not in line] == []


@pytest.mark.parametrize("name", costs.SITUATIONS)
def test_products_and_bytes_of_a_step(name: str) -> None:
    found, options = costs.work(**costs.SITUATIONS[name]), costs.SITUATIONS[name]
    expect_golden(found, GOLDEN["work"][name])
    live, products = WORK[name]
    rows = options.get("rows", costs.ROWS)
    tokens = rows - costs.SEQUENCES * options.get("prompt", 0)
    assert found["live rows"] == live * tokens
    if name not in CHEAPER:
        assert found["live logits"] == live * tokens * costs.VOCAB
    assert (found["live logits"] < live * tokens * costs.VOCAB) == (name in CHEAPER)
    assert found["passes"] == pytest.approx(1 + products * found["live logits"] / (tokens * costs.VOCAB), rel=1e-6)
    # What was counted is what was said, whole tiles of 128 rows.
    padded = [-(-n // 128) * 128 for n in (tokens, round(live * tokens))]
    if name == "padded tiles":
        assert found["multiply-adds"] == (padded[0] + 3 * padded[1]) * costs.WIDTH * costs.VOCAB
    else:
        assert found["multiply-adds"] == found["passes"] * tokens * costs.WIDTH * costs.VOCAB
    # README: gradients + 4 N V / 256 (twice with entropy) + the rows (here 4 N H, in fp32) + the workspace.
    frozen = options.get("frozen", ())
    gradients = 4 * costs.WIDTH * (("hidden" not in frozen) * rows + ("weight" not in frozen) * costs.VOCAB)
    entropy = options.get("entropy", False) or options.get("objective", costs.GSPO).entropy_coef != 0
    partial_sums = 4 * rows * costs.VOCAB / 256 * (2 if entropy else 1)
    limit = gradients + partial_sums + 4 * rows * costs.WIDTH + costs.WORKSPACE_MIB * MIB
    assert gradients < found["peak bytes"] <= limit < gradients + 4 * rows * costs.VOCAB


@pytest.mark.parametrize("name", costs.LAUNCHING)
@OF_THE_INTERPRETER
def test_launches_do_not_grow_with_the_batch(name: str) -> None:
    found = [costs.launched(name, *batch) for batch in costs.BATCHES]
    assert found[0] == found[1] == found[2]
    expect_golden({f"{s} x {n}": x for (s, n), x in zip(costs.BATCHES, found, strict=True)}, GOLDEN["launches"][name])
    assert ("gradient_tile" in found[0]) == (name != "forward only")
    assert ("weight_product" in found[0]) == name.startswith("budget")
    assert set(found[0].values()) == {1}


@pytest.mark.slow
def test_bytes_and_compiled_kernels_at_real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("TRITON_INTERPRET")
    found = costs.measure.fresh("suites.costs", "compiled")
    expect_golden(found, {part: GOLDEN[part] for part in found})
    assert set(found) | {"torch", "work", "launches"} == set(GOLDEN)
    for name, options in costs.REAL.items():
        n, h, v = options["rows"], options.get("width", 4096), options.get("vocab", 151_936)
        gradients = 2 * n * h + 2 * v * h
        limit = gradients + 4 * n * v / 256 * (2 if options.get("entropy") else 1) + 2 * n * h + 256 * MIB
        assert gradients < found["real sizes"][name]["peak bytes"] <= limit
    one, six = found["compiled kernels, by batches"].values()
    assert one == six


def test_the_golden_file_has_every_situation_and_no_other() -> None:
    assert set(GOLDEN["work"]) == set(costs.SITUATIONS) == set(WORK)
    assert set(GOLDEN["launches"]) == set(costs.LAUNCHING)
    assert set(GOLDEN["real sizes"]) == set(costs.REAL)


# -- what the gate must see


def masked_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forward.Tiles
    monkeypatch.setattr(forward, "Tiles", lambda head, index: whole(head, torch.arange(len(head.hidden))))


def dead_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ops._times
    monkeypatch.setattr(ops, "_times", lambda coefficient, d_loss: exact(coefficient, d_loss) + 1e-30)


def gradient_tiles_stay_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    d_logits, kept = backward.GradientRows.d_logits, []

    def leaking(*args: Any) -> Tensor:
        kept.append(d_logits(*args))
        return kept[-1]

    monkeypatch.setattr(backward.GradientRows, "d_logits", leaking)


@pytest.mark.parametrize(
    ("situation", "seed", "sees"),
    [
        ("half prompt", masked_rows_are_multiplied, "multiply-adds"),
        ("rl-like", dead_rows_are_multiplied, "multiply-adds"),
        ("dense", gradient_tiles_stay_alive, "peak bytes"),
    ],
)
def test_a_dearer_step_is_seen(
    situation: str, seed: Callable[[pytest.MonkeyPatch], None], sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = costs.work(**costs.SITUATIONS[situation])
    seed(monkeypatch)
    bad = costs.work(**costs.SITUATIONS[situation])
    assert bad["passes"] == good["passes"]  # what the library says of itself does not tell
    assert any(line.startswith(f"{sees}: ") for line in costs.differences(bad, good))
    assert bad[sees] > good[sees]


@OF_THE_INTERPRETER
def test_one_more_launch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = sequence.launch

    def twice(kernel: Any, *args: Any, **arguments: Any) -> None:
        launch(kernel, *args, **arguments)
        if kernel is sequence.finish:
            launch(kernel, *args, **arguments)

    monkeypatch.setattr(sequence, "launch", twice)
    found = {"4 x 8": costs.launched("forward only", 4, 8)}
    golden = {"4 x 8": GOLDEN["launches"]["forward only"]["4 x 8"]}
    assert costs.differences(found, golden) == ["4 x 8 | finish: 2, was 1"]


@pytest.mark.slow
def test_a_kernel_compiled_for_every_batch_is_seen() -> None:
    code = """
import json
from gspo_kernels.benchmarks.suites import costs, overhead
from gspo_kernels.backends.triton import gradient_tile
for parameter in gradient_tile.gradient_tile.params:
    parameter.do_not_specialize = False
print(json.dumps([costs.variants(1), costs.variants(2)]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    one, two = json.loads(run.stdout)
    assert one["forward_tile"] == two["forward_tile"] and one["gradient_tile"] < two["gradient_tile"]


def test_differences_name_what_is_new_and_what_is_gone() -> None:
    assert costs.differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}) == [
        "a | d: absent, was 3",
        "a | c: 2, was absent",
    ]
    assert costs.differences({"a": 1.0}, {"a": 1}) == []


# -- host time


@pytest.mark.slow
def test_a_trial_of_the_overhead_suite_writes_everything(tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    command = [sys.executable, "-m", "gspo_kernels.benchmarks", "overhead", "--tiny", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(output.read_text())["results"]
    timed = {(r["what"], r["candidate"]) for r in results["calls"]}
    candidates = {(what, name) for what, names in overhead.CANDIDATES.items() for name in names}
    assert {f"{what}: {name}" for what, name in candidates - timed} == set(results["absent"])
    assert all("TRL" in name or "Liger" in name for name in results["absent"])
    for r in results["calls"]:
        assert 0 < r["p20"] <= r["seconds"] <= r["p80"] and (r["ratio"] == 1) == (r["candidate"] == overhead.PLAIN)
    parts = {name: part["seconds"] for name, part in results["parts of a call"].items()}
    assert len(parts) == 7 and min(parts.values()) > 0
    assert results["import after torch, processor time"]["gspo_kernels"]["seconds"] > 0
    assert results["commands, wall time"]["gspo --help"]["seconds"] > 0


@pytest.mark.parametrize("what", overhead.CANDIDATES)
def test_a_candidate_with_a_wrong_gradient_is_not_timed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(overhead.call_times(what, "ours", seconds=0.0)) == 5
    right = overhead.CANDIDATES[what]["ours"]
    monkeypatch.setitem(overhead.CANDIDATES[what], "ours", lambda b: 1.001 * right(b))
    with pytest.raises(RuntimeError, match="wrong gradients"):
        overhead.call_times(what, "ours", seconds=0.0)
