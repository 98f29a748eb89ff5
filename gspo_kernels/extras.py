"""Name the extra that installs a missing package. Imports the standard library alone, so that `gspo` always answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ModuleNotFoundError):
    """An optional package is not installed; the message names the extra that installs it."""


@contextmanager
def needs(user: str, extra: str, *packages: str) -> Iterator[None]:
    """Wrap imports of optional `packages`: where one is not installed, raise an error that names the extra.

    Other import errors pass as they are: an installed package that lacks one of its own modules is another fault.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtraError) or error.name not in packages:
            raise
        raise MissingExtraError(
            f"{user} needs {error.name}, which is not installed: pip install 'gspo-kernels[{extra}]'", name=error.name
        ) from None
