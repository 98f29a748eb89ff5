"""Make Triton's interpreter faster."""

from __future__ import annotations

import inspect


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
