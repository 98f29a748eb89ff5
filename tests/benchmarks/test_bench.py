"""`gspo bench` and the suites: who is wrong is not timed, who is absent is named."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import CANDIDATE_GRADIENT, CANDIDATE_LOSS, FLOAT64_LOSS_RELATIVE
from typer.testing import CliRunner

from gspo_kernels.benchmarks import candidates, json_text, measure, peaked, truth, workloads
from gspo_kernels.benchmarks.candidates import ALL
from gspo_kernels.benchmarks.suites import bench
from gspo_kernels.benchmarks.workloads import Head, Spec
from gspo_kernels.tools.cli import app

ROOT = Path(__file__).parent.parent.parent
SMALL = Spec(Head(64, 1000), 96, "rl-like")
CPU = torch.device("cpu")
CUT = {"cut-cross-entropy", "cut-cross-entropy, no filter"}
HERE = [one for one in ALL.values() if not one.compiles and one.absent(SMALL.head, torch.float32, CPU) is None]


@pytest.mark.parametrize("scenario", workloads.SCENARIOS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_everyone_computes_the_same_loss_and_gradients(scenario: str, softcap: float | None) -> None:
    head = Head(64, 1000, softcap)
    w = workloads.make(SMALL._replace(head=head, scenario=scenario))
    true = {per_token: truth.truth(w, per_token) for per_token in (False, True)}
    assert true[False].d_hidden.count_nonzero() > 0
    for one in HERE:
        if one.absent(head, torch.float32, CPU) is None:
            error = truth.errors(one.step(w, one.old(w)), true[one.per_token])
            assert error.worst < CANDIDATE_GRADIENT + 10 * one.budget, (one.name, error)
            assert abs(error.scale) < CANDIDATE_GRADIENT + 10 * one.budget, (one.name, error)
            assert error.loss < CANDIDATE_LOSS, (one.name, error)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in ALL.items() if one.compiles])
def test_those_that_compile_do_too(name: str) -> None:
    one = ALL[name]
    if why := one.absent(SMALL.head, torch.float32, CPU):
        pytest.skip(why)
    w = workloads.make(SMALL)
    assert truth.errors(one.step(w, one.old(w)), truth.truth(w)).worst < CANDIDATE_GRADIENT


def test_a_budget_drops_something_of_a_batch_and_its_error_is_seen() -> None:
    w = workloads.make(Spec(Head(256, 16_000), 512, "rl-like"))
    true = truth.truth(w)
    exact, dropped = (truth.errors(ALL[n].step(w, ALL[n].old(w)), true) for n in ("ours", "ours, budget 1e-3"))
    assert exact.worst < CANDIDATE_GRADIENT < 1e-4 < dropped.worst < 1e-2


def test_the_truth_is_that_of_one_graph_in_float64() -> None:
    w = workloads.make(SMALL._replace(scenario="kl"))
    hidden, weight = w.hidden.double().requires_grad_(), w.weight.double().requires_grad_()
    log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, w.target_ids[..., None])[..., 0]
    assert w.log_ratio is not None and w.kl_drift is not None
    own = log_probs.detach()
    old = candidates.Old(own - w.log_ratio[:, None].double(), own + w.kl_drift.double())
    loss = candidates.loss_of(log_probs, w, old)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    found = truth.truth(w)
    torch.testing.assert_close(found.d_hidden, d_hidden)
    torch.testing.assert_close(found.d_weight, d_weight)
    assert math.isclose(found.loss, loss.item(), rel_tol=FLOAT64_LOSS_RELATIVE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_wrong_gradients_no_speed_is_told(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(w: Any, old: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 1.01 * ALL["naive GSPO"].loss(w, old, hidden, weight)

    def shifted(w: Any, old: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 0.01 + ALL["naive GSPO"].loss(w, old, hidden, weight)

    def not_a_number(w: Any, old: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return math.nan * ALL["naive GSPO"].loss(w, old, hidden, weight)

    def fails(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bench, "fresh", lambda *_, **__: {"peak_bytes": 1, "passes": 3.0})
    naive = ALL["naive GSPO"]
    wrong = naive._replace(name="off by a percent", against="trl", loss=scaled)
    lost = naive._replace(name="another loss", against="trl", loss=shifted)
    nan = naive._replace(name="not a number", against="trl", loss=not_a_number)
    broken = naive._replace(name="broken", against="trl", loss=fails)
    absent = naive._replace(name="elsewhere", against="trl", package="no-such-package")
    found = bench.compare(SMALL._replace(dtype=dtype), [naive, wrong, lost, nan, broken, absent], rounds=1)
    records = {record["name"]: record for record in found["candidates"]}
    assert records["naive GSPO"]["over_naive"]["ratio"] == 1 and records["naive GSPO"]["seconds"] > 0
    assert "the size of a gradient is off by" in records["off by a percent"]["wrong"]
    assert "the loss is off by 1.0e-02" in records["another loss"]["wrong"]
    assert "d_hidden is off by nan" in records["not a number"]["wrong"]
    assert "no such kernel" in records["broken"]["failed"]
    assert records["elsewhere"]["absent"] == "no-such-package is not installed"
    for name in ("off by a percent", "another loss", "not a number", "broken", "elsewhere"):
        assert not {"seconds", "over_naive"} & records[name].keys()


@pytest.mark.parametrize("who", ["naive GSPO", "ours"])
def test_what_does_not_fit_is_not_timed(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"does_not_fit": "out of memory"}
    monkeypatch.setattr(bench, "fresh", lambda *_, name, **__: large if name == who else {"peak_bytes": 1})
    found = bench.compare(SMALL, [ALL["naive GSPO"], ALL["ours"]], rounds=1)
    records = {record["name"]: record for record in found["candidates"]}
    assert records[who]["does_not_fit"] == "out of memory" and "seconds" not in records[who]
    (other,) = (record for name, record in records.items() if name != who)
    assert other["seconds"] > 0 and other["error"]["worst"] < CANDIDATE_GRADIENT
    assert ("over_naive" in other) == (who == "ours")  # without naive there is nothing to compare with


def test_old_log_probs_that_do_not_fit_do_not_fit_either(monkeypatch: pytest.MonkeyPatch) -> None:
    naive = ALL["naive GSPO"]

    def logs(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if len(hidden) == SMALL.tokens:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return naive.log_probs(hidden, *arguments)

    monkeypatch.setitem(ALL, "naive GSPO", naive._replace(log_probs=logs))
    assert bench.costs_of("naive GSPO", list(SMALL), passes=False) == {"does_not_fit": "out of memory"}


def test_a_batch_that_does_not_fit_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.import_module("gspo_kernels.benchmarks.suites.bench")  # what the command imports
    monkeypatch.setattr(installed, "fresh", lambda *_, **__: None)
    monkeypatch.setattr(installed, "stop_before_swapping", lambda: None)  # it would hold for the tests after this one
    done = CliRunner().invoke(app, ["bench", "--model", "64,1000", "--tokens", "64", "--against", "naive"])
    assert done.exit_code == 1 and "fewer --tokens" in done.output


def test_a_peer_that_fails_while_it_is_timed_is_reported_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def tires(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")
        return ALL["naive GSPO"].loss(*arguments)

    monkeypatch.setattr(bench, "fresh", lambda *_, **__: {"peak_bytes": 1})
    naive = ALL["naive GSPO"]
    found = bench.compare(SMALL, [naive, naive._replace(name="tires", against="trl", loss=tires)], rounds=3)
    first, second = found["candidates"]
    assert first["runs"] == 3 and len(calls) == 3
    assert second["failed"] == "RuntimeError: CUDA error: an illegal memory access" and "seconds" not in second


def test_who_is_right_only_at_first_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def lazy(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return ALL["naive GSPO"].loss(*arguments) * (1.0 if len(calls) < 3 else 0.5)

    monkeypatch.setattr(bench, "fresh", lambda *_, **__: {"peak_bytes": 1})
    naive = ALL["naive GSPO"]
    found = bench.compare(SMALL, [naive, naive._replace(name="lazy", against="trl", loss=lazy)], rounds=2)
    first, second = found["candidates"]
    assert first["runs"] == 2 and "after the timed runs" in second["wrong"] and "seconds" not in second


def test_ours_failing_is_no_footnote(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("ours is broken")

    monkeypatch.setattr(bench, "fresh", lambda *_, **__: {"peak_bytes": 1})
    with pytest.raises(RuntimeError, match="ours is broken"):
        bench.compare(SMALL, [ALL["naive GSPO"], ALL["ours"]._replace(loss=fails)], rounds=1)


@pytest.mark.parametrize(("name", "passes"), [("naive GSPO", 3.0), ("ours", None)])
def test_memory_and_products_are_measured_in_a_process_of_their_own(name: str, passes: float | None) -> None:
    spec = Spec(Head(64, 6000), 1024, "dense")
    found = measure.fresh("suites.bench", "costs_of", name=name, spec=spec, passes=True)
    gradients = 4 * (1024 * 64 + 6000 * 64)
    logits = 4 * 1024 * 6000
    if name == "naive GSPO":
        assert found["passes"] == 3.0 and 2 * logits < found["peak_bytes"] < 5 * logits
    else:
        assert 4.0 <= found["passes"] < 4.2 and gradients < found["peak_bytes"] < logits


def test_too_much_memory_is_told_and_not_taken() -> None:
    assert measure.fresh("peaked", "make", rows=8, width=10**6, vocab=10**6) is None


def test_a_failure_in_another_process_is_a_failure_here() -> None:
    with pytest.raises(RuntimeError, match=r"^KeyError: 'nobody'"):
        measure.fresh("suites.bench", "costs_of", name="nobody", spec=SMALL, passes=False)


def test_another_process_takes_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))  # `python -m pytest` has it as ""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    found = measure.fresh("suites.bench", "costs_of", name="ours", spec=SMALL, passes=True)
    assert found["passes"] > 1


def test_the_limit_on_memory_can_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        for free in (64 << 20, 65 << 20):  # KiB: more is free than the first time
            monkeypatch.setattr(measure, "_kib", lambda *_, free=free: free)
            measure.stop_before_swapping()
            assert resource.getrlimit(resource.RLIMIT_DATA) == (free << 10, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_json_has_no_nan() -> None:
    assert json.loads(json_text.dumps({"a": [math.nan, 1.0, (math.inf,)]})) == {"a": [None, 1.0, [None]]}


def test_runs_take_turns_and_the_first_is_not_counted() -> None:
    order: list[str] = []
    taken = measure.interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 2, CPU)
    assert order == list("abbaab") and {len(seconds) for seconds in taken.values()} == {2}
    assert measure.over([2.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == {"ratio": 2.0, "p20": 1.4, "p80": 2.6}
    assert measure.spread([3.0, 1.0, 2.0, 4.0, 5.0]) == {"seconds": 3.0, "p20": 1.8, "p80": 4.2, "runs": 5}


def test_the_command_prints_one_json_object() -> None:
    asked = ["bench", "--model", "64,1000", "--tokens", "64", "--against", "torch,cce", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    names = {record["name"] for record in found["candidates"]}
    assert names == {"naive GSPO", "torch linear_cross_entropy", "ours", "ours, budget 1e-3"} | CUT
    assert found["machine"]["cpu"] and found["versions"]["torch"] and found["on"]["sequences"] == 8
    for record in found["candidates"]:
        if "seconds" in record:
            assert {"error", "error_over_naive", "peak_bytes", "passes", "p20", "p80"} <= record.keys()


@pytest.mark.parametrize(("before", "warns"), [(2.0, True), (0.1, False)])
def test_a_busy_machine_is_told_of(before: float, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.import_module("gspo_kernels.benchmarks.suites.bench")  # what the command imports
    monkeypatch.setattr(installed, "fresh", lambda *_, **__: {"peak_bytes": 1})
    monkeypatch.setattr(installed, "stop_before_swapping", lambda: None)  # it would hold for the tests after this one
    monkeypatch.setattr(installed, "load", lambda: before)
    asked = ["bench", "--model", "64,1000", "--tokens", "64", "--against", "naive", "--rounds", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0 and ("These cores were in use" in done.output) == warns


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--against", "trl,nobody"], "--against: nobody: choose from naive, compile, trl"),
        (["--model", "gpt"], "--model: expected one of qwen3-8b"),
        (["--model", "1,1"], "at least 64,1000"),
        (["--model", "64,1000000000000000000"], "less than 2^20,2^31; got '64,1000000000000000000'"),
        (["--model", ""], "--model: expected one of qwen3-8b"),
        (["--tokens", "many"], "--tokens: expected a number such as 4096 or 4k, got 'many'"),
        (["--tokens", "7"], "--tokens: expected at least 8"),
        (["--scenario", "sparse"], "--scenario: expected one of dense, rl-like"),
        (["--dtype", "int8"], "--dtype: expected one of float32"),
        (["--device", "warp"], "--device: expected a device that torch has here"),
    ],
)
def test_bad_options_are_said_in_a_line(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 1 and said in done.output and len(done.output.strip().splitlines()) == 1


def test_the_synthetic_policy_has_the_entropies_it_promises() -> None:
    found = peaked.about(peaked.make(2048, 256, 5000))
    assert 0.45 < found["share under 0.01 nats"] < 0.55 and 0.15 < found["share above 0.67 nats"] < 0.25
    assert list(found["quantiles"].values()) == sorted(found["quantiles"].values())
    surer = peaked.about(peaked.make(2048, 256, 5000, sure=0.8))
    assert 0.75 < surer["share under 0.01 nats"] < 0.85
    capped = peaked.about(peaked.make(2048, 256, 5000, softcap=30.0))
    assert 0.45 < capped["share under 0.01 nats"] < 0.55


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["step", "vocab", "trainer", "sparsity --passes --time"])
def test_a_suite_runs_and_its_figure_is_drawn(suite: str, tmp_path: Path) -> None:
    from gspo_kernels.benchmarks.report.figures import DRAW

    name, *options = suite.split()
    output = tmp_path / f"{name}.json"
    peers = {"sparsity": [], "vocab": ["--against", "torch"]}.get(name, ["--against", "naive"])
    command = [
        sys.executable,
        "-m",
        "gspo_kernels.benchmarks",
        name,
        *options,
        *peers,
        "--tiny",
        "--output",
        str(output),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(output.read_text())
    assert found["suite"] == name and found["commit"] and found["versions"]["torch"]
    if draw := DRAW.get(name):
        draw(found["results"], tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 5000


def test_all_named_baselines_are_there() -> None:
    wanted = {"naive", "compile", "trl", "liger", "cce", "verl", "torch"}
    assert set(candidates.AGAINST) == wanted
    assert {"naive GSPO", "naive GRPO"} <= ALL.keys()
