"""Make Triton's interpreter faster, and its NaN like a GPU's."""
# Triton's types are patched, which pyright doesn't like.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import inspect
import math
from typing import Any


def prepare_interpreter() -> None:
    """Apply the three patches below. A process that called this must not compile a kernel."""
    patch_language_once()
    keep_types()
    ignore_nan_in_extremes()


def patch_language_once() -> None:
    """Make the interpreter patch Triton's language once per process.

    By default the interpreter patches the language at every call of a device function, which takes half of a test's
    time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[frozenset[int]] = set()
    seen: set[int] = set()  # ids of the globals of modules with kernels
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> object:
        if id(fn.__globals__) not in seen:
            seen.add(id(fn.__globals__))
            names = fn.__globals__.values()
            languages = frozenset(id(x) for x in names if inspect.ismodule(x) and x in (tl, tl.core))
            if languages not in patched:
                patch(fn)
                patched.add(languages)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def keep_types() -> None:
    """Cache the shapes of types and NumPy's dtypes. By default the interpreter recomputes them for every value."""
    import triton.language.core as core
    from triton.runtime import interpreter

    block_type, np_dtype = core.block_type.__init__, interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[int, ...], tuple[Any, Any]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def kept_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        name = "pointer" if isinstance(scalar, core.pointer_type) else scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(scalar)
        return dtypes[name]

    def new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([getattr(x, "value", x) for x in shape])
        if key not in blocks:
            block_type(self, element_ty, shape)
            blocks[key] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = blocks[key]
        self.name = f"<{self.shape}, {element_ty}>"

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            tensors[key] = core.constexpr(math.prod(key)), core.tuple([core.constexpr(x) for x in key])
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.numel, self.shape = tensors[key]

    interpreter._get_np_dtype = kept_np_dtype
    core.block_type.__init__ = new_block_type
    core.tensor.__init__ = new_tensor


def ignore_nan_in_extremes() -> None:
    """Make `tl.minimum` and `tl.maximum` ignore a NaN operand, as GPUs do. The interpreter returns NaN."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    def extreme(function: np.ufunc) -> Any:
        return lambda self, a, b: self.binary_op(a, b, function)

    InterpreterBuilder.create_minnumf = extreme(np.fmin)
    InterpreterBuilder.create_maxnumf = extreme(np.fmax)
