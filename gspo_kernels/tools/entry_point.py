"""Entry point of the console script `gspo`."""

from __future__ import annotations

import sys

from ..extras import MissingExtraError, needs


def main(arguments: list[str] | None = None) -> None:
    """Run the command `gspo`.

    If the packages of the extra `cli` are not installed, exit with one line that says how to install them.

    Args:
        arguments: the command's arguments; None: `sys.argv[1:]`.
    """
    try:
        with needs("gspo", "cli", "typer", "rich"):
            from .cli import app
    except MissingExtraError as error:
        sys.exit(str(error))
    app(arguments, prog_name="gspo")
