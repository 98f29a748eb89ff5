"""Import errors that name the extra to install.

This module imports only the standard library, so that `gspo` always starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ModuleNotFoundError):
    """An optional package is not installed. The message names the extra that installs it."""


@contextmanager
def needs(user: str, extra: str, *packages: str) -> Iterator[None]:
    """Wrap imports of optional `packages`. If one is not installed, raise MissingExtraError.

    Other import errors propagate unchanged, for example if an installed package lacks a dependency.

    Args:
        user: what needs the packages; the error message starts with it.
        extra: the extra that installs the packages.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtraError) or error.name not in packages:
            raise
        raise MissingExtraError(
            f"{user} needs {error.name}, which is not installed: pip install 'gspo-kernels[{extra}]', "
            f"or '.[{extra}]' in a clone",
            name=error.name,
        ) from None
