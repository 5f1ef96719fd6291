"""The commands: `rholoss` or `python -m rholoss`. Nobody imports them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

MISSING = {"typer", "click", "rich"}  # what the extra brings


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
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
