"""Count the live bytes and the matrix products of a block of code."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of tensors that are made under this mode: at present (`now`) and at most (`peak`).

    Storages are identified by the address of their C++ objects, because the data of meta tensors has no address.
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
                key = storage._cdata
                size = storage.nbytes()
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


class TorchLaunches(TorchDispatchMode):
    """Count PyTorch's operations that launch a kernel on a GPU: those that write memory, except for allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_ours = func.namespace != "aten"
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.numel()]
        is_new = any(x.untyped_storage()._cdata not in inputs for x in results)
        writes = func._schema.is_mutable or (is_new and "empty" not in name)
        # A scalar operand becomes a tensor on the CPU.
        self.number += bool(results) and writes and not is_ours and name != "scalar_tensor"
        return out
