"""`python -m rholoss.demo`: real digits with wrong labels, chosen from in three ways."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rholoss.demo import run
from rholoss.errors import RholossError


def main() -> int:
    """Run the demo; 2 for an error that the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m rholoss.demo", description=__doc__)
    parser.add_argument("--epochs", type=int, default=12, help="passes of the candidates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("rholoss-demo"))
    parser.add_argument("--fresh", action="store_true", help="forget runs that are finished")
    parser.add_argument("--no-page", dest="page", action="store_false", help="the table alone")
    parser.add_argument("--quiet", dest="progress", action="store_false", help="no progress bars")
    parser.add_argument("--limit", type=int, help="use the first rows only, for a quick look")
    try:
        run(**vars(parser.parse_args()))
    except RholossError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
