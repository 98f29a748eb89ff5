"""The check of the Triton kernels that `backend="auto"` makes: it detects wrong kernels, and runs once per machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from faults import FAULTS
from faults.run import is_killed
from helpers.counters import LiveBytes
from helpers.device import DEVICE
from torch._subclasses import FakeTensorMode

from gspo_kernels import linear_log_probs, policy_loss, validation
from gspo_kernels.backends import dispatch
from gspo_kernels.backends.self_check import kernel_check, verdict
from gspo_kernels.backends.triton import logit_tile, sequence, tuning
from gspo_kernels.inputs import head as inputs_of_head
from gspo_kernels.validation import TensorChecks, dtype_name

policy_module = importlib.import_module("gspo_kernels.policy")
GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
WRONG = "gradient_tile: d_weight [1301, 128] in bfloat16: error 2.00e-01, allowed 1.00e-02"
CALL = TensorChecks("test")


# -- the check of the kernels


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_name)
def test_correct_kernels_pass(dtype: torch.dtype) -> None:
    assert kernel_check.run_check(DEVICE, dtype, "head") is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_correct_kernels_of_the_loss_pass(dtype: torch.dtype) -> None:
    assert kernel_check.run_check(DEVICE, dtype, "loss") is None


# Seeded faults of tests/faults, and the kernel that the check must name.
DETECTED = {
    "last ragged tile dropped": "forward_tile",
    "mass not rescaled to the new maximum": "reduce_rows",
    "log-ratios summed in fp32": "sequence_loss",
    "chunks overwrite each other": "gradient_tile",
    "sums of earlier parts overwritten": "hidden_product",
    "rows beyond the last in a cell not zero": "weight_product",
    "only the last pairs of a group are summed": "sum_pairs",
    "the low parts of a split head are 0": "forward_tile",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", DETECTED)
def test_a_seeded_fault_is_detected_and_the_kernel_is_named(fault: str, tmp_path: Path) -> None:
    assert is_killed((*FAULTS[fault][:2], "self_check::test_correct_kernels_pass[float32]"), tmp_path)
    (names,) = set(re.findall(r"AssertionError: assert '([\w, ]+): ", (tmp_path / "log").read_text()))
    assert DETECTED[fault] in names.split(", ")


def test_a_kernel_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        __name__ = "finish"

        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("out of resource:\nshared memory")

    monkeypatch.setattr(sequence, "finish", Broken())
    failure = kernel_check.run_check(torch.device("cpu"), BF16, "head")
    assert failure == "finish: RuntimeError: out of resource: shared memory"


@pytest.mark.parametrize("error", [2.0, math.nan, math.inf])
def test_an_error_above_the_limit_or_nan_is_wrong(error: float) -> None:
    kernel_check._limit("x", BF16, 1.0, 1.0)
    with pytest.raises(kernel_check.WrongResult, match=r"x in bfloat16: error .*, allowed 1\.00e\+00"):
        kernel_check._limit("x", BF16, error, 1.0)


def test_the_check_neither_sees_nor_changes_the_state_of_its_caller() -> None:
    random_state = torch.get_rng_state()
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        LiveBytes() as live,
    ):
        assert kernel_check.run_check(torch.device("cpu"), torch.float32, "loss") is None
        assert live.peak == 0  # the mode saw no operation
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.empty(1).device.type == "meta"
    results = torch.vmap(lambda x: x + (kernel_check.run_check(torch.device("cpu"), torch.float32, "loss") is None))
    assert results(torch.zeros(2)).tolist() == [1, 1]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_host_may_wait_during_the_check_whatever_the_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with pytest.raises(KeyError), kernel_check._on(GPU):
        assert modes == ["default"]
        raise KeyError
    assert modes == ["default", 2]


# -- when it runs


class Machine:
    """A fake machine with a GPU. Its self-check returns `failure`, and `checks` counts how often it ran."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failure: str | None = None
        self.checks, self.captures, self.folder = 0, False, folder
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(validation, "_warned", set())
        monkeypatch.setattr(kernel_check, "run_check", self._run)
        monkeypatch.setattr(dispatch, "triton_obstacle", lambda _: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captures)
        self._monkeypatch = monkeypatch
        self.new_process()

    def new_process(self) -> None:
        self._monkeypatch.setattr(verdict, "_results", {})

    def _run(self, *_: Any) -> str | None:
        self.checks += 1
        time.sleep(0.05)
        return self.failure

    def file(self) -> Path:
        """Return the only file of a check of the head."""
        files = (self.folder / "gspo_kernels").glob("*.json")
        (file,) = (x for x in files if json.loads(x.read_text())["facts"]["subject"] == "head")
        return file


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with tuning.assume("sm_90"):
        yield Machine(tmp_path, monkeypatch)


