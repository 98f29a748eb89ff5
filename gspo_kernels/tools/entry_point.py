"""Entry point of the console script `gspo`."""

from __future__ import annotations

import sys

from ..extras import MissingExtraError, needs


def main(arguments: list[str] | None = None) -> None:
    """Run `gspo` with arguments, by default those of the process. Exit with one line if an extra is missing."""
    try:
        with needs("gspo", "cli", "typer", "rich"):
            from .cli import app
    except MissingExtraError as error:
        sys.exit(str(error))
    app(arguments, prog_name="gspo")
