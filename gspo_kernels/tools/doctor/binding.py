"""Bind launches by Triton's own JIT for GPUs that need not be present, without compiling or running anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ...backends.triton.launch import Launch, launch_options


class Variant(NamedTuple):
    """What the JIT compiles for a launch: the arguments of `triton.compile`."""

    source: Any  # an ASTSource: the kernel, with the types, constants and alignment of its arguments
    target: GPUTarget
    options: dict[str, Any]

    def compile(self) -> Any:
        return triton.compile(self.source, target=self.target, options=self.options)


class _Driver(NamedTuple):
    """Triton's driver of an absent GPU. The JIT caches what it has bound by `get_current_device()`."""

    architecture: str

    def get_current_device(self) -> str:
        return self.architecture

    def get_current_stream(self, device: str) -> None:
        return None

    def get_current_target(self) -> GPUTarget:
        return target(self.architecture)


def target(architecture: str) -> GPUTarget:
    """Return Triton's target for an architecture such as "sm_90" or "gfx942"."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


@contextmanager
def assume_driver(architecture: str) -> Iterator[None]:
    """Let the JIT bind for an architecture in this context, and return a `Variant` where it would compile."""
    with patch.object(driver, "_active", _Driver(architecture)), patch.object(triton.compiler, "compile", Variant):
        yield


def bind(launch: Launch) -> Variant:
    """Bind the arguments of a launch, inside `assume_driver`. The same object is returned for equal variants.

    Raises:
        TypeError: for an argument that is missing, unknown or of a wrong type.
    """
    try:
        # The JIT keeps the compiler that it last bound with: restore it, for launches of this process on a GPU.
        with patch.object(launch.kernel, "compile", Variant, create=True):
            variant = launch.kernel.warmup(**launch.arguments, **launch_options(launch.config), grid=(1,))
    except (TypeError, KeyError, AttributeError) as error:
        raise TypeError(f"{launch.kernel.__name__}: {error}") from error
    # Where a parameter has a type, the JIT does not check the number. The compiled launcher does, on a GPU.
    for parameter in launch.kernel.params:
        kind = parameter.annotation_type or ""
        value = launch.arguments[parameter.name]
        if (kind[:1] == "i" and type(value) is not int) or (kind[:1] == "f" and type(value) not in (int, float)):
            raise TypeError(f"{launch.kernel.__name__}: {parameter.name} is {kind}, received {type(value).__name__}")
    return variant


def specialise(launch: Launch) -> str:
    """Describe a variant: types, constants and alignment of the arguments. The JIT compiles one kernel for each."""
    with assume_driver("sm_90"):
        source = bind(launch).source
    return str((source.signature, source.constants, source.attrs))
