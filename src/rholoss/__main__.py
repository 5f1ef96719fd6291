"""`python -m rholoss` is the same as `rholoss`."""

import sys

from rholoss.cli import main

if __name__ == "__main__":
    sys.exit(main())
