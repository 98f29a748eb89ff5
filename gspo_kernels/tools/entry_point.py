"""Entry point of the `gspo` console script."""

from __future__ import annotations

import sys

from ..extras import MissingExtraError, needs


def main(arguments: list[str] | None = None) -> None:
    """Run the `gspo` command. Without the packages of the `cli` extra, print how to install them and exit.

    `arguments`: command-line arguments; None: `sys.argv[1:]`.
    """
    try:
        with needs("gspo", "cli", "typer", "rich"):
            from .cli import app
    except MissingExtraError as error:
        sys.exit(str(error))
    app(arguments, prog_name="gspo")
