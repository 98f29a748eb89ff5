"""Run a command of this package: `python -m gspo_kernels.benchmarks step --help`."""

import sys
from importlib import import_module

from gspo_kernels.extras import MissingExtraError, needs

COMMANDS = {
    "step": "suites.step",
    "skip": "suites.skip",
    "kept_sets": "suites.kept_sets",
    "precision": "studies.precision",
    "operands": "studies.operands",
    "report": "report.pages",
    "gpu": "gpu.command",
}


def main() -> object:
    """Run the command that the first argument names. Pass it the other arguments."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(f"usage: python -m {__package__} [{' | '.join(COMMANDS)}] [options]")
    if name not in COMMANDS:
        return f"{name!r} is not a command: choose from {', '.join(COMMANDS)}"
    sys.argv = [f"{__package__} {name}", *arguments]
    try:
        with needs(sys.argv[0], "bench", "rich", "transformers", "tokenizers", "matplotlib"):
            return import_module(f".{COMMANDS[name]}", __package__).main()
    except MissingExtraError as error:
        return str(error)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(f"{__package__}."):
            return f"{name}: expected a clone of the repository, got an installed package"
        raise


if __name__ == "__main__":
    sys.exit(main())  # pyright: ignore[reportArgumentType] - an exit status or the text of an error
