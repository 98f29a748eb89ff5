"""Is this installation right? What is installed, what runs where, and the fused loss against the oracle on all of it.

Whatever is absent or broken is said, and the rest is still looked at. Triton decides at its import whether kernels are
interpreted, so a process that compiles has them checked on the CPU by a child, `python -m gspo_kernels.tools.doctor`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import dispatch as backends
from ..fused_loss import gspo_fused_loss
from ..objective import Objective
from ..reference import gspo_reference_loss, token_log_probs
from ..validation import Call

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The batch: packed sequences, where each one's log-ratio lies (the window is -3e-4 to 4e-4) and its advantage. The
# second and the third are clipped, the fifth has nothing to learn from, the fourth and the sixth lie outside the window
# on the side that is not clipped.
LENGTHS = (24, 18, 31, 13, 22, 25, 17)
LOG_RATIOS = (1e-4, -6e-4, 8e-4, -6e-4, 0.0, 8e-4, -1e-4)
ADVANTAGES = (1.2, -0.8, 0.7, 0.9, 0.0, -1.1, 0.6)
HIDDEN, VOCAB = 72, 601  # no multiples of a tile, and more than two tiles of the vocabulary

LOSS_PER_ADVANTAGE = 1e-6  # terms of both signs nearly cancel: a loss is right on the scale of the advantages


@dataclass(frozen=True)
class Device:
    name: str  # "cpu", "cuda:0"
    description: str
    block_shapes: str | None  # its row in the table of the Triton kernels
    auto: str | None  # what backend="auto" takes, None if it raises
    why: str


@dataclass(frozen=True)
class Check:
    """Forward and backward of the fused loss by one backend, on one device, of inputs of one dtype."""

    device: str
    backend: str
    dtype: str
    verdict: str  # "ok", "wrong" or "crashed"
    error_ratio: float | None = None  # the largest of `ratios`, at most 1 where all is right
    ratios: dict[str, float | None] | None = None  # by output, None for one that is not finite
    wrong_decisions: int | None = None  # sequences clipped that float64 does not clip, or the other way round
    message: str = ""

    @property
    def place(self) -> str:
        return f"{self.backend} on {self.device} in {self.dtype}"


@dataclass(frozen=True)
class Diagnosis:
    versions: dict[str, str | None]
    devices: list[Device]
    checks: list[Check]
    remarks: list[str]  # what is absent or odd, which by itself is no fault

    @property
    def faults(self) -> list[str]:
        broken = [f"backend='auto' fails on {device.name}" for device in self.devices if device.auto is None]
        verb = {"wrong": "is wrong", "crashed": "crashes"}
        return broken + [f"{check.place} {verb[check.verdict]}" for check in self.checks if check.verdict != "ok"]

    @property
    def verdict(self) -> str:
        if self.faults:
            return f"Do not train with this: {'; '.join(self.faults)}."
        return f"Good: all {len(self.checks)} checks agree with float64."


def diagnose(interpret: bool = False, progress: Callable[[str], object] = lambda _: None) -> Diagnosis:
    """Look at everything. `interpret`: at the Triton kernels on the CPU too. `progress` hears what is under way."""
    triton, remarks = _triton()
    accelerators, absent = _accelerators()
    devices, checks = [], []
    for device in (CPU, *accelerators):
        devices.append(describe(device))
        with_triton = _obstacle(device) is None
        for backend in ("torch", "triton") if with_triton else ("torch",):
            for dtype in DTYPES:
                progress(f"{backend} on {device} in {dtype}")
                checks.append(check(device, backend, dtype))
        if interpret and device == CPU and not with_triton:
            progress("triton on cpu, interpreted")
            checks += _interpreted_checks()
    return Diagnosis(_versions(triton), devices, checks, remarks + absent)


# What there is


def _said(error: Exception) -> str:
    """An exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 400 else text[:400] + ' ...'}"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _versions(triton: str | None) -> dict[str, str | None]:
    versions = {"gspo-kernels": _installed("gspo-kernels"), "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "triton": triton}
    return versions | {name: _installed(name) for name in ("transformers", "trl", "verl", "liger-kernel")}


def _triton() -> tuple[str | None, list[str]]:
    """Triton's version, and remarks. A broken Triton may raise anything."""
    try:
        import triton
        from triton import knobs
    except Exception as error:
        return _installed("triton"), [f"Triton cannot be imported: {_said(error)}"]
    interpreted = "TRITON_INTERPRET is set: Triton kernels are interpreted, on every device"
    return triton.__version__, [interpreted] if knobs.runtime.interpret else []


def _accelerators() -> tuple[list[torch.device], list[str]]:
    """CUDA and ROCm devices, and remarks if there are none. A broken driver may raise anything."""
    built = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else None
    if built is None:
        return [], ["torch is built for CPUs only"]
    try:
        if torch.cuda.is_available():
            return [torch.device("cuda", i) for i in range(torch.cuda.device_count())], []
        torch.cuda.init()  # raises the reason
    except Exception as error:
        return [], [f"torch is built for {built} and finds no device: {_said(error)}"]
    return [], [f"torch is built for {built} and finds no device"]


def _obstacle(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run there, None if they can."""
    try:
        return backends.triton_obstacle(device)
    except Exception as error:
        return _said(error)


def describe(device: torch.device) -> Device:
    description, block_shapes = f"{platform.machine()}, {torch.get_num_threads()} threads", None
    obstacle = _obstacle(device)
    try:
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            kind = found.gcnArchName if torch.version.hip else f"compute capability {found.major}.{found.minor}"
            description = f"{found.name}, {kind}, {found.total_memory / 2**30:.0f} GiB"
            if obstacle is None:
                from ..backends.triton.tuning import architecture

                block_shapes = architecture(device)
        auto = backends.pick_backend(Call("gspo doctor"), "auto", device)
    except Exception as error:
        return Device(str(device), description, block_shapes, None, _said(error))
    why = obstacle or "the Triton kernels run here"
    if obstacle is None and auto == "torch":
        why = "Triton kernels are only interpreted here, which is slow and for tests"
    return Device(str(device), description, block_shapes, auto, why)


# Whether it is right


class Batch(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target_ids: Tensor
    advantages: Tensor
    old_log_probs: Tensor
    cu_seqlens: Tensor

    def in_dtype(self, dtype: torch.dtype) -> Batch:
        return Batch(*(x.to(dtype) if x.is_floating_point() else x for x in self))


class Outputs(NamedTuple):
    """What is compared. Log-probs and loss are fp32 whatever the inputs are."""

    log_probs: Tensor
    loss: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def make_batch(dtype: torch.dtype) -> Batch:
    """Always the same. Every log-ratio lies clear of the clip bounds, so that each decision has one right answer."""
    rng, n = torch.Generator().manual_seed(0), sum(LENGTHS)
    hidden = torch.randn(n, HIDDEN, generator=rng).to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=rng) * 3 / HIDDEN**0.5).to(dtype)
    target_ids = torch.randint(0, VOCAB, (n,), generator=rng)
    log_probs, _ = token_log_probs(hidden.double(), weight.double(), target_ids)
    target_ids[10::17] = -100  # tokens that do not count
    noise = 0.02 * torch.randn(n, generator=rng, dtype=torch.float64)
    differences = [  # of new and old log-probs: their mean over the tokens that count is the log-ratio
        part - part[ids != -100].mean() + log_ratio
        for part, ids, log_ratio in zip(noise.split(LENGTHS), target_ids.split(LENGTHS), LOG_RATIOS, strict=True)
    ]
    old_log_probs = (log_probs - torch.cat(differences)).float()
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    return Batch(hidden, weight, target_ids, torch.tensor(ADVANTAGES), old_log_probs, cu_seqlens)


def outputs(loss: Callable[..., Any], batch: Batch, **options: Any) -> Outputs:
    """Forward and backward, brought to the CPU."""
    hidden, weight = batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_()
    out = loss(
        hidden, weight, batch.target_ids, batch.advantages, cu_seqlens=batch.cu_seqlens,
        old_log_probs=batch.old_log_probs, objective=Objective(), **options,
    )  # fmt: skip
    gradients = torch.autograd.grad(out.loss, (hidden, weight))
    return Outputs(*(x.detach().cpu() for x in (out.log_probs, out.loss, *gradients)))


def decisions(d_hidden: Tensor) -> Tensor:
    """Which sequences have a gradient: of a clipped one it is exactly zero."""
    return torch.stack([part.any() for part in d_hidden.split(LENGTHS)])


def error_ratio(ours: Tensor, same_dtype: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """The law of the tests (tests/tolerance.py): our largest error over 2 (r + eps max|truth|), r being PyTorch's."""
    r = (same_dtype.double() - truth).abs().max()
    return ((ours.double() - truth).abs().max() / (2 * (r + torch.finfo(dtype).eps * truth.abs().max()))).item()


def loss_error_ratio(ours: Tensor, truth: Tensor, advantages: Tensor) -> float:
    """The law of the tests for a loss."""
    allowed = LOSS_PER_ADVANTAGE * torch.maximum(advantages.double().abs().mean(), truth.abs())
    return ((ours.double() - truth).abs() / allowed).item()


def check(device: torch.device, backend: str, dtype: str) -> Check:
    """Compare with the oracle in float64 on the CPU, given the same inputs.

    PyTorch's own error is that of the oracle in fp32, its gradients then rounded to the dtype of the inputs. In half
    precision throughout the oracle takes wrong clip decisions, and its error would excuse any gradient.
    """
    try:
        batch = make_batch(DTYPES[dtype])
        ours = outputs(gspo_fused_loss, Batch(*(x.to(device) for x in batch)), backend=backend)
        truth, plain = (outputs(gspo_reference_loss, batch.in_dtype(d)) for d in (torch.float64, torch.float32))
        ratios = {"log_probs": error_ratio(ours.log_probs, plain.log_probs, truth.log_probs, torch.float32)}
        ratios["loss"] = loss_error_ratio(ours.loss, truth.loss, batch.advantages)
        for name in ("d_hidden", "d_weight"):
            mine, rounded = getattr(ours, name), getattr(plain, name).to(DTYPES[dtype])
            ratios[name] = error_ratio(mine, rounded, getattr(truth, name), DTYPES[dtype])
        wrong = int((decisions(ours.d_hidden) != decisions(truth.d_hidden)).sum())
    except Exception as error:
        return Check(str(device), backend, dtype, "crashed", message=_said(error))
    infinite = [name for name, x in ratios.items() if not math.isfinite(x)]
    verdict = "wrong" if wrong or infinite or max(ratios.values()) > 1 else "ok"
    found = {name: None if name in infinite else x for name, x in ratios.items()}
    worst = None if infinite else max(ratios.values())
    message = f"not finite: {', '.join(infinite)}" if infinite else ""
    return Check(str(device), backend, dtype, verdict, worst, found, wrong, message)


def _interpreted_checks() -> list[Check]:
    # The interpreter multiplies by NumPy; OpenBLAS's products for AVX2 round a row by its place, which no GPU does.
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Sandybridge", "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-m", __name__], env=environment, capture_output=True, text=True)
    try:
        return [Check(**found) for found in json.loads(run.stdout.strip().rpartition("\n")[2])]
    except ValueError:
        said = run.stderr.strip().splitlines() or ["it says nothing"]
        message = f"exit status {run.returncode}: {said[-1]}"
        return [Check("cpu", "triton", dtype, "crashed", message=message) for dtype in DTYPES]


if __name__ == "__main__":
    print(json.dumps([asdict(check(CPU, "triton", dtype)) for dtype in DTYPES]))
