"""fp32 products that are fp32 products, whatever the process asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside: dict[str, int] = {}  # device type -> how many calls are inside
_before: dict[str, str] = {}  # device type -> the setting that the first of them found


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Neither autocast nor a global request for TF32 or bf16 products reaches the products inside.

    That request is one setting of the whole process: the first call in saves it, the last one out restores it, so that
    calls in several threads do not restore each other's.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    backend: Any = torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn
    with _lock:
        if not _inside.get(kind):
            _before[kind] = backend.matmul.fp32_precision
            backend.matmul.fp32_precision = "ieee"
        _inside[kind] = _inside.get(kind, 0) + 1
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:
            _inside[kind] -= 1
            if not _inside[kind]:
                backend.matmul.fp32_precision = _before[kind]
