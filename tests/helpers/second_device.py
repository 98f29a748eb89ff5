"""A second device on a machine that has only one: tensors that report the meta device, but have values.

As on real devices, an operator on tensors of both devices raises an error, and only copies move values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

SECOND = torch.device("meta")


class _OnSecond(Tensor):
    on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        x: Any = Tensor._make_wrapper_subclass(cls, values.shape, values.stride(), dtype=values.dtype, device=SECOND)
        x.on_cpu = values
        return x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of SecondDevice()")


class SecondDevice(TorchDispatchMode):
    """While this mode is active, tensors on the meta device have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_second = {isinstance(x, _OnSecond) for x in tensors if x.ndim or isinstance(x, _OnSecond)}
        device = kwargs.get("device")
        if device is not None:
            on_second = {torch.device(device) == SECOND}
            kwargs["device"] = torch.device("cpu")
        if len(on_second) == 2:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        args, kwargs = tree_map_only(_OnSecond, lambda x: x.on_cpu, (args, kwargs))
        result = func(*args, **kwargs)
        if on_second != {True}:
            return result
        arguments = {id(x.on_cpu): x for x in tensors if isinstance(x, _OnSecond)}  # returned by in-place operators
        return tree_map_only(Tensor, lambda x: arguments[id(x)] if id(x) in arguments else _OnSecond(x), result)