def pick(backend: str = "auto", dtype: torch.dtype | None = BF16, subject: str = "head") -> str:
    return dispatch.pick_backend(CALL, backend, GPU, dtype, subject)


def test_a_check_that_passed_is_remembered_on_disk(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [pick(), pick(), pick("triton")] == ["triton"] * 3
        machine.new_process()
        assert pick() == "triton"
    assert machine.checks == 1
    (line,) = caplog.messages
    assert "passed" in line and "head in bfloat16 on a GPU" in line and str(machine.file()) in line
    assert pick(dtype=torch.float32, subject="loss") == "triton" and machine.checks == 1, "part of the head's check"
    assert pick(dtype=torch.float32) == "triton" and machine.checks == 2
    assert verdict.state(GPU, BF16) == "passed" and verdict.state(GPU, torch.float16) == "not run"


def test_after_a_failed_check_auto_is_torch_and_triton_raises(machine: Machine) -> None:
    machine.failure = WRONG
    for _ in range(2):
        with pytest.warns(UserWarning) as caught:
            assert [pick(), pick()] == ["torch"] * 2
        (warning,) = caught
        assert WRONG in str(warning.message) and str(machine.file()) in str(warning.message)
        with pytest.raises(ValueError, match=r"test: backend must be 'torch' or 'auto' on cuda:0.*d_weight.*2\.00e-01"):
            pick("triton")
        machine.new_process()
        validation._warned.clear()
    assert machine.checks == 1
    assert verdict.state(GPU, BF16) == f"failed: {WRONG}"
    machine.failure = None
    machine.file().unlink()  # as the warning says
    machine.new_process()
    assert pick() == "triton" and machine.checks == 2


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "torch": (torch, "__version__", "9.0.0"),
    "triton": (triton, "__version__", "9.0.0"),
    "device": (torch.cuda, "get_device_name", lambda _: "another GPU"),
    "block shapes": (tuning, "_assumed", "sm_80"),
    "compiled, not interpreted": (logit_tile, "INTERPRETED", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_the_kernels_are_checked_again(
    change: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick()
    machine.new_process()
    monkeypatch.setattr(*CHANGES[change])
    pick()
    assert machine.checks == 2


def test_a_changed_kernel_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = verdict._facts(torch.device("cpu"), BF16, "head")
    copy = shutil.copytree(Path(verdict.__file__).parents[1], tmp_path / "backends")
    monkeypatch.setattr(verdict, "__file__", str(copy / "self_check" / "verdict.py"))
    hash_of_sources = verdict._hash_of_sources.__wrapped__
    assert f"interpreted {hash_of_sources()}" == facts["kernels"]
    source = copy / "triton" / "gradient_tile.py"
    source.write_text(source.read_text().replace("1.0", "2.0", 1))
    assert f"interpreted {hash_of_sources()}" != facts["kernels"]


@pytest.mark.parametrize("text", ["", '{"failure": nul', "[]", '{"failure": 0}'])
def test_a_damaged_file_is_replaced(text: str, machine: Machine) -> None:
    pick()
    machine.file().write_text(text)
    machine.new_process()
    assert pick() == "triton" and machine.checks == 2
    assert json.loads(machine.file().read_text())["failure"] is None


def test_without_a_cache_folder_each_process_checks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = machine.folder / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert [pick(), pick()] == ["triton"] * 2 and machine.checks == 1
    machine.new_process()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # must be ignored
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without a home directory
    assert [pick(), pick()] == ["triton"] * 2 and machine.checks == 2


def test_the_variable_switches_the_check_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.failure = WRONG
    monkeypatch.setenv("GSPO_SELF_CHECK", "0")
    assert pick() == pick("triton") == "triton" and machine.checks == 0
    assert verdict.state(GPU, BF16) == "off (GSPO_SELF_CHECK=0)"
    machine.new_process()
    monkeypatch.setenv("GSPO_SELF_CHECK", "no")
    with pytest.raises(ValueError, match="GSPO_SELF_CHECK must be 0 or 1, got 'no'"):
        pick()


def test_the_backend_variable_replaces_auto_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPO_BACKEND", "torch")
    assert pick() == "torch" and machine.checks == 0
    assert pick("triton") == "triton" and machine.checks == 1
    assert pick("triton", None) == "triton" and machine.checks == 1, "without a dtype, nothing is checked"
    monkeypatch.setenv("GSPO_BACKEND", "cuda")
    with pytest.raises(ValueError, match="GSPO_BACKEND must be one of auto, torch, triton, got 'cuda'"):
        pick()


def test_a_lack_of_memory_is_remembered_by_this_process_only(machine: Machine) -> None:
    machine.failure = "forward_tile: OutOfMemoryError: CUDA out of memory"
    with pytest.warns(UserWarning, match="out of memory"):
        assert pick() == "torch"
    machine.failure = None
    assert pick() == "torch" and machine.checks == 1
    machine.new_process()
    assert pick() == "triton" and machine.checks == 2


def compiled(backend: str) -> str:
    torch.compiler.reset()
    one = torch.ones(1)

    @torch.compile(backend="eager", fullgraph=True)
    def is_triton(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if pick(backend) == "triton" else x

    return "triton" if is_triton(one).item() == 2 else "torch"


def faked(backend: str) -> str:
    with FakeTensorMode():
        return pick(backend)


@pytest.mark.parametrize("where", ["captured", "compiled", "faked"])
def test_nothing_runs_during_capture_and_compilation(where: str, machine: Machine) -> None:
    functions: dict[str, Callable[[str], str]] = {"captured": pick, "compiled": compiled, "faked": faked}
    machine.captures, pick_there = where == "captured", functions[where]
    with pytest.warns(UserWarning, match="have not been checked in bfloat16") as caught:
        assert pick_there("auto") == pick_there("auto") == "torch"
    assert len(caught) == 1
    assert pick_there("triton") == "triton" and machine.checks == 0
    machine.captures = False
    assert pick() == "triton" and machine.checks == 1
    machine.captures = where == "captured"
    machine.new_process()  # the result on disk counts
    assert pick_there("auto") == "triton" and machine.checks == 1


def test_threads_run_one_check(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "result_file", lambda _: None)  # without a file lock
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: pick(), range(4))) == ["triton"] * 4
    assert machine.checks == 1


def test_the_kernels_are_checked_in_the_dtype_that_they_compute_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast changes the dtype of the head."""
    picks: list[Any] = []

    def record(call: TensorChecks, backend: str, device: torch.device, *subject: Any) -> str:
        picks.append(subject)
        return "torch"

    for module in (inputs_of_head, policy_module):
        monkeypatch.setattr(module, "pick_backend", record)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with torch.autocast("cpu", BF16):
        out = linear_log_probs(torch.ones(2, 3, 8), torch.ones(5, 8), ids)
    policy_loss(out.log_probs, torch.ones(2))
    assert picks == [(BF16,), (torch.float32, "loss")]
