"""The diagnosis of `gspo doctor`: what is installed, which backend runs on each device, and whether it is correct.

Anything missing or broken is reported, and the other checks (`checks.py`) still run.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from ...backends import dispatch
from ...backends.self_check import verdict
from ...validation import TensorChecks
from .checks import CPU, DTYPES, Check, check, one_line
from .packages import Package, packages


@dataclass(frozen=True)
class Device:
    """A device, and the backend that runs on it."""

    name: str  # "cpu", "cuda:0"
    description: str
    block_shapes: str | None  # the architecture whose block shapes the Triton kernels use on this device
    auto: str | None  # the backend that "auto" picks; None if "auto" raises an error
    why: str  # the reason for `auto`

    @property
    def text(self) -> str:
        """The description that is printed after the device's name."""
        shapes = f", block shapes of {self.block_shapes}" if self.block_shapes else ""
        return f"{self.description}{shapes}; backend='auto' takes {self.auto or 'nothing'}: {self.why}"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`."""

    versions: dict[str, str | None]
    devices: list[Device]
    checks: list[Check]
    remarks: list[str]  # what is missing or unusual but not a fault
    packages: list[Package]  # empty if they cannot be compared

    @property
    def faults(self) -> list[str]:
        """One line for each device on which backend="auto" fails, and for each check that is not "ok"."""
        broken = [f"backend='auto' fails on {device.name}" for device in self.devices if device.auto is None]
        verb = {"wrong": "is wrong", "crashed": "crashes"}
        return broken + [f"{c.place} {verb[c.verdict]}" for c in self.checks if c.verdict != "ok"]

    @property
    def verdict(self) -> str:
        """One line that lists the faults or says that all checks pass."""
        if self.faults:
            return f"Do not train with this: {'; '.join(self.faults)}."
        return f"Good: all {len(self.checks)} checks agree with float64."

    @property
    def versions_verdict(self) -> str:
        """One line that names packages outside of the supported versions, and packages in untested versions."""
        if not self.packages:
            return "Versions: not compared, because gspo-kernels is not installed with pip."
        parts = [
            f"{x.name} {x.installed} is {x.status}: {x.supported} is required, run pip install {x.name}=={x.tested}"
            for x in self.packages
            if x.status in ("too old", "too new", "no version number")
        ]
        if untested := [f"{x.name} {x.installed}" for x in self.packages if x.status in ("newer", "older")]:
            parts.append(f"supported, but not tested: {', '.join(untested)}")
        return f"Versions: {'; '.join(parts) or 'all installed packages are the tested versions'}."


def diagnose(progress: Callable[[str], object] = lambda _: None) -> Diagnosis:
    """Check every device with every backend that runs on it. `progress` gets a line of text before each check."""
    triton, remarks = _triton()
    accelerators, absent = _accelerators()
    devices, checks = [], []
    for device in (CPU, *accelerators):
        for backend in ("torch", "triton") if _obstacle(device) is None else ("torch",):
            for dtype in DTYPES:
                progress(f"{backend} on {device} in {dtype}")
                checks.append(check(device, backend, dtype))
        devices.append(describe(device))  # after the checks, because the first one ran the self-check
    settings = [f"{x}={os.environ[x]}" for x in sorted(os.environ) if x.startswith(("GSPO_", "PYTORCH_"))]
    remarks += [*absent, *([f"Environment: {' '.join(settings)}"] if settings else [])]
    return Diagnosis(_versions(triton), devices, checks, remarks, packages())


def _installed(name: str) -> str | None:
    """Version of a package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions(triton: str | None) -> dict[str, str | None]:
    """Collect versions of what runs here; None if not installed. `packages` lists the other packages."""
    versions = {"gspo-kernels": _installed("gspo-kernels"), "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "triton": triton}
    return versions


def _triton() -> tuple[str | None, list[str]]:
    """Triton's version, and remarks. Catches all exceptions, because a broken Triton may raise any."""
    try:
        import triton
        from triton import knobs
    except Exception as error:
        return _installed("triton"), [f"Triton cannot be imported: {one_line(error)}"]
    interpreted = "TRITON_INTERPRET is set: Triton kernels are interpreted, on every device"
    return triton.__version__, [interpreted] if knobs.runtime.interpret else []


def _accelerators() -> tuple[list[torch.device], list[str]]:
    """List the CUDA or ROCm devices. If there are no devices, also return remarks that say why.

    Catches all exceptions, because a broken driver may raise any.
    """
    built = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else None
    if built is None:
        return [], ["torch is built for CPUs only"]
    try:
        if torch.cuda.is_available():
            return [torch.device("cuda", i) for i in range(torch.cuda.device_count())], []
        torch.cuda.init()  # raises an error that names the reason
    except Exception as error:
        return [], [f"torch is built for {built} and finds no device: {one_line(error)}"]
    return [], [f"torch is built for {built} and finds no device"]


def _obstacle(device: torch.device) -> str | None:
    """The reason why the Triton kernels cannot run on a device, or None if they can."""
    try:
        return dispatch.triton_obstacle(device)
    except Exception as error:
        return one_line(error)


def describe(device: torch.device) -> Device:
    """Describe a device and the backend that "auto" picks there. If "auto" raises, `Device.auto` is None."""
    description = f"{platform.machine()}, {torch.get_num_threads()} threads"
    block_shapes = None
    obstacle = _obstacle(device)
    try:
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            kind = gpu.gcnArchName if torch.version.hip else f"compute capability {gpu.major}.{gpu.minor}"
            description = f"{gpu.name}, {kind}, {gpu.total_memory / 2**30:.0f} GiB"
            if obstacle is None:
                from ...backends.triton.tuning import architecture

                block_shapes = architecture(device)
        auto = dispatch.pick_backend(TensorChecks("gspo doctor"), "auto", device)
    except Exception as error:
        return Device(str(device), description, block_shapes, None, one_line(error))
    why = obstacle or "the Triton kernels run here"
    if auto == "triton":
        checked = verdict.state(device, torch.bfloat16)
        auto = "torch" if checked.startswith("failed") else auto
        why += f", self-check in bfloat16 {checked}"
    elif obstacle is None:
        why = "Triton kernels are only interpreted here, which is slow and meant for tests"
    return Device(str(device), description, block_shapes, auto, why)
