"""Make Triton's interpreter faster, and its NaN like a GPU's."""

from __future__ import annotations

import inspect
from typing import Any


def patch_language_once() -> None:
    """Make the interpreter patch Triton's language once per process.

    By default the interpreter patches the language at every call of a device function, which takes half of a test's
    time. Patching once is enough in a process that never compiles a kernel.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[frozenset[int]] = set()
    patch = interpreter._patch_lang

    def patch_once(fn: object) -> object:
        names = fn.__globals__.values()  # pyright: ignore[reportAttributeAccessIssue]
        languages = frozenset(id(x) for x in names if inspect.ismodule(x) and x in (tl, tl.core))
        if languages not in patched:
            patch(fn)
            patched.add(languages)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once  # pyright: ignore[reportAttributeAccessIssue]


def ignore_nan_in_extremes() -> None:
    """Make `tl.minimum` and `tl.maximum` ignore a NaN operand, as GPUs do. The interpreter returns NaN."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    def extreme(function: np.ufunc) -> Any:
        return lambda self, a, b: self.binary_op(a, b, function)

    InterpreterBuilder.create_minnumf = extreme(np.fmin)
    InterpreterBuilder.create_maxnumf = extreme(np.fmax)
