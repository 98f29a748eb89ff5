"""`gspo bench` does not time wrong gradients, records failures, and measures memory in a new process."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import CANDIDATE_GRADIENT, CANDIDATE_LOSS, FLOAT64_LOSS_RELATIVE
from torch import Tensor
from typer.testing import CliRunner

from gspo_kernels.benchmarks import candidates, measure, truth, workloads
from gspo_kernels.benchmarks.candidates import ALL
from gspo_kernels.benchmarks.suites import bench
from gspo_kernels.benchmarks.workloads import Head, Spec
from gspo_kernels.tools.cli import app

ROOT = Path(__file__).parent.parent.parent
SMALL = Spec(Head(64, 1000), 96, "rl-like")
CPU = torch.device("cpu")
NAIVE = ALL["naive GSPO"]
CUT = {"cut-cross-entropy", "cut-cross-entropy, no filter"}
INSTALLED = [c for c in ALL.values() if not c.compiles and c.absent(SMALL.head, torch.float32, CPU) is None]


def peer(name: str, loss: Callable[..., Tensor], **changes: Any) -> candidates.Candidate:
    """Return naive GSPO under another name, with another loss."""
    return NAIVE._replace(name=name, against="trl", loss=loss, **changes)


@pytest.mark.parametrize("scenario", workloads.SCENARIOS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_all_candidates_compute_the_same_loss_and_gradients(scenario: str, softcap: float | None) -> None:
    head = Head(64, 1000, softcap)
    w = workloads.make(SMALL._replace(head=head, scenario=scenario))
    true = truth.truth(w)
    assert true.d_hidden.count_nonzero() > 0
    for candidate in INSTALLED:
        if candidate.absent(head, torch.float32, CPU) is None:
            error = truth.errors(candidate.step(w, candidate.old(w)), true)
            limit = CANDIDATE_GRADIENT + 10 * candidate.budget
            assert error.worst < limit and abs(error.scale) < limit, (candidate.name, error)
            assert error.loss < CANDIDATE_LOSS, (candidate.name, error)


def test_the_truth_computed_in_chunks_equals_one_float64_graph() -> None:
    w = workloads.make(SMALL._replace(tokens=600))  # three chunks
    hidden, weight = w.hidden.double().requires_grad_(), w.weight.double().requires_grad_()
    log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, w.target_ids[..., None])[..., 0]
    loss = candidates.loss_of(log_probs, w, log_probs.detach() - w.log_ratio[:, None].double())
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    true = truth.truth(w)
    torch.testing.assert_close(true.d_hidden, d_hidden)
    torch.testing.assert_close(true.d_weight, d_weight)
    assert math.isclose(true.loss, loss.item(), rel_tol=FLOAT64_LOSS_RELATIVE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_gradients_are_not_timed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    def until(call: int, later: Callable[..., Tensor]) -> Callable[..., Tensor]:
        calls = itertools.count(1)
        return lambda *x: (NAIVE.loss if next(calls) < call else later)(*x)

    expected = {
        peer("1 % too large", lambda *x: 1.01 * NAIVE.loss(*x)): ("wrong", "the size of a gradient is off by"),
        peer("another loss", lambda *x: 0.01 + NAIVE.loss(*x)): ("wrong", "the loss is off by 1.0e-02"),
        peer("NaN", lambda *x: math.nan * NAIVE.loss(*x)): ("wrong", "d_hidden is off by nan"),
        peer("wrong after the rounds", until(5, lambda *x: NAIVE.loss(*x) / 2)): ("wrong", "after the timed runs"),
        peer("broken", fails): ("failed", "no such kernel"),
        peer("breaks in a round", until(3, fails)): ("failed", "RuntimeError: no such kernel"),
        peer("absent", NAIVE.loss, package="no-such-package"): ("absent", "no-such-package is not installed"),
    }
    monkeypatch.setattr(measure, "fresh", lambda *_, **__: {"peak_bytes": 1, "passes": 3.0})
    results = bench.compare(SMALL._replace(dtype=dtype), [NAIVE, *expected], rounds=2)
    records = {record["name"]: record for record in results["candidates"]}
    assert records["naive GSPO"]["over_naive"]["ratio"] == 1 and records["naive GSPO"]["runs"] == 2
    for candidate, (key, reason) in expected.items():
        record = records[candidate.name]
        assert reason in record[key] and not {"seconds", "over_naive"} & record.keys()
    # Only failures of other libraries are recorded. A failure of our library is raised.
    with pytest.raises(RuntimeError, match="no such kernel"):
        bench.compare(SMALL, [NAIVE, ALL["ours"]._replace(loss=fails)], rounds=1)


@pytest.mark.parametrize("name", ["naive GSPO", "ours"])
def test_a_step_that_does_not_fit_is_not_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"does_not_fit": "out of memory"}
    monkeypatch.setattr(measure, "fresh", lambda *_, name_=name, **how: large if how["name"] == name_ else {})
    records = {r["name"]: r for r in bench.compare(SMALL, [NAIVE, ALL["ours"]], rounds=1)["candidates"]}
    assert "seconds" not in records[name]
    (other,) = (record for key, record in records.items() if key != name)
    assert other["seconds"] > 0 and other["error"]["worst"] < CANDIDATE_GRADIENT
    assert ("over_naive" in other) == (name == "ours")


@pytest.mark.parametrize("name", ["naive GSPO", "ours"])
def test_memory_and_products_are_measured_in_a_new_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('the working directory is not imported from')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(place for place in sys.path if place)])
    spec = Spec(Head(64, 30_000), 1024, "dense")
    costs = measure.fresh("suites.bench", "costs_of", name=name, spec=spec, passes=True)
    gradients, logits = 4 * (1024 * 64 + 30_000 * 64), 4 * 1024 * 30_000
    if name == "naive GSPO":
        assert costs["passes"] == 3.0 and 2 * logits < costs["peak_bytes"] < 5 * logits
    else:
        assert 4.0 <= costs["passes"] < 4.2 and gradients < costs["peak_bytes"] < logits


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_memory_that_was_freed_before_the_run_does_not_hide_its_allocations() -> None:
    def blocks() -> list[bytes]:
        return [b"x" * 60_000 for _ in range(500)]  # small enough that free() may keep their memory

    freed, kept = blocks(), blocks()[:1]  # `kept` lies after the freed blocks, so that they do not end the heap
    del freed
    assert measure.peak_bytes(blocks, CPU) > 0.9 * 500 * 60_000 and kept


def test_a_new_process_reports_its_failures_and_stays_within_the_free_memory() -> None:
    assert measure.fresh("peaked", "make", rows=8, width=10**6, vocab=10**6) is None
    with pytest.raises(RuntimeError, match=r"^KeyError: 'nobody'"):
        measure.fresh("suites.bench", "costs_of", name="nobody", spec=SMALL, passes=False)


def test_candidates_take_turns_and_ratios_compare_runs_of_one_round() -> None:
    order: list[str] = []
    seconds = measure.interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 2, CPU)
    assert order == list("abbaab") and {len(taken) for taken in seconds.values()} == {2}  # round 0 is a warm-up
    assert measure.over([2.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == {"ratio": 2.0, "p20": 1.4, "p80": 2.6}
    assert measure.spread([3.0, 1.0, 2.0, 4.0, 5.0]) == {"seconds": 3.0, "p20": 1.8, "p80": 4.2, "runs": 5}


def test_the_command_forecasts_and_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "fresh", lambda *_, **__: {"peak_bytes": 1, "passes": 3.0})
    # This function limits the memory of the process, which would also apply to later tests.
    monkeypatch.setattr(measure, "stop_before_swapping", lambda: None)
    options = ["--model", "64,1000", "--tokens", "64", "--against", "torch,cce", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 0, done.output
    assert "This takes about 1 min: 1 rounds of naive GSPO, " in done.stderr
    assert "time of ours, round 1 of 1" in done.stderr
    results = json.loads(done.stdout)
    names = {record["name"] for record in results["candidates"]}
    assert names == {"naive GSPO", "torch linear_cross_entropy", "ours", "ours, budget 1e-3"} | CUT
    assert results["machine"]["cpu"] and results["versions"]["torch"] and results["on"]["sequences"] == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "trl,nobody"], "--against: nobody: choose from naive, compile, trl, trl-fp32"),
        (["--model", "gpt"], "--model: expected one of qwen3-8b"),
        (["--tokens", "many"], "--tokens: expected a number such as 4096 or 4k, got 'many'"),
        (["--tokens", "7"], "--tokens: expected at least 8"),
        (["--scenario", "sparse"], "--scenario: expected one of dense, rl-like"),
        (["--dtype", "int8"], "--dtype: expected one of float32"),
        (["--device", "warp"], "--device: expected a device that torch has here"),
    ],
)
def test_bad_options_are_refused_with_a_one_line_message(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 1 and message in done.output and len(done.output.strip().splitlines()) == 1
