"""What a call costs the host, where arithmetic is nothing; and what an import costs.

    python -m gspo_kernels.benchmarks overhead           every candidate in 5 processes, 10 imports (7 minutes)
    python -m gspo_kernels.benchmarks overhead --tiny    a trial, seconds

Every turn is a new process. Nothing waits for a GPU but what the calls themselves do. A candidate whose gradients are
wrong is not timed: the suite fails. Forward and backward, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, ops, policy_loss
from gspo_kernels import fused_loss as fused
from gspo_kernels.backends import dispatch

from .. import measure, peers
from ..measure import Record

SEQUENCES, LENGTH, WIDTH, VOCAB = 2, 8, 16, 64
GSPO = Objective()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Gradients = tuple[Tensor, ...]


class Batch(NamedTuple):
    """Hidden states, head and log-probs ask for gradients; no sequence is clipped, so all of them get some."""

    hidden: Tensor  # [S, L, H]
    weight: Tensor  # [V, H]
    log_probs: Tensor  # [S, L]
    old: Tensor
    target_ids: Tensor
    mask: Tensor
    advantages: Tensor  # [S]
    cu_seqlens: Tensor


@cache
def batch() -> Batch:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=rng), torch.randn(VOCAB, WIDTH, generator=rng) / 4
    target_ids = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=rng)
    log_probs = plain_log_probs(hidden, weight, target_ids)
    old = log_probs + 1e-4
    mask, cu_seqlens = torch.ones_like(target_ids, dtype=torch.bool), LENGTH * torch.arange(SEQUENCES + 1)
    tensors = Batch(hidden, weight, log_probs, old, target_ids, mask, torch.tensor([1.0, -0.5]), cu_seqlens)
    tensors = Batch(*(x.to(DEVICE) for x in tensors))
    for x in tensors[:3]:
        x.requires_grad_()
    return tensors


def plain_log_probs(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    return F.linear(hidden, weight).log_softmax(-1).gather(-1, target_ids[..., None])[..., 0]


def plain_loss(b: Batch, log_probs: Tensor) -> Tensor:
    """GSPO's, as a loop in plain PyTorch has it."""
    length = b.mask.sum(1)
    ratio = (torch.where(b.mask, log_probs - b.old, 0).sum(1) / length).exp()
    clip = ratio.clamp(1 - GSPO.clip_low, 1 + GSPO.clip_high)
    return torch.maximum(-ratio * b.advantages, -clip * b.advantages).mean()


def ours(b: Batch, packed: bool = False, **options: Any) -> Tensor:
    if packed:
        return gspo_fused_loss(
            b.hidden.flatten(0, 1), b.weight, b.target_ids.flatten(), b.advantages, mask=b.mask.flatten(),
            cu_seqlens=b.cu_seqlens, old_log_probs=b.old.flatten(), **options,
        ).loss  # fmt: skip  # lines by subject
    return gspo_fused_loss(
        b.hidden, b.weight, b.target_ids, b.advantages, mask=b.mask, old_log_probs=b.old, **options
    ).loss


def trl_log_probs(b: Batch) -> Tensor:
    """Log-probs alone."""
    flat = peers.trl_log_probs(b.hidden.flatten(0, 1), b.weight, b.target_ids.flatten(), None)
    return flat.view(b.mask.shape)


def liger_loss(b: Batch) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        epsilon_low=GSPO.clip_low,
        epsilon_high=GSPO.clip_high,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )
    return loss(b.hidden, b.weight, b.target_ids, b.mask, b.advantages, old_per_token_logps=b.old)[0]


