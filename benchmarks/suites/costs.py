"""What a step costs wherever it runs: matrix passes, bytes, kernel launches, compiled kernels. Counted, not timed.

    python -m gspo_kernels.benchmarks costs            print the table
    python -m gspo_kernels.benchmarks costs --write    and write tests/backends/golden_costs.json: read the difference

Nothing here depends on the machine, so that a change of any number is a change of the code. Products and bytes are
counted below the operators, where torch makes them, and so not by what the library says of itself.
"""

from __future__ import annotations

import argparse
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_kernels import Objective, gspo_fused_loss, linear_log_probs, ops
from gspo_kernels.backends import live_tiles
from gspo_kernels.backends import torch as torch_backend
from gspo_kernels.backends import triton as triton_backend
from gspo_kernels.backends.triton import tuning
from gspo_kernels.backends.triton.launch import Launch, launches
from gspo_kernels.tools import compile_cases as cases
from gspo_kernels.tools.compile_gate import specialise

from .. import measure
from ..measure import Record
from ..peaked import make as make_policy
from ..workloads import roles

GOLDEN = measure.ROOT / "tests" / "backends" / "golden_costs.json"


class Counted(TorchDispatchMode):
    """Multiply-adds of matrix products, and bytes of the tensors made and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.multiply_adds += a.shape[0] * a.shape[1] * b.shape[1]
        assert name not in ("bmm", "baddbmm", "mv", "addmv", "dot"), f"{name} is a product that is not counted"
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size and key not in inputs and key not in self.alive:
                    self.alive.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self.alive.remove(key)
        self.now -= size


@contextmanager
def counted() -> Iterator[Counted]:
    """What the torch backend does inside. A mode sees an operator of ours as one call, so it is entered within too."""
    mode = Counted()

    def inside(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with mode:
            return function(*args, **options)

    parts = [(torch_backend, name) for name in ("forward_with_shares", "policy_forward", "head_backward")]
    with ExitStack() as stack:
        for module, name in [*parts, (ops, "choose")]:
            stack.enter_context(patch.object(module, name, partial(inside, getattr(module, name))))
        with mode:
            yield mode


# Work and memory of the torch backend

SEQUENCES = 8
# Whole tiles and cells on a CPU (128 rows, 168 columns), so that there is no padding to count.
ROWS, WIDTH, VOCAB = 1024, 128, 8064
WORKSPACE_MIB = 8  # four whole tiles of logits, a quarter of all logits


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
}


def work(
    rows: int = ROWS, zero: int = 0, clipped: int = 0, prompt: int = 0, frozen: tuple[str, ...] = (),
    objective: Objective = GSPO, entropy: bool = False, budget: float = 0.0, peaked: bool = True,
) -> Record:  # fmt: skip  # lines by subject
    """Products and bytes of a forward and a backward, counted, beside what the metrics say.

    Sequences of one length: the first `zero` have advantage 0, the next `clipped` lie beyond the clip; of each the
    first `prompt` tokens are masked. `frozen`: what asks for no gradient.
    """
    policy, shape = make_policy(rows, WIDTH, VOCAB, peaked=peaked), (SEQUENCES, rows // SEQUENCES)
    advantages, log_ratio = roles(SEQUENCES, zero, clipped)
    mask = torch.arange(shape[1]).expand(shape) >= prompt
    hidden, weight, ids = policy.hidden.view(*shape, WIDTH), policy.weight, policy.target_ids.view(shape)
    with patch.dict(os.environ, GSPO_WORKSPACE_MIB=str(WORKSPACE_MIB)):
        log_probs = linear_log_probs(hidden, weight, ids, mask=mask, backend="torch").log_probs
        hidden.requires_grad_("hidden" not in frozen)
        weight.requires_grad_("weight" not in frozen)
        old, ref = log_probs - log_ratio[:, None], log_probs - 0.1 if objective.kl_coef else None
        with counted() as counts:
            out = gspo_fused_loss(
                hidden, weight, ids, advantages, mask=mask, old_log_probs=old, ref_log_probs=ref, objective=objective,
                entropy=entropy, gradient_budget=budget, backend="torch",
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


# Launches of the Triton backend, interpreted

BATCHES = ((4, 8), (4, 16), (2, 32))  # sequences x length: one slab of columns, whatever it is
LAUNCHING: dict[str, Record] = {
    "forward only": dict(frozen=BOTH),
    "forward and backward": {},
    "frozen head": dict(frozen=("weight",)),
    "entropy": dict(entropy=True),
    "entropy bonus": dict(objective=BONUS),
    "KL": dict(objective=KL),
    "budget 1e-2": dict(gradient_budget=1e-2),
}


def launched(name: str, sequences: int, length: int) -> dict[str, int]:
    """How often each kernel runs in a step."""
    options, shape, width, vocab = dict(LAUNCHING[name]), (sequences, length), 32, 600
    frozen = options.pop("frozen", ())
    # Two candidates of equal weight in the first tile of columns; the other tiles hold 5e-4 of the gradient's mass.
    ids = torch.arange(sequences * length).view(shape) % width
    hidden = 14 * (torch.eye(width)[ids] + torch.eye(width)[(ids + 1) % width])
    weight = torch.eye(vocab, width)
    hidden.requires_grad_("hidden" not in frozen)
    weight.requires_grad_("weight" not in frozen)
    ref = torch.full(shape, -0.7)
    with launches() as seen:
        out = gspo_fused_loss(
            hidden, weight, ids, torch.linspace(-1, 1, sequences), ref_log_probs=ref, backend="triton", **options
        )
        if out.loss.requires_grad:
            out.loss.backward()
    return Counter(x.kernel.__name__ for x in seen)


def interpreted() -> Record:
    return {name: {f"{s} x {n}": launched(name, s, n) for s, n in BATCHES} for name in LAUNCHING}


# The Triton backend as on an H200, on tensors without storage: at real sizes, and over the batches of a run

REAL: dict[str, Record] = {
    "8,192 x 4,096 x 151,936": dict(rows=8192),
    "8,192 x 4,096 x 151,936, entropy": dict(rows=8192, entropy=True),
    "8,192 x 4,096 x 151,936, budget": dict(rows=8192, budget=True),
    "8,192 x 2,304 x 256,000, soft-cap": dict(rows=8192, width=2304, vocab=256_000, logit_softcap=30.0),
    "131,072 x 4,096 x 262,144": dict(rows=131_072, vocab=262_144),
}
# (rows, sequences, clip below and above): what changes from batch to batch, and from run to run.
VARIED = (
    (8192, 16, 3e-4, 4e-4), (1000, 7, 2e-4, 5e-4), (4097, 8, 1e-3, 1e-3), (513, 3, 3e-3, 4e-3),
    (30_001, 64, 0.01, 0.02), (2048, 1, 5e-4, 5e-4),
)  # fmt: skip  # a table


def at_real_size(budget: bool = False, **head: Any) -> Record:
    """Bytes and launches of the head's two passes. Counted apart: a launch that is listed keeps its tensors alive."""
    meta = cases.meta_head(**head)
    run = partial(cases.live_cells if budget else cases.both_passes, meta)
    with tuning.assume("sm_90"), Counted() as counts:
        if budget:
            result, tiles = triton_backend.forward_with_shares(meta, wanted=True)
            assert tiles is not None
            live_tiles.choose(meta, result, result.log_probs, tiles, 1e-3)
            del result, tiles  # the run makes its own
        run()
    with tuning.assume("sm_90"), launches() as seen:
        run()
    return {"peak bytes": counts.peak, "launches": Counter(x.kernel.__name__ for x in seen)}


