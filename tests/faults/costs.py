"""Count the matrix products, bytes, kernel launches and compiled kernels of a training step. Nothing is timed.

    PYTHONPATH=tests python -m faults.costs    rewrite tests/backends/golden_costs.json

The counts do not depend on the machine, so a changed number means changed code. Products and bytes are counted at
PyTorch's dispatcher, below our operators, so they check the metrics that the library reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from helpers import compile_cases as cases
from helpers.binding import specialise
from helpers.counters import StepCounts, TorchLaunches
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gspo_kernels import KeptSets, Objective, gspo_fused_loss, linear_log_probs
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.triton import tuning
from gspo_kernels.backends.triton.launch import launches
from gspo_kernels.benchmarks.peaked import make as make_policy
from gspo_kernels.benchmarks.workloads import roles

TESTS = Path(__file__).parent.parent
GOLDEN = TESTS / "backends" / "golden_costs.json"
Record = dict[str, Any]
Mode = TypeVar("Mode", bound=TorchDispatchMode)


@contextmanager
def counted(mode: Mode, backend: Any) -> Iterator[Mode]:
    """Count the work of a backend, a module, by a dispatch mode.

    A dispatch mode sees each of our operators as one call. So the mode is entered again inside the operators.
    """

    def with_mode(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with mode:
            return function(*args, **options)

    with ExitStack() as stack:
        for name in ("forward_and_cache", "policy_forward", "choose", "head_backward", "pair_products", "pair_sums"):
            stack.enter_context(patch.object(backend, name, partial(with_mode, getattr(backend, name))))
        with mode:
            yield mode


SEQUENCES = 8
ROWS, WIDTH, VOCAB = 1024, 128, 8064  # multiples of a CPU's cell (128 rows, 168 columns), so no padding is counted
WORKSPACE_MIB = 8  # a quarter of all logits in fp32
GSPO, KL, BONUS = Objective(), Objective(kl_coef=0.04), Objective(entropy_coef=0.01)
BOTH = ("hidden", "weight")
SITUATIONS: dict[str, Record] = {
    "dense": {},
    "dense, entropy": dict(entropy=True),
    "no gradient asked": dict(frozen=BOTH),
    "frozen head": dict(frozen=("weight",)),
    "frozen body": dict(frozen=("hidden",)),
    "half prompt": dict(prompt=64),
    "half prompt, zero advantages": dict(prompt=64, zero=2),
    "rl-like": dict(zero=2, clipped=1),
    "rl-like, KL": dict(zero=2, clipped=1, objective=KL),
    "rl-like, entropy bonus": dict(zero=2, clipped=1, objective=BONUS),
    "rl-like, budget 1e-3": dict(zero=2, clipped=1, budget=1e-3),
    "KL, budget 1e-3": dict(objective=KL, budget=1e-3),
    "flat policy, budget 1e-3": dict(zero=2, clipped=1, budget=1e-3, peaked=False),
    "padded tiles": dict(zero=2, clipped=1, rows=1000),
    "dense, all cached": dict(cache_mib=32),
    "rl-like, half cached": dict(zero=2, clipped=1, cache_mib=10),
}


def work(
    rows: int = ROWS, zero: int = 0, clipped: int = 0, prompt: int = 0, frozen: tuple[str, ...] = (),
    objective: Objective = GSPO, entropy: bool = False, budget: float = 0.0, peaked: bool = True,
    cache_mib: float = 0.0,
) -> Record:  # fmt: skip  # lines by subject
    """Count products and bytes of a forward and a backward. Return them with the metrics that the library reports.

    All sequences have the same length. The first `zero` sequences have advantage 0, the next `clipped` sequences lie
    outside the clip window, and the first `prompt` tokens of each sequence are masked. `frozen` names the tensors that
    need no gradient.
    """
    policy = make_policy(rows, WIDTH, VOCAB, peaked=peaked)
    shape = (SEQUENCES, rows // SEQUENCES)
    advantages, log_ratio = roles(SEQUENCES, zero, clipped)
    mask = torch.arange(shape[1]).expand(shape) >= prompt
    hidden = policy.hidden.view(*shape, WIDTH)
    weight = policy.weight
    ids = policy.target_ids.view(shape)
    with patch.dict(os.environ, GSPO_WORKSPACE_MIB=str(WORKSPACE_MIB)):
        log_probs = linear_log_probs(hidden, weight, ids, mask=mask, backend="torch").log_probs
        hidden.requires_grad_("hidden" not in frozen)
        weight.requires_grad_("weight" not in frozen)
        old = log_probs - log_ratio[:, None]
        ref = log_probs - 0.1 if objective.kl_coef else None
        with counted(StepCounts(), torch_backend) as counts:
            out = gspo_fused_loss(
                hidden, weight, ids, advantages, mask=mask, old_log_probs=old, ref_log_probs=ref, objective=objective,
                entropy=entropy, gradient_budget=budget, cache_mib=cache_mib, backend="torch",
            )  # fmt: skip  # lines by subject
            if out.loss.requires_grad:
                out.loss.backward()
    tokens = rows - SEQUENCES * prompt
    return {
        "passes": out.metrics["passes"].item(),
        "live rows": round(out.metrics["live_row_share"].item() * tokens),
        "live logits": round(out.metrics["live_tile_share"].item() * tokens * VOCAB),
        "multiply-adds": counts.multiply_adds,
        "peak bytes": counts.peak,
    }


BATCHES = ((4, 8), (4, 16), (2, 32))  # (sequences, length). In each batch, one slab holds the vocabulary.
LAUNCHING: dict[str, Record] = {
    "forward only": dict(frozen=BOTH),
    "forward and backward": {},
    "frozen head": dict(frozen=("weight",)),
    "entropy": dict(entropy=True),
    "entropy bonus": dict(objective=BONUS),
    "KL": dict(objective=KL),
    "budget 1e-2": dict(gradient_budget=1e-2),
    "cache": dict(cache_mib=1.0),
    "kept sets": dict(kept=5),
}


def launched(name: str, sequences: int, length: int) -> dict[str, int]:
    """Count the launches of each kernel in a step, and PyTorch's launches."""
    options = dict(LAUNCHING[name])
    shape = (sequences, length)
    width = 32
    vocab = 600
    frozen = options.pop("frozen", ())
    kept = options.pop("kept", 0)  # ids in the set of each token
    # The first vocabulary tile holds the two likely tokens of each row. The other tiles hold less than 2.5e-4 of the
    # gradient's mass, so a budget of 1e-2 drops them.
    ids = torch.arange(sequences * length).view(shape) % width
    hidden = 14 * (torch.eye(width)[ids] + torch.eye(width)[(ids + 1) % width])
    weight = torch.eye(vocab, width)
    hidden.requires_grad_("hidden" not in frozen)
    weight.requires_grad_("weight" not in frozen)
    ref = torch.full(shape, -0.7)
    advantages = torch.linspace(-1, 1, sequences)
    if kept:
        padded = (ids[..., None] + torch.arange(kept)) % vocab
        options["kept_sets"] = KeptSets.from_padded(padded, fill=-1)
    with launches() as seen, outside_of_launches(), counted(TorchLaunches(), triton_backend) as torch_launches:
        out = gspo_fused_loss(hidden, weight, ids, advantages, ref_log_probs=ref, backend="triton", **options)
        if out.loss.requires_grad:
            out.loss.backward()
    return {**Counter(x.kernel.__name__ for x in seen), "torch": torch_launches.number}


