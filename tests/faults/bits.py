"""Print hashes of all outputs of a fixed set of calls. Equal hashes before and after a change mean equal bits.

    PYTHONPATH=tests python -m faults.bits > before.json

Bits depend on the processor and the versions of libraries, so compare only files made on the same machine.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"  # see conftest.py

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from helpers.oracle import DTYPES, HEADS, LAYOUTS, OBJECTIVES
from helpers.samples import Sample, make_sample, run_fused
from helpers.tile_choices import choices
from torch import Tensor

from gspo_kernels import Objective


def samples() -> Iterator[tuple[str, Sample]]:
    """Yield names and samples: each objective four times, with varying heads, layouts and dtypes."""
    kinds: tuple[dict[str, Any], ...] = (OBJECTIVES, HEADS, LAYOUTS, DTYPES)
    objectives, heads, layouts, dtypes = (list[tuple[str, Any]](x.items()) for x in kinds)
    for i in range(4 * len(objectives)):
        (name, fields), turn = objectives[i % len(objectives)], i // len(objectives)
        head_name, head = heads[(3 * i + turn) % len(heads)]
        layout_name, layout = layouts[(2 * i + turn) % len(layouts)]
        dtype_name, dtype = dtypes[(i + 2 * turn) % len(dtypes)]
        sample = make_sample(i, dtype=dtype, objective=Objective(**fields), **head, **layout)
        yield f"{name}, {head_name}, {layout_name}, {dtype_name}", sample


def digest(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return a hash of the names, dtypes, shapes and bits of tensors."""
    state = hashlib.sha256()
    for name, x in tensors:
        state.update(name.encode())
        if x is not None:
            x = x.detach().contiguous()
            state.update(f"{x.dtype} {list(x.shape)}".encode())
            state.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def fused(sample: Sample, backend: str, **changes: Any) -> dict[str, str]:
    """Hash the results of `gspo_fused_loss`."""
    out, grads = run_fused(sample.with_options(**changes), backend)
    return {
        "loss": digest([("loss", out.loss)]),
        "log_probs": digest([("log_probs", out.log_probs), ("entropy", out.entropy), ("log_ratio", out.log_ratio)]),
        "metrics": digest(sorted(out.metrics.items())),
        "gradients": digest(sorted(grads.items())),
    }


def budget(seed: int, dtype: torch.dtype, backend: str) -> dict[str, str]:
    """Hash the results with a gradient budget, for a peaked policy and a vocabulary of many tiles."""
    sample = make_sample(
        seed, dtype=dtype, lengths=(120, 80, 100), hidden_size=64, vocab=1500, logit_std=12.0, packed=True
    )
    with choices():  # whether or not it saves time
        return fused(sample, backend, gradient_budget=0.02)


def hashes() -> dict[str, dict[str, str]]:
    torch.set_num_threads(1)
    result = {}
    for backend in ("torch", "triton"):
        for i, (name, sample) in enumerate(samples()):
            result[f"{backend} fused {name}"] = fused(sample, backend, entropy=i % 3 == 0)
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            result[f"{backend} budget {dtype}"] = budget(seed, dtype, backend)
    return result


if __name__ == "__main__":
    print(json.dumps(hashes(), indent=1))
