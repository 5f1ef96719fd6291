"""python -m experiments list | run --study NAME ... [--seeds 0 1] [--seconds S] | report [--html DIR]"""

from __future__ import annotations

import argparse
import functools
import math
import signal
import sys
from pathlib import Path

from experiments import processes, records
from experiments.bench.lines import tell
from rholoss.errors import RholossError

PRECISIONS = ("bf16", "fp32")


def main(words: list[str] | None = None) -> None:
    a = _parser().parse_args(words)
    a.words = sys.argv[1:] if words is None else words
    try:
        {"list": _list, "run": _run, "report": _report}[a.command](a)
    except RholossError as error:
        raise SystemExit(str(error)) from None  # where a run failed was told


def _parser() -> argparse.ArgumentParser:
    from experiments.studies import STUDIES

    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument(
        "command",
        choices=("list", "run", "report"),
        help="list: studies, their tier (1 is worth running first) and how many runs are there",
    )
    parser.add_argument(
        "--study", nargs="+", choices=list(STUDIES), metavar="NAME", help="see list"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="by default those of the study")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="some cells; of several values for a field, any",
    )
    parser.add_argument("--epochs", type=_number, help="shorter runs, which count as other runs")
    parser.add_argument(
        "--again", action="store_true", help="also what has a committed line; new ones go to --out"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="no new run after so long")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="no run that would not be through by then"
    )
    parser.add_argument(
        "--side-by-side",
        type=_number,
        help="runs at a time; by default 6, and one in each of several processes",
    )
    parser.add_argument(
        "--processes",
        type=_number,
        default=1,
        help="that share the runs, each with so many at a time",
    )
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)  # of one of the processes
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="by default bf16 on a GPU, fp32 elsewhere"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="models that train for long; by default on a GPU alone",
    )
    parser.add_argument("--data", default=None, help="data directory; else RHOLOSS_DATA")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="DIR",
        help="report: also one page to explore, in this directory",
    )
    parser.add_argument("--out", type=Path, default=records.RESULTS, help="directory of results")
    return parser


def _number(word: str) -> int:
    if not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word!r}: give a whole number of at least 1")
    return int(word)


def _chosen(a: argparse.Namespace) -> list:
    from experiments.studies import STUDIES

    return [STUDIES[name] for name in a.study or STUDIES]


def _cells(a: argparse.Namespace) -> list:
    """(study, cell) of the chosen studies: the first seed of all, then the second, ..."""
    from experiments.bench.cell import only, shortened

    every = [(study.name, cell) for study in _chosen(a) for cell in study.cells(a.seeds)]
    found = [(name, shortened(cell, a.epochs)) for name, cell in every if only(cell, a.only)]
    if not found:
        there = {
            name: sorted({str(getattr(cell, name)) for _, cell in every})
            for name in (condition.partition("=")[0] for condition in a.only)
        }
        told = "; ".join(
            f"{name}: {', '.join(map(repr, values))}" for name, values in there.items()
        )
        raise SystemExit(f"No run of {', '.join(a.study)} has all of {a.only}; there are {told}.")
    seeds = a.seeds or sorted({cell.seed for _, cell in found})
    return sorted(dict.fromkeys(found), key=lambda entry: seeds.index(entry[1].seed))


def _list(a: argparse.Namespace) -> None:
    from experiments.bench.run import done
    from experiments.studies import COMMANDS

    have = done(a.out)
    for study in _chosen(a):
        cells = list(study.cells(a.seeds))
        ran = sum(cell.key() in have for cell in cells)
        tell(f"{study.name:24} tier {study.tier}  {ran:3} of {len(cells):3} runs  {study.title}")
    for name, (command, title) in () if a.study else COMMANDS.items():
        tell(f"{name:24} {title}: `{command}`")


def _run(a: argparse.Namespace) -> None:
    if not a.study:
        raise SystemExit(
            "`run` needs --study and at least one name; see `python -m experiments list`."
        )
    if a.again and a.out == records.RESULTS:
        raise SystemExit("`--again` needs --out, a directory for the lines of the runs made again.")
    if a.processes > 1 and a.claims is None:
        with processes.claims() as claims:
            processes.share(a.processes, "experiments", [*a.words, "--claims", str(claims)])
        return
    from experiments.bench.run import Bench, missing, run

    bench, cells = Bench(a.data, precision=a.precision, compile=a.compile), _cells(a)
    # Processes fill the device by one run each; and the fewer are under way, the fewer are put aside.
    side_by_side = a.side_by_side or (6 if a.claims is None else 1)
    # What is committed is not run again, wherever new lines go, unless that is asked for.
    known = [] if a.again else [records.RESULTS]
    if a.claims is None:
        todo = len(missing(cells, a.out, *known))
        also = "" if todo else "; `--again --out DIR` makes them once more, in another directory"
        tell(f"{todo} runs to do, {len(cells) - todo} have their line{also}")
    more = {"seconds": a.seconds, "limit": a.limit, "side_by_side": side_by_side, "known": known}
    if a.claims is not None:
        from experiments.bench.preparation import Preparation  # not on Windows: it locks files

        prepared = Preparation(bench, [c for _, c in missing(cells, a.out, *known)], a.claims)
        claim = functools.partial(processes.claim, a.claims)
        more |= {"claim": claim, "ready": prepared, "progress": False}
    try:
        run(bench, cells, a.out, **more)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None  # what becomes of the runs was told


def _report(a: argparse.Namespace) -> None:
    from experiments.bench.report import write, write_claims
    from experiments.studies import STUDIES
    from experiments.studies.claims import CLAIMS
    from experiments.studies.digit_claims import DIGIT_CLAIMS

    for study in _chosen(a):
        tell(str(write(study, a.out)))
    claims = [*CLAIMS, *DIGIT_CLAIMS]
    tell(str(write_claims(claims, STUDIES, a.out)))
    if a.html:
        from experiments.bench.html import write_html

        tell(str(write_html(STUDIES, claims, a.out, a.html)))


if __name__ == "__main__":
    main()
