"""Count the live bytes and the matrix products of a block of code."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of tensors that are made under this mode: `now` at present, `peak` at most.

    Storages are identified by their Python objects, because storages of meta tensors have no address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size and key not in inputs and key not in self.known:
                    self.known.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        if key in self.known:
            self.known.remove(key)
            self.now -= size


class StepCounts(LiveBytes):
    """Count live bytes and the multiply-adds of matrix products, including in-place products."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.multiply_adds += left.shape[0] * left.shape[1] * right.shape[1]
        assert name not in ("bmm", "baddbmm", "einsum", "mv", "addmv", "dot"), f"{name}: this product is not counted"
        return super().__torch_dispatch__(func, types, args, kwargs)


def product_flops(fn: Any) -> int:
    """Return the sum of 2 m n k over all matrix products of `fn()`."""
    with StepCounts() as counter:
        fn()
    return 2 * counter.multiply_adds