def variants(batches: int) -> dict[str, int]:
    """Distinct compiled kernels that the first so many batches need, by name, over all that the compile gate has."""
    with tuning.assume("sm_90"), launches() as seen:
        for rows, sequences, low, high in VARIED[:batches]:
            for head in cases.CASES.values():
                cases.both_passes(cases.meta_head(rows=rows, **head))
            for head in cases.CELL_CASES.values():
                cases.live_cells(cases.meta_head(rows=rows, **head))
            for objective in cases.OBJECTIVES.values():
                cases.loss(replace(objective, clip_low=low, clip_high=high), torch.float32, rows, sequences)
    return Counter(kernel for kernel, *_ in {_compiled_as(x) for x in seen})


def _compiled_as(launch: Launch) -> tuple[Any, ...]:
    """(name, what Triton's JIT takes into account)."""
    signature, constants, divisible = specialise(launch)
    # A tensor without storage counts as aligned there, but a view into one may begin anywhere.
    tensors = {name: x for name, x in launch.arguments.items() if isinstance(x, Tensor)}
    apart = {name for name, x in tensors.items() if x.storage_offset() * x.itemsize % 16}
    aligned = tuple(name for name in divisible if name not in apart)
    return launch.kernel.__name__, launch.config, str(signature), str(constants), aligned


def compiled() -> Record:
    return {
        "real sizes": {name: at_real_size(**options) for name, options in REAL.items()},
        "compiled kernels, by batches": {f"of {n}": variants(n) for n in (1, len(VARIED))},
    }


def collect(tick: Callable[[str], object] = lambda text: None) -> Record:
    """Everything. What is interpreted and what would be compiled exclude each other, so each has a process."""
    results: Record = {"torch": str(measure.version("torch")).split("+")[0], "work": {}}
    for name, options in SITUATIONS.items():
        tick(f"torch backend: {name}")
        results["work"][name] = work(**options)
    tick("Triton backend: launches; bytes at real sizes; compiled kernels")
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        results["launches"] = measure.fresh("suites.costs", "interpreted")
    with patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        return results | measure.fresh("suites.costs", "compiled")


def flat(counts: Any, place: str = "") -> Record:
    """Every number by where it stands."""
    if not isinstance(counts, dict):
        return {place: counts}
    parts = [flat(value, f"{place} | {key}".removeprefix(" | ")) for key, value in counts.items()]
    return {name: value for part in parts for name, value in part.items()}


def differences(measured: Record, golden: Record) -> list[str]:
    """What is not as it was, a line each."""
    now, before = flat(measured), flat(golden)
    pairs = {name: (now.get(name, "absent"), before.get(name, "absent")) for name in before | now}
    return [f"{name}: {new}, was {old}" for name, (new, old) in pairs.items() if new != old]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"rewrite {GOLDEN.parent.name}/{GOLDEN.name}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results = collect(lambda text: print(text, flush=True))
    for place, numbers in groupby(flat(results).items(), lambda number: number[0].rpartition(" | ")[0]):
        print(place, *(f"{name.rpartition(' | ')[2]} {value}" for name, value in numbers), sep="   ")
    changed = differences(results, json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {})
    print("", *(changed or ["all as in the golden file"]), sep="\n")
    if asked.write:
        GOLDEN.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