PLAIN = "plain PyTorch"
# What is computed, by whom; the first of each is what the others are compared with.
CANDIDATES: dict[str, dict[str, Callable[[Batch], Tensor]]] = {
    "hidden states to loss": {
        PLAIN: lambda b: plain_loss(b, plain_log_probs(b.hidden, b.weight, b.target_ids)),
        "ours": ours,
        "ours, packed": partial(ours, packed=True),
        "ours, entropy": partial(ours, entropy=True),
        "ours, budget 1e-3": partial(ours, gradient_budget=1e-3),
        "ours, its two seams": lambda b: (
            policy_loss(
                linear_log_probs(b.hidden, b.weight, b.target_ids, mask=b.mask).log_probs,
                b.advantages,
                mask=b.mask,
                old_log_probs=b.old,
            ).loss
        ),
        "TRL's log-probs, plain loss": lambda b: plain_loss(b, trl_log_probs(b)),
        "Liger, uncompiled": liger_loss,
    },
    "hidden states to log-probs": {
        PLAIN: lambda b: plain_log_probs(b.hidden, b.weight, b.target_ids).sum(),
        "ours": lambda b: linear_log_probs(b.hidden, b.weight, b.target_ids, mask=b.mask).log_probs.sum(),
        "TRL": lambda b: trl_log_probs(b).sum(),
    },
    "log-probs to loss": {
        PLAIN: lambda b: plain_loss(b, b.log_probs),
        "ours": lambda b: policy_loss(b.log_probs, b.advantages, mask=b.mask, old_log_probs=b.old).loss,
    },
}
# The packages of the peers, by the start of a candidate's name.
PEERS = {"TRL": "trl", "Liger": "liger-kernel"}


def installed(candidate: str) -> bool:
    return all(measure.version(package) for peer, package in PEERS.items() if candidate.startswith(peer))


def gradients(what: str, candidate: str) -> Gradients:
    """A forward and a backward."""
    b = batch()
    inputs = (b.log_probs,) if what.startswith("log-probs") else (b.hidden, b.weight)
    return torch.autograd.grad(CANDIDATES[what][candidate](b), inputs)


def call_times(what: str, candidate: str, seconds: float) -> list[float]:
    """Seconds of each call, for as long as `seconds` and at least five; as long a warm-up before.

    Raises:
        RuntimeError: the candidate's gradients are wrong.
    """
    for gradient, expected in zip(gradients(what, candidate), gradients(what, PLAIN), strict=True):
        if not (gradient - expected).norm() <= 1e-4 * expected.norm():
            raise RuntimeError(f"{what}, {candidate}: wrong gradients")
    times: list[float] = []
    for _ in ("warm-up", "measured"):
        times.clear()
        end = time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < end:
            start = time.perf_counter()
            gradients(what, candidate)
            times.append(time.perf_counter() - start)
    return times


def turn_times(seconds: float) -> list[tuple[str, str, list[float]]]:
    """The times of every installed candidate. For a process of its own: see `measure.fresh`."""
    torch.set_num_threads(1)
    pairs = [(what, name) for what, names in CANDIDATES.items() for name in names if installed(name)]
    return [(what, name, call_times(what, name, seconds)) for what, name in pairs]


def calls(turns: int, seconds: float) -> tuple[list[Record], list[str]]:
    """Times of every candidate, and the names of those whose package is not installed."""
    times: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for turn in range(turns):
        print(f"host time per call, turn {turn + 1} of {turns}", flush=True)
        for what, name, seconds_of_calls in measure.fresh("suites.overhead", "turn_times", seconds=seconds):
            times[what, name].append(seconds_of_calls)
    records = []
    for (what, name), by_turn in times.items():
        medians, plain = ([statistics.median(x) for x in times[what, n]] for n in (name, PLAIN))
        ratio = measure.spread([a / b for a, b in zip(medians, plain, strict=True)])
        ratios = {"ratio": ratio["seconds"], "ratio p20": ratio["p20"], "ratio p80": ratio["p80"]}
        pooled = measure.spread([x for turn in by_turn for x in turn])
        records.append({"what": what, "candidate": name, **pooled, **ratios})
    return records, [f"{what}: {n}" for what, names in CANDIDATES.items() for n in names if (what, n) not in times]


