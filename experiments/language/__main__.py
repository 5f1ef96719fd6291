"""python -m experiments.language paper|fair [--tasks cola sst2 banking77] [--seeds 0 1 2 3] ... | report

`--data` is the folder that `tools/pack_language.py` makes: the texts, and a pretrained encoder in `model`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments import processes, records
from experiments.language.cells import (
    FAIR_METHODS,
    IL_EPOCHS,
    PAPER_METHODS,
    Cell,
    cell_of,
    fair,
    known_tasks,
    paper,
)

METHODS = tuple(dict.fromkeys((*PAPER_METHODS, *FAIR_METHODS)))
RESULTS = records.RESULTS / "language" / "runs.jsonl"
PACE = "pace.json"  # where the processes find the times of steps


def main(words: list[str] | None = None) -> None:
    a = _parser().parse_args(words)
    if a.again and a.out == RESULTS:
        raise SystemExit("--again needs --out, a file for the lines of the runs made again.")
    if a.budget <= 0:  # 0 stands for the paper's protocol
        raise SystemExit(f"--budget {a.budget:g}: give more than 0 seconds.")
    if a.command == "report":
        from experiments.language.report import write

        print(write(a.out))
        return
    # The processes of a command add to the file side by side.
    with processes.alone(a.out) if a.claims is None else contextlib.nullcontext():
        _make(a, sys.argv[1:] if words is None else words)


def _make(a: argparse.Namespace, words: list[str]) -> None:
    cells = list(
        paper(a.tasks, a.seeds, a.epochs, a.il_epochs)
        if a.command == "paper"
        else fair(a.tasks, a.seeds, a.budget)
    )
    bench = _bench(a)
    cells = [
        replace(cell, encoder=bench.encoder)
        for cell in cells
        if not a.methods or cell.method in a.methods
    ]
    fair_runs = a.command == "fair"  # those of the paper's protocol are the same on any device
    lines = records.of_this_device(
        [] if a.again else [RESULTS], a.out, lambda line: fair_runs and cell_of(line).budget > 0
    )
    have = {cell_of(line).key() for line in lines}
    cells = [cell for cell in cells if cell.key() not in have]
    if a.claims is None:
        print(f"{len(cells)} runs to do", flush=True)
    if a.claims is None and a.side_by_side > 1:
        _side_by_side(a, bench, cells, words)
    else:
        _run(a, bench, cells)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.language", description=__doc__)
    parser.add_argument("command", choices=("paper", "fair", "report"))
    parser.add_argument("--tasks", nargs="+", default=known_tasks(), choices=known_tasks())
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--methods", nargs="+", default=[], choices=METHODS, help="only these")
    parser.add_argument("--epochs", type=int, default=0, help="shorter runs, which are other runs")
    parser.add_argument(
        "--il-epochs", type=int, default=IL_EPOCHS, help="at most; paper only; fewer: other runs"
    )
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of a fair run")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--side-by-side", type=int, default=1, help="processes")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)  # of one of the processes
    parser.add_argument("--data", type=Path, default=Path("data/language"))
    parser.add_argument(
        "--store", type=Path, default=Path("data/language-il"), help="of irreducible losses"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--again", action="store_true", help="also what has a committed line; new ones go to --out"
    )
    return parser


def _bench(a: argparse.Namespace) -> Any:
    if not (a.data / "model").is_dir():  # else it would be looked for on the hub
        raise SystemExit(
            f"--data {a.data} has no folder `model` with a pretrained encoder; "
            "`python tools/pack_language.py --data DIR` makes it."
        )
    import torch
    from transformers.utils import logging

    from experiments.language.train import Bench

    logging.set_verbosity_error()  # a new head is no news
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Bench(a.data / "model", a.data, a.store, device, a.il_epochs)


def _run(a: argparse.Namespace, bench: Any, cells: list[Cell]) -> None:
    from experiments.language.fair import Fair
    from experiments.language.train import run_cell

    started, failed = time.perf_counter(), 0
    fair_runs = Fair(bench)
    if a.claims is not None and a.command == "fair":
        fair_runs.pace = json.loads((a.claims / PACE).read_text())
    for cell in cells:
        if a.claims is not None and not processes.claim(a.claims, cell.key()):
            continue
        if time.perf_counter() - started > a.seconds:
            print("out of time", flush=True)
            break
        try:
            result = fair_runs.run(cell) if cell.budget else run_cell(cell, bench)
        except Exception:  # the other runs still count
            traceback.print_exc()
            failed += 1
            continue
        record = {"cell": asdict(cell), **result, **_about()}
        records.append(a.out, record)
        last = record["curve"][-1] if record["curve"] else "no time left"
        print(f"{cell} {last} {record.get('seconds', 0):.1f} s", flush=True)
    if failed:
        raise SystemExit(
            f"{failed} run(s) failed and have no line; the same command runs them again."
        )


def _about() -> dict[str, Any]:
    about = records.about("experiments.language")
    return {**about, "command": processes.unshared(about["command"])}


def _side_by_side(a: argparse.Namespace, bench: Any, cells: list[Cell], words: list[str]) -> None:
    from experiments.language.fair import Fair
    from experiments.language.tasks import TASKS

    started, fair_runs = time.perf_counter(), Fair(bench)
    # What is timed is timed alone. Of the paper's runs, what they share is fitted once.
    failed = []
    for cell in cells:
        try:
            if cell.budget:
                fair_runs.prepare(cell)
            elif cell.needs_il:
                bench.fitted(TASKS[cell.task], cell.irreducible)
        except Exception:  # the other runs still count
            traceback.print_exc()
            failed.append(cell)
    left = max(0.0, a.seconds - (time.perf_counter() - started))
    with processes.claims() as claims:
        (claims / PACE).write_text(json.dumps(fair_runs.pace))
        for cell in failed:  # nobody is to time it beside others
            processes.claim(claims, cell.key())
        # The last of two options that are the same counts.
        more = ["--claims", str(claims), "--seconds", f"{left:.0f}"]
        processes.share(a.side_by_side, "experiments.language", [*words, *more])
    if failed:
        raise SystemExit(f"{len(failed)} run(s) could not be prepared and have no line.")


if __name__ == "__main__":
    main()
