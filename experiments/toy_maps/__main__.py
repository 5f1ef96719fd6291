"""python -m experiments.toy_maps [--seeds 0 1 2 3 4]: about ten seconds a seed; needs matplotlib."""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.toy_maps", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=None, help="folder of lines, picture and page")
    a = parser.parse_args()

    from experiments import records
    from experiments.toy_maps import page
    from experiments.toy_maps.draw import draw
    from experiments.toy_maps.run import run_all
    from rholoss.progress import Bar

    folder = a.out or page.FOLDER
    with Bar(len(a.seeds), "toy maps") as bar:
        for seed in a.seeds:
            started = time.perf_counter()
            train, runs = run_all(seed)
            results = {
                method: {
                    "accuracy": [round(value, 4) for value in run.accuracy],
                    "shares": [[round(s, 4) for s in phase] for phase in run.shares(train)],
                }
                for method, run in runs.items()
            }
            line = {"seed": seed, "runs": results, "seconds": time.perf_counter() - started}
            # All of it runs on the CPU, whatever else the machine has.
            about = {**records.about("experiments.toy_maps"), "device": "cpu"}
            records.append(folder / "runs.jsonl", line | about)
            if seed == a.seeds[0]:
                draw(train, runs, folder / "maps.png")
            bar.advance()
    page.write(folder, pictured=a.seeds[0])


if __name__ == "__main__":
    main()
