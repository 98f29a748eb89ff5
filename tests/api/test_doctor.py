"""`gspo doctor` passes here, detects seeded faults, and works if packages or devices are absent or broken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gspo_kernels.backends import dispatch
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends.self_check import samples, verdict
from gspo_kernels.backends.torch import policy_forward
from gspo_kernels.tools.cli import app
from gspo_kernels.tools.doctor import diagnosis, packages
from gspo_kernels.tools.doctor.checks import CPU, DTYPES, check

GSPO = "from gspo_kernels.tools.entry_point import main; main()"
# Kernels are interpreted in this process, so the doctor checks the Triton backend on the CPU, too.


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def run_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out = run("--json", *arguments)
    return code, json.loads(out)


def run_process(**environment: str) -> tuple[int, dict[str, Any]]:
    """Run the doctor in a process that does not interpret kernels by default."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", GSPO, "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env={**inherited, **environment})
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the interpreted kernels, which are slow, in tests that do not concern them."""
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: "the Triton kernels only compile")


# -- without faults


@pytest.mark.slow
def test_all_checks_pass_and_the_json_reports_it() -> None:
    code, report = run_process(TRITON_INTERPRET="1")
    assert code == 0 and report["ok"] is True
    assert report["verdict"] == f"Good: all {len(report['checks'])} checks agree with float64."
    assert report["versions"]["torch"] == torch.__version__ and report["devices"][0]["auto"] == "torch"
    places = {(c["device"], c["backend"], c["dtype"]) for c in report["checks"]}
    assert places >= {("cpu", backend, dtype) for backend in ("torch", "triton") for dtype in DTYPES}
    for result in report["checks"]:
        assert result["verdict"] == "ok" and result["wrong_decisions"] == 0 and result["message"] == ""
        assert set(result["ratios"]) == {"log_probs", "loss", "d_hidden", "d_weight"}
        assert 0 < max(result["ratios"].values()) <= 1


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139.8 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda _: None)
    device = diagnosis.describe(torch.device("cuda", 0))
    assert device.name == "cuda:0" and device.description == "NVIDIA H200, compute capability 9.0, 140 GiB"
    why = "the Triton kernels run here, self-check in bfloat16 not run"
    assert (device.block_shapes, device.auto, device.why) == ("sm_90", "triton", why)
    monkeypatch.setattr(verdict, "state", lambda *_: "failed: forward_tile: error 1, allowed 0.1")
    device = diagnosis.describe(torch.device("cuda", 0))
    assert device.auto == "torch" and device.why.endswith("failed: forward_tile: error 1, allowed 0.1")


PINS = {package.name: package.tested for package in packages.packages()}


def install(versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that these versions are installed (None: not installed), and the tested version of other packages."""

    def version(name: str) -> str:
        installed = (PINS | versions)[name]
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(packages, "version", version)


VERSIONS: list[tuple[dict[str, str | None], str]] = [  # installed, expected verdict
    ({"peft": None, "torch": f"{PINS['torch']}+cpu"}, "all installed packages are the tested versions"),
    ({"torch": "9.0", "triton": "3.6.0"}, "supported, but not tested: torch 9.0, triton 3.6.0"),
    ({"torch": "9.0.dev1+cpu"}, "supported, but not tested: torch 9.0.dev1+cpu"),
    (
        {"trl": "1.99.0", "torch": "2.9.0+cu128", "peft": "main", "triton": "9.1"},
        f"torch 2.9.0+cu128 is too old: >=2.11 is required, run pip install torch=={PINS['torch']}; "
        f"trl 1.99.0 is too new: >=1.15,<1.17 is required, run pip install trl=={PINS['trl']}; "
        f"peft main is no version number: >=0.17 is required, run pip install peft=={PINS['peft']}; "
        "supported, but not tested: triton 9.1",
    ),
]