def parts(repeats: int) -> Record:
    """Where the host's time goes in a call of ours and its backward, by clocks around the functions inside."""
    print("where the time of a call goes", flush=True)
    spent: dict[str, float] = defaultdict(float)
    kernels = dispatch.implementation("triton" if DEVICE.type == "cuda" else "torch")

    def clocked(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            out = function(*args, **options)
            spent[part] += time.perf_counter() - start
            return out

        return run

    places = {
        "checks and layout": [(fused, "head_rows"), (fused, "policy_rows")],
        "operator": [(ops, "fused_loss")],
        "backend, forward": [(kernels, "forward_with_shares"), (kernels, "policy_forward")],
        "backend, backward": [(kernels, "head_backward")],
        "outputs and metrics": [(fused, "loss_output"), (fused, "work_metrics")],
    }
    times: dict[str, list[float]] = defaultdict(list)
    b = batch()
    with ExitStack() as stack:
        for part, functions in places.items():
            for module, name in functions:
                stack.enter_context(patch.object(module, name, clocked(part, getattr(module, name))))
        forward = clocked("forward", ours)
        backward = clocked("backward", torch.autograd.grad)
        for turn in range(repeats + 10):
            spent.clear()
            backward(forward(b), (b.hidden, b.weight))
            if turn >= 10:  # the first ones warm up
                operator = spent.pop("operator") - spent["backend, forward"]
                outside = spent.pop("forward") - operator - sum(v for k, v in spent.items() if "backward" not in k)
                spent["operator and autograd, forward"] = operator
                spent["the rest of the forward"] = outside
                spent["operator and autograd, backward"] = spent.pop("backward") - spent["backend, backward"]
                for part, seconds in spent.items():
                    times[part].append(seconds)
    return {part: measure.spread(x) for part, x in sorted(times.items())}


def imports(rounds: int) -> Record:
    """Processor seconds that an import adds to torch's, in fresh processes; of other processes it hears little."""
    names = ["gspo_kernels", "trl.kernels", "liger_kernel.chunked_loss"]
    packages = {"trl.kernels": "trl", "liger_kernel.chunked_loss": "liger-kernel"}
    names = [name for name in names if name not in packages or measure.version(packages[name])]
    modules = {"gspo_kernels": "gspo_kernels.fused_loss"}  # the package alone imports nothing
    code = "import time, torch; start = time.process_time(); import {}; print(time.process_time() - start)"
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        print(f"imports, {turn + 1} of {rounds}", flush=True)
        for name in names:
            times[name].append(float(_python(code.format(modules.get(name, name))).splitlines()[-1]))
    return {name: measure.spread(x) for name, x in times.items()}


def commands(rounds: int) -> Record:
    """Seconds on the wall from start to end."""
    runs = {
        "gspo --help": partial(_python, "from gspo_kernels.tools.entry_point import main; main()", "--help"),
        "python -c 'import torch'": partial(_python, "import torch"),
        "python -c 'import torch, gspo_kernels'": partial(_python, "import torch, gspo_kernels.fused_loss"),
    }
    print(f"commands, {rounds} times each", flush=True)
    times = measure.interleaved(runs, rounds, torch.device("cpu"))
    return {name: measure.spread(x) for name, x in times.items()}


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few runs: a trial")
    parser.add_argument("--output", type=Path, help=measure.OUTPUT)
    asked = parser.parse_args()
    output = measure.destination("overhead", DEVICE, asked.output, asked.tiny)
    torch.set_num_threads(1)
    turns, seconds, rounds, repeats = (1, 0.02, 1, 20) if asked.tiny else (5, 1.0, 10, 500)
    records, absent = calls(turns, seconds)
    shape = {"sequences": SEQUENCES, "length": LENGTH, "width": WIDTH, "vocabulary": VOCAB, "dtype": "float32"}
    results = {
        "shape": shape, "calls": records, "absent": absent, "parts of a call": parts(repeats),
        "import after torch, processor time": imports(rounds), "commands, wall time": commands(rounds),
    }  # fmt: skip  # lines by subject
    for r in records:
        print(f"{r['what']:28}{r['candidate']:30}{r['seconds'] * 1e6:9.0f} us{r['ratio']:8.2f} x plain")
    for part, r in results["parts of a call"].items():
        print(f"{part:58}{r['seconds'] * 1e6:9.0f} us")
    for name, r in (results["import after torch, processor time"] | results["commands, wall time"]).items():
        print(f"{name:58}{r['seconds'] * 1e3:9.0f} ms")
    print(measure.save("overhead", DEVICE, results, output))
