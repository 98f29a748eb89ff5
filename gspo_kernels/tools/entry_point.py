"""What the console script `gspo` starts: the command line, or a line that names the extra it needs."""

from __future__ import annotations

import sys

from ..extras import MissingExtraError, needs


def main() -> None:
    """Run `gspo`."""
    try:
        with needs("gspo", "cli", "typer", "rich"):
            from .cli import app
    except MissingExtraError as error:
        sys.exit(str(error))
    app()