@pytest.mark.parametrize(("installed", "expected"), VERSIONS)
def test_the_verdict_on_versions(
    installed: dict[str, str | None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(installed, monkeypatch)
    assert diagnosis.Diagnosis({}, [], [], [], packages.packages()).versions_verdict == f"Versions: {expected}."


def test_without_metadata_versions_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "requires", requires)
    verdict_on_versions = diagnosis.Diagnosis({}, [], [], [], packages.packages()).versions_verdict
    assert verdict_on_versions.startswith("Versions: not compared, because gspo-kernels is not installed")


# -- wrong results


def wrong_forward(change: Any) -> Any:
    forward = torch_backend.forward_and_cache

    def forward_and_cache(*arguments: Any) -> Any:
        (head, *_), (result, cached) = arguments, forward(*arguments)
        return result._replace(log_probs=torch.where(head.mask, change(result.log_probs), 0)), cached

    return forward_and_cache


def wrong_backward(change: Any) -> Any:
    backward = torch_backend.head_backward
    return lambda *arguments: tuple(None if g is None else change(g) for g in backward(*arguments))


def wrong_loss(*arguments: Any) -> Any:
    result = policy_forward(*arguments)
    return result._replace(loss=result.loss + 0.01)


FAULTS: dict[str, tuple[str, Any, str, set[str]]] = {  # function, its replacement, wrong output, dtypes that detect it
    "gradients 0.1 % too large": ("head_backward", wrong_backward(lambda g: g * 1.001), "d_weight", {"float32"}),
    "log-probs off by 1e-4": ("forward_and_cache", wrong_forward(lambda lp: lp + 1e-4), "log_probs", set(DTYPES)),
    "hidden states' gradients 10 % too large": (
        "head_backward",
        wrong_backward(lambda g: g if g.shape[0] == samples.VOCAB else g * 1.1),
        "d_hidden",
        set(DTYPES),
    ),
    "loss off by 0.01": ("policy_forward", wrong_loss, "loss", set(DTYPES)),
}


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_backend_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, broken, shown, dtypes = FAULTS[name]
    monkeypatch.setattr(torch_backend, function, broken)
    code, report = run_json()
    assert code == 1 and report["ok"] is False
    of_torch = {c["dtype"]: c for c in report["checks"] if c["backend"] == "torch" and c["device"] == "cpu"}
    assert {dtype for dtype, c in of_torch.items() if c["verdict"] == "wrong"} == dtypes
    for dtype in dtypes:
        assert of_torch[dtype]["ratios"][shown] > 1
        assert f"torch on cpu in {dtype} is wrong" in report["verdict"]


def test_a_wrong_clip_decision_is_wrong_at_any_size_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    barely_clipped = wrong_backward(lambda g: torch.where(g == 0, 1e-30, g))
    monkeypatch.setattr(torch_backend, "head_backward", barely_clipped)
    result = check(CPU, "torch", "float32")
    assert result.verdict == "wrong" and result.wrong_decisions == 3
    assert result.ratios is not None and all(x is not None and x <= 1 for x in result.ratios.values())


@pytest.mark.usefixtures("torch_alone")
def test_non_finite_gradients_are_wrong_and_the_json_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = wrong_backward(lambda g: g * math.nan if g.shape[0] == samples.VOCAB else g)
    monkeypatch.setattr(torch_backend, "head_backward", broken)
    code, report = run_json()
    assert code == 1
    of_torch = next(c for c in report["checks"] if c["backend"] == "torch")
    assert of_torch["verdict"] == "wrong" and of_torch["wrong_decisions"] == 0
    assert of_torch["ratios"]["d_weight"] is None and of_torch["ratios"]["d_hidden"] <= 1
    assert of_torch["message"] == "not finite: d_weight"


# -- absent or broken packages and devices


def raises(error: Exception) -> Any:
    def fn() -> None:
        raise error

    return fn


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(
    ("is_available", "init", "remark"),
    [
        (raises(OSError("libcuda.so is truncated")), None, "finds no device: OSError: libcuda.so is truncated"),
        (lambda: False, raises(RuntimeError("Found no NVIDIA driver")), "RuntimeError: Found no NVIDIA driver"),
        (lambda: False, lambda: None, "torch is built for CUDA and finds no device"),
    ],
)
def test_a_broken_cuda_is_a_remark(is_available: Any, init: Any, remark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("GSPO_WORKSPACE_MIB", "512")
    monkeypatch.setenv("PYTORCH_X", "1")
    monkeypatch.setenv("PATH_TO_A_SECRET", "secret")
    code, report = run_json()
    assert all(x in report["remarks"][-1] for x in ("GSPO_WORKSPACE_MIB=512", "PYTORCH_X=1"))
    assert "secret" not in str(report)
    assert code == 0 and [d["name"] for d in report["devices"]] == ["cpu"]
    assert any(x.endswith(remark) for x in report["remarks"])
    assert {c["device"] for c in report["checks"]} == {"cpu"}


@pytest.mark.usefixtures("torch_alone")
def test_a_device_that_cannot_be_read_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_accelerators", lambda: ([torch.device("cuda", 7)], []))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: 1 / 0)
    code, report = run_json()
    assert code == 1
    assert all(x in report["verdict"] for x in ("backend='auto' fails on cuda:7", "torch on cuda:7 in float32 crashes"))
    assert report["devices"][1]["why"] == "ZeroDivisionError: division by zero"
    assert {c["device"]: c["verdict"] for c in report["checks"]} == {"cpu": "ok", "cuda:7": "crashed"}
    text = CliRunner().invoke(app, ["doctor"]).output
    messages = [c["message"] for c in report["checks"] if c["message"]]
    assert messages and all(" ".join(x.split()) in " ".join(text.split()) for x in [*messages, *report["remarks"]])
