"""python -m experiments.fair_clock tune|final|report: see experiments/results/fair_clock/README.md.

A word `+` begins further runs of the same call, which share the data set and what was measured:
`final --arms uniform --seeds 3 4 + --arms "rho k=5" --labels clean`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import processes, records
from experiments.fair_clock.arms import ARMS, LABELS, Cell
from experiments.fair_clock.choose import Choice, choice_for, tuned

RESULTS = records.RESULTS / "fair_clock" / "runs.jsonl"
ALONE = "alone.pt"  # beside the claims
SIZES, RATES = [32, 128, 512], [1e-3, 3e-3, 6e-3]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tune", "final", "report"))
    parser.add_argument("--dataset", default="cifar10", choices=list(LABELS))
    parser.add_argument("--part", default="all", choices=("all", "half"))
    parser.add_argument("--labels", nargs="+", help="all of the data set unless given")
    parser.add_argument("--arms", nargs="+", default=["uniform"], choices=list(ARMS))
    parser.add_argument("--n-b", nargs="+", type=int, help="final: the tuned one unless given")
    parser.add_argument("--lr", nargs="+", type=float, help="final: the tuned one unless given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--il", default="inside", choices=("inside", "reused"))
    parser.add_argument("--budget", type=float, default=17.0, help="seconds of one run")
    parser.add_argument("--seconds", type=float, default=1e9, help="take no new run after so long")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the runs, once all is measured"
    )
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)  # of one of the processes
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data", default=None, help="directory with the CIFAR files")
    a = parser.parse_args(words)
    a.labels = a.labels or list(LABELS[a.dataset])
    unknown = [name for name in a.labels if name not in LABELS[a.dataset]]
    if unknown:
        known = ", ".join(map(repr, LABELS[a.dataset]))
        parser.error(f"--labels {unknown[0]!r}: {a.dataset} has {known}")
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
                f"{cell.arm} was not tuned on {a.dataset}, {cell.labels}{at}, and neither was uniform: "
                "run `tune` first, or give --n-b and --lr."
            )
        yield choice


def parts(words: list[str]) -> list[list[str]]:
    """Words between `+`; what is to be done and with which data set is told once, in the first part."""
    first, *others = [list(part) for plus, part in itertools.groupby(words, "+".__eq__) if not plus]
    a = arguments(first)
    return [first, *([a.what, "--dataset", a.dataset, *part] for part in others)]


def main(words: list[str] | None = None) -> None:
    started, words = time.perf_counter(), sys.argv[1:] if words is None else words
    each = [arguments(part) for part in parts(words)]
    a = each[0]
    if a.what == "report":
        from experiments.fair_clock.report import write

        print(write(a.out))
        return
    if len({one.dataset for one in each}) > 1:
        raise SystemExit("One call has one --dataset: make another call for the other.")
    from experiments.fair_clock.race import Race, done, fit_all, run

    paths = list(dict.fromkeys([RESULTS, a.out]))
    have, lines = done(paths), list(records.read(*paths))
    every = dict.fromkeys(cell for one in each for cell in cells_of(one, lines))
    cells = [cell for cell in every if cell.key() not in have]
    options = {"side_by_side": a.side_by_side, "seconds": a.seconds}
    if a.claims is not None:  # one of several processes: what is timed was timed before they began
        race = Race(a.dataset, a.data)
        race.load_alone(a.claims / ALONE)
        run(race, cells, a.out, claim=functools.partial(processes.claim, a.claims), **options)
        return
    print(f"{len(cells)} runs to do", flush=True)
    if not cells:
        return
    race = Race(a.dataset, a.data)
    race.measure_times(cells)
    if a.processes == 1:
        run(race, cells, a.out, **options)
        return
    fit_all(race, cells)
    with processes.claims() as folder:
        race.save_alone(folder / ALONE)
        left = a.seconds - (time.perf_counter() - started)
        shared = ["--claims", str(folder), "--seconds", str(left)]
        end = words.index("+") if "+" in words else len(words)  # the first part says how to run
        processes.share(
            a.processes, "experiments.fair_clock", [*words[:end], *shared, *words[end:]]
        )


if __name__ == "__main__":
    main()
