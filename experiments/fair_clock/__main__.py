"""python -m experiments.fair_clock tune|final|report: see experiments/results/fair_clock/README.md.

A word `+` begins further runs of the same call, which share the data set and what was measured:
`final --arms uniform --seeds 3 4 + --arms "rho k=5" --labels clean`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import processes, records
from experiments.fair_clock.arms import ARMS, LABELS, Cell
from experiments.fair_clock.choose import Choice, choice_for, tuned
from rholoss.errors import RholossError

RESULTS = records.RESULTS / "fair_clock" / "runs.jsonl"
SIZES, RATES = [32, 128, 512], [1e-3, 3e-3, 6e-3]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.fair_clock", description=__doc__)
    parser.add_argument("what", choices=("tune", "final", "report"))
    parser.add_argument("--dataset", default="cifar10", choices=list(LABELS))
    parser.add_argument("--part", default="all", choices=("all", "half"))
    named = "; ".join(ARMS).replace("%", "%%")  # names have commas in them
    parser.add_argument("--labels", nargs="+", help="all of the data set unless given")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["uniform"],
        choices=ARMS,
        metavar="NAME",
        help=f"some of: {named}",
    )
    parser.add_argument("--n-b", nargs="+", type=int, help="final: the tuned one unless given")
    parser.add_argument("--lr", nargs="+", type=float, help="final: the tuned one unless given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--il", default="inside", choices=("inside", "reused"))
    parser.add_argument("--budget", type=float, default=17.0, help="seconds of one run")
    parser.add_argument("--seconds", type=float, default=1e9, help="take no new run after so long")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--again", action="store_true", help="also what has a committed line; new ones go to --out"
    )
    parser.add_argument(
        "--visits", type=Path, help="directory for the losses of every visit, of arms with a plan"
    )
    parser.add_argument("--data", default=None, help="directory with the CIFAR files")
    a = parser.parse_args(words)
    a.labels = a.labels or list(LABELS[a.dataset])
    unknown = [name for name in a.labels if name not in LABELS[a.dataset]]
    if unknown:
        known = ", ".join(map(repr, LABELS[a.dataset]))
        parser.error(f"--labels {unknown[0]!r}: {a.dataset} has {known}")
    if a.again and a.out == RESULTS:
        parser.error("--again needs --out, a file for the lines of the runs made again")
    for name in ("budget", "side_by_side"):
        if not getattr(a, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(a, name):g}: give more than 0")
    return a


def cells_of(a: argparse.Namespace, lines: list[dict[str, Any]]) -> list[Cell]:
    """Seeds outermost: one of everything before a second of anything."""
    cells = []
    for seed, labels, arm in itertools.product(a.seeds, a.labels, a.arms):
        il = a.il if ARMS[arm].needs_il else "inside"  # who reads none has but one kind of run
        cell = Cell(labels, arm, 0, 0.0, seed, a.what, a.budget, il, a.dataset, a.part)
        cells += [replace(cell, n_b=n_b, lr=lr) for n_b, lr in _choices(a, cell, lines)]
    return cells


def _choices(a: argparse.Namespace, cell: Cell, lines: list[dict[str, Any]]) -> Iterator[Choice]:
    """Sizes and rates that were given; in a final run the others are those that were tuned."""
    if a.what == "tune" or (a.n_b and a.lr):
        yield from itertools.product(a.n_b or SIZES, a.lr or RATES)
        return
    for n_b in a.n_b or [None]:
        choice = choice_for(tuned(lines, n_b, a.lr), cell)
        if choice is None:
            at = f" at n_b {n_b}" if n_b else f" at rate {a.lr}" if a.lr else ""
            raise SystemExit(
                f"{cell.arm} was not tuned on {a.dataset}, {cell.labels}{at}, with this device, and "
                "neither was uniform: run `tune` first, or give --n-b and --lr."
            )
        yield choice


def parts(words: list[str]) -> list[list[str]]:
    """Words between `+`; what is to be done and with which data set is told once, in the first part."""
    found = [list(part) for plus, part in itertools.groupby(words, "+".__eq__) if not plus]
    first, *others = found or [[]]
    a = arguments(first)
    return [first, *([a.what, "--dataset", a.dataset, *part] for part in others)]


def main(words: list[str] | None = None) -> None:
    each = [arguments(part) for part in parts(sys.argv[1:] if words is None else words)]
    a = each[0]  # says where and how, for all
    if a.what == "report":
        from experiments.fair_clock.report import write

        print(write(a.out))
        return
    if len({one.dataset for one in each}) > 1:
        raise SystemExit("One call has one --dataset: make another call for the other.")
    with processes.alone(a.out):
        _race(a, each)


def _race(a: argparse.Namespace, each: list[argparse.Namespace]) -> None:
    from experiments.fair_clock.race import Race, done, run

    lines = records.of_this_device([RESULTS], a.out)
    have = done(records.read(a.out) if a.again else lines)
    every = dict.fromkeys(cell for one in each for cell in cells_of(one, lines))
    cells = [cell for cell in every if cell.key() not in have]
    print(f"{len(cells)} runs to do", flush=True)
    if cells:
        race = Race(a.dataset, a.data, visits=a.visits)
        race.measure_times(cells)
        try:
            run(race, cells, a.out, side_by_side=a.side_by_side, seconds=a.seconds)
        except RholossError as error:
            raise SystemExit(str(error)) from None  # where a run failed was told


if __name__ == "__main__":
    main()
