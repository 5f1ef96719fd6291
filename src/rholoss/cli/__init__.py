"""The command line: `rholoss`, or `python -m rholoss`. The rest of the package does not import it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

MISSING = {"typer", "click", "rich"}  # the packages of the extra "cli"


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        args: the words of the command line after `rholoss`; by default those of this process.
    """
    try:
        from rholoss.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in MISSING:
            raise
        print(
            f"Error: the rholoss command needs {error.name}; install it with: "
            "pip install 'rholoss[cli]'",
            file=sys.stderr,
        )
        return 2
    return run(sys.argv[1:] if args is None else args)
