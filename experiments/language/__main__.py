"""python -m experiments.language paper|fair [--tasks cola sst2 banking77] [--seeds 0 1 2 3] ... | report

`--data` is the folder that `tools/pack_language.py` makes: the texts, and a pretrained encoder in `model`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments import records
from experiments.language.cells import Cell, cell_of, fair, known_tasks, paper

RESULTS = records.RESULTS / "language" / "runs.jsonl"


def main(words: list[str] | None = None) -> None:
    a = _parser().parse_args(words)
    if a.command == "report":
        from experiments.language.report import write

        print(write(a.out.parent))
        return
    cells = list(
        paper(a.tasks, a.seeds, a.epochs)
        if a.command == "paper"
        else fair(a.tasks, a.seeds, a.budget)
    )
    cells = [cell for cell in cells if not a.methods or cell.method in a.methods]
    if a.part is not None:  # before looking at what is done, which the others add to meanwhile
        cells = cells[a.part :: a.side_by_side]
    have = {cell_of(record).key() for record in records.read(RESULTS, a.out)}
    cells = [cell for cell in cells if cell.key() not in have]
    print(f"{len(cells)} runs to do", flush=True)
    if a.part is None and a.side_by_side > 1:
        _side_by_side(a, cells, words if words is not None else sys.argv[1:])
    else:
        _run(a, cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.language", description=__doc__)
    parser.add_argument("command", choices=("paper", "fair", "report"))
    parser.add_argument("--tasks", nargs="+", default=known_tasks(), choices=known_tasks())
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=[], help="only these")
    parser.add_argument("--epochs", type=int, default=0, help="shorter runs, which are other runs")
    parser.add_argument("--il-epochs", type=int, default=10, help="at most")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of a fair run")
    parser.add_argument("--seconds", type=float, default=1e9, help="take no new run after so long")
    parser.add_argument("--side-by-side", type=int, default=1, help="processes; 1 for fair runs")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, default=Path("data/language"))
    parser.add_argument(
        "--store", type=Path, default=Path("data/language-il"), help="of IL models"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def _bench(a: argparse.Namespace) -> Any:
    import torch
    from transformers.utils import logging

    from experiments.language.train import Bench

    logging.set_verbosity_error()  # a new head is no news
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Bench(a.data / "model", a.data, a.store, device, a.il_epochs)


def _run(a: argparse.Namespace, cells: list[Cell]) -> None:
    from dataclasses import asdict

    from experiments.language.train import run_cell

    bench, started = _bench(a), time.perf_counter()
    for cell in cells:
        if time.perf_counter() - started > a.seconds:
            print("out of time", flush=True)
            return
        record = {
            "cell": asdict(cell),
            **run_cell(cell, bench),
            **records.about("experiments.language"),
        }
        records.append(a.out, record)
        last = record["curve"][-1] if record["curve"] else "no time left"
        print(f"{cell} {last} {record.get('seconds', 0):.1f} s", flush=True)


def _side_by_side(a: argparse.Namespace, cells: list[Cell], words: list[str]) -> None:
    from experiments.language.tasks import TASKS

    bench = _bench(a)
    for task, size in sorted({(c.task, c.irreducible) for c in cells if c.needs_il}):
        bench.irreducible(TASKS[task], size)  # once, before the others look for them
    command = [sys.executable, "-m", "experiments.language", *words]
    parts = [subprocess.Popen([*command, "--part", str(part)]) for part in range(a.side_by_side)]
    failed = [part.args for part in parts if part.wait()]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(parts)} processes failed; run the command again.")


if __name__ == "__main__":
    main()
