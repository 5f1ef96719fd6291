"""python -m experiments.digits table1|report [--settings A B ...] [--seeds 0 1 2] [--again] [--out FILE]

`table1` runs what is missing and makes the page; by default the settings that a CPU can do.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from experiments import records


def main(words: list[str] | None = None) -> None:
    from experiments.digits import page, table1

    parser = argparse.ArgumentParser(
        prog="python -m experiments.digits", description="Table 1: the chain of approximations."
    )
    parser.add_argument("command", choices=("table1", "report"))
    parser.add_argument(
        "--settings",
        nargs="+",
        default=list(table1.ON_CPU),
        metavar="NAME",
        help="'all', or some of: " + "; ".join(table1.SETTINGS),
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--limit", type=int, default=None, help="points of each set, for a look; needs --out"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="none begins after so long")
    parser.add_argument("--out", type=Path, default=table1.RUNS, help="file of lines")
    parser.add_argument(
        "--again", action="store_true", help="also what has a committed line; new ones go to --out"
    )
    parser.add_argument("--data", default=None, help="directory with MNIST/raw; else RHOLOSS_DATA")
    a = parser.parse_args(words)
    names = list(table1.SETTINGS) if a.settings == ["all"] else a.settings
    unknown = sorted(set(names) - set(table1.SETTINGS))
    if unknown:
        parser.error(f"`--settings` has {unknown}; choose of {'; '.join(table1.SETTINGS)}")
    if a.again and a.out == table1.RUNS:
        parser.error("--again needs --out, a file for the lines of the runs made again")
    if a.command == "table1":
        given = {"root": a.data, "limit": a.limit, "seconds": a.seconds, "again": a.again}
        table1.run(names, a.seeds, out=a.out, **given)
    if next(records.read(a.out), None) is not None:
        print(page.write(a.out))
        return
    told = (
        f"{a.out} has no runs, so there is no page. (Runs that are committed are not made again without "
        "--again.)"
    )
    if a.command == "report":
        raise SystemExit(told)
    print(told)


if __name__ == "__main__":
    main()
