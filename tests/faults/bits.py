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
from collections.abc import Iterable

import torch
from helpers.array import run
from helpers.features import BANS, FACTORS, OF_TRITON, build, text_of
from helpers.pair_cover import pair_cover
from torch import Tensor


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of the names, dtypes, shapes and bits of tensors."""
    state = hashlib.sha256()
    for name, x in tensors:
        x = x.detach().contiguous()
        state.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        state.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def hashes() -> dict[str, dict[str, str]]:
    """Hash the results of rows that contain every pair of settings, by row and kind of result."""
    torch.set_num_threads(1)
    result = {}
    for of_backend in ({}, OF_TRITON):
        for row in pair_cover({**FACTORS, "compile": (False,), **of_backend}, bans=BANS):
            ours = run(build(row, 0))
            kinds = {"outputs": ours.outputs, "gradients": ours.gradients, "metrics": ours.metrics}
            result[text_of(row)] = {kind: digest(sorted(x.items())) for kind, x in kinds.items()}
    return result


if __name__ == "__main__":
    print(json.dumps(hashes(), indent=1))
