"""python -m experiments.fair_clock tune|final [--out FILE] [--seconds S] [--budget 17] ..."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.fair_clock.arms import ARMS, Cell

RESULTS = Path(__file__).parent.parent / "results" / "fair_clock" / "runs.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("split", choices=("tune", "final"))
    parser.add_argument("--labels", nargs="+", default=["clean", "noise 10 %", "worse"])
    parser.add_argument("--arms", nargs="+", default=["uniform"], choices=list(ARMS))
    parser.add_argument("--n-b", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--il", default="inside", choices=("inside", "reused"))
    parser.add_argument(
        "--budget", type=float, default=17.0, help="seconds of wall clock of one run"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="take no new run after so long")
    parser.add_argument("--side-by-side", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--data", default=None, help="directory with cifar-10-batches-bin")
    a = parser.parse_args()

    from experiments.fair_clock.race import Race, done, run

    have = done([RESULTS, a.out])
    cells = [
        Cell(labels, arm, n_b, lr, seed, a.split, a.budget, a.il)
        for arm in a.arms
        for labels in a.labels
        for n_b in a.n_b
        for lr in a.lr
        for seed in a.seeds
    ]
    cells = [cell for cell in cells if cell.key() not in have]
    print(f"{len(cells)} runs to do", flush=True)
    race = Race(a.data)
    race.measure_times(cells)
    run(race, cells, a.out, side_by_side=a.side_by_side, seconds=a.seconds)


if __name__ == "__main__":
    main()
