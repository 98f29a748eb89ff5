"""Bind launches with Triton's own JIT for GPUs that need not be present, without compiling or running anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gspo_kernels.backends.triton.launch import Launch, launch_options


class Variant(NamedTuple):
    """The arguments of `triton.compile` that the JIT would use for a launch."""

    source: Any  # an ASTSource: the kernel, with the types, constants and alignment of its arguments
    target: GPUTarget
    options: dict[str, Any]

    def compile(self) -> Any:
        return triton.compile(self.source, target=self.target, options=self.options)


class _Driver(NamedTuple):
    """A Triton driver for an absent GPU. The JIT caches bound kernels by `get_current_device()`."""

    architecture: str

    def get_current_device(self) -> str:
        return self.architecture

    def get_current_stream(self, device: str) -> None:
        return None

    def get_current_target(self) -> GPUTarget:
        return target(self.architecture)


def target(architecture: str) -> GPUTarget:
    """Triton's target for an architecture such as "sm_90" or "gfx942"."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


@contextmanager
def assume_driver(architecture: str) -> Iterator[None]:
    """Make the JIT bind for `architecture` inside this context, and return a `Variant` instead of compiling."""
    with patch.object(driver, "_active", _Driver(architecture)), patch.object(triton.compiler, "compile", Variant):
        yield


def bind(launch: Launch) -> Variant:
    """Bind the arguments of a launch, inside `assume_driver`. Equal variants return the same object.

    Raises:
        TypeError: An argument is missing, unknown or has the wrong type.
    """
    try:
        # The JIT keeps the compiler that it last bound with. Restore it, for real launches in this process.
        with patch.object(launch.kernel, "compile", Variant, create=True):
            variant = launch.kernel.warmup(**launch.arguments, **launch_options(launch.config), grid=(1,))
    except (TypeError, KeyError, AttributeError) as error:
        raise TypeError(f"{launch.kernel.__name__}: {error}") from error
    # The JIT does not check numbers for typed parameters. The compiled launcher does, on a GPU.
    for parameter in launch.kernel.params:
        kind = parameter.annotation_type or ""
        value = launch.arguments[parameter.name]
        if (kind[:1] == "i" and type(value) is not int) or (kind[:1] == "f" and type(value) not in (int, float)):
            raise TypeError(f"{launch.kernel.__name__}: {parameter.name} is {kind}, received {type(value).__name__}")
    return variant


def specialise(launch: Launch) -> str:
    """Describe the variant of a launch by types, constants and alignment. The JIT compiles one kernel per variant."""
    with assume_driver("sm_90"):
        source = bind(launch).source
    return str((source.signature, source.constants, source.attrs))
