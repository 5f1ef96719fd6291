"""python -m experiments.fair_clock tune|final|report: see experiments/results/fair_clock/README.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments import records
from experiments.fair_clock.arms import ARMS, Cell
from experiments.fair_clock.choose import choice_for, tuned

RESULTS = records.RESULTS / "fair_clock" / "runs.jsonl"
RATES = [1e-3, 3e-3, 6e-3]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("tune", "final", "report"))
    parser.add_argument("--dataset", default="cifar10", choices=("cifar10", "cifar100"))
    parser.add_argument("--part", default="all", choices=("all", "half"))
    parser.add_argument("--labels", nargs="+", default=["clean", "noise 10 %", "worse"])
    parser.add_argument("--arms", nargs="+", default=["uniform"], choices=list(ARMS))
    parser.add_argument("--n-b", nargs="+", type=int, help="final: the tuned one unless given")
    parser.add_argument("--lr", nargs="+", type=float, help="final: the tuned one unless given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--il", default="inside", choices=("inside", "reused"))
    parser.add_argument("--budget", type=float, default=17.0, help="seconds of one run")
    parser.add_argument("--seconds", type=float, default=1e9, help="take no new run after so long")
    parser.add_argument("--side-by-side", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data", default=None, help="directory with the CIFAR files")
    return parser.parse_args()


def cells_of(a: argparse.Namespace) -> list[Cell]:
    """Seeds outermost: one of everything before a second of anything."""
    fixed = a.n_b[0] if a.n_b and len(a.n_b) == 1 else None
    best = tuned(records.read(RESULTS, a.out), n_b=fixed)
    cells = []
    for seed in a.seeds:
        for labels in a.labels:
            for arm in a.arms:
                sizes, rates = a.n_b or [32, 128, 512], a.lr or RATES
                if a.what == "final" and not (a.n_b and a.lr):
                    choice = choice_for(best, a.dataset, labels, arm)
                    if choice is None:
                        raise SystemExit(
                            f"{arm} was not tuned on {a.dataset}, {labels}, and neither was uniform: run "
                            "`tune` first, or give --n-b and --lr."
                        )
                    sizes, rates = [choice[0]], [choice[1]]
                cells += [
                    Cell(labels, arm, n_b, lr, seed, a.what, a.budget, a.il, a.dataset, a.part)
                    for n_b in sizes
                    for lr in rates
                ]
    return cells


def main() -> None:
    a = arguments()
    if a.what == "report":
        from experiments.fair_clock.report import write

        print(write(a.out))
        return
    from experiments.fair_clock.race import Race, done, run

    have = done([RESULTS, a.out])
    cells = [cell for cell in cells_of(a) if cell.key() not in have]
    print(f"{len(cells)} runs to do", flush=True)
    if cells:
        race = Race(a.dataset, a.data)
        race.measure_times(cells)
        run(race, cells, a.out, side_by_side=a.side_by_side, seconds=a.seconds)


if __name__ == "__main__":
    main()