@contextmanager
def outside_of_launches() -> Iterator[None]:
    """Disable dispatch modes while a kernel runs, because the interpreter copies tensors by PyTorch's operations."""

    def without_modes(launch: Callable[..., None], *args: Any, **options: Any) -> None:
        with _disable_current_modes():
            launch(*args, **options)

    prefix = triton_backend.__name__
    modules = [x for name, x in sys.modules.items() if name.startswith(prefix) and callable(getattr(x, "launch", None))]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "launch", partial(without_modes, module.launch)))
        yield


def interpreted() -> Record:
    return {"launches": {name: {f"{s} x {n}": launched(name, s, n) for s, n in BATCHES} for name in LAUNCHING}}


# (rows, sequences, clip_low, clip_high). These values change between the batches of a run, and between runs.
VARIED = (
    (8192, 16, 3e-4, 4e-4), (1000, 7, 2e-4, 5e-4), (4097, 8, 1e-3, 1e-3), (513, 3, 3e-3, 4e-3), (30001, 64, 0.01, 0.02),
    (2048, 1, 5e-4, 5e-4),
)  # fmt: skip  # a table


def variants(batches: int) -> dict[str, int]:
    """Count the distinct compiled kernels that all cases of the compile gate need for the first batches of VARIED."""
    with tuning.assume("sm_90"), launches() as seen:
        for rows, sequences, low, high in VARIED[:batches]:
            for head in cases.CASES.values():
                cases.forward_and_backward(cases.meta_head(rows=rows, **head))
            for head in cases.CELL_CASES.values():
                for added in (True, False):
                    cases.live_cells(cases.meta_head(rows=rows, **head), added)
            for objective in cases.OBJECTIVES.values():
                cases.loss(replace(objective, clip_low=low, clip_high=high), torch.float32, rows, sequences)
    return Counter(kernel for kernel, *_ in {(x.kernel.__name__, x.config, specialise(x)) for x in seen})


def compiled() -> Record:
    return {
        "compiled kernels, by batches": {f"of {n}": variants(n) for n in (1, len(VARIED))},
    }


def in_new_process(function: str) -> Record:
    """Return the result of a function of this module, by name, run in a new process.

    Triton reads TRITON_INTERPRET once per process.
    """
    code = f"import json; from faults import costs; print(json.dumps(costs.{function}()))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    environment |= {"TRITON_INTERPRET": "1"} if function == "interpreted" else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{function}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def collect() -> Record:
    """Return every count."""
    results: Record = {"torch": torch.__version__.split("+")[0]}
    results["work"] = {name: work(**options) for name, options in SITUATIONS.items()}
    return results | in_new_process("interpreted") | in_new_process("compiled")


def main() -> None:
    torch.set_num_threads(1)
    print("counting takes about half a minute", flush=True)
    GOLDEN.write_text(json.dumps(collect(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
