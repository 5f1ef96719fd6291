"""The command that makes the runs of a table once more."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from experiments.fair_clock.arms import ARMS, LABELS, Cell

USUAL = Cell("", "", 0, 0.0, 0)


def command(lines: Iterable[Mapping[str, Any]]) -> str:
    """One call for all of these final runs of one data set: what they share is made once."""
    cells = sorted({Cell.of(line) for line in lines}, key=_place)
    groups: list[tuple[Cell, tuple[Any, ...]]] = [(cell, ()) for cell in cells]
    for field in ("seed", "arm", "labels"):  # runs that differ in nothing else go together
        alike: dict[tuple[Cell, tuple[Any, ...]], list[Any]] = {}
        for cell, found in groups:
            rest = replace(cell, **{field: getattr(USUAL, field)})
            alike.setdefault((rest, found), []).append(getattr(cell, field))
        groups = [(cell, (*found, tuple(values))) for (cell, found), values in alike.items()]
    words = ["python", "-m", "experiments.fair_clock", "final", "--again", "--out", "again.jsonl"]
    if cells[0].dataset != USUAL.dataset:
        words += ["--dataset", cells[0].dataset]
    parts = [shlex.join(_words(cell, *found)) for cell, found in groups]
    return f"{shlex.join(words)} {' + '.join(parts)}"


def _place(cell: Cell) -> tuple[int, int, int]:
    return list(ARMS).index(cell.arm), LABELS[cell.dataset].index(cell.labels), cell.seed


def _words(
    cell: Cell, seeds: tuple[int, ...], arms: Iterable[str], labels: Iterable[str]
) -> list[str]:
    words = ["--n-b", str(cell.n_b), "--lr", f"{cell.lr:g}"]
    words += ["--arms", *arms, "--labels", *labels, "--seeds", *map(str, seeds)]
    for option in ("part", "budget", "il"):
        value = getattr(cell, option)
        if value != getattr(USUAL, option):
            words += [f"--{option}", f"{value:g}" if option == "budget" else value]
    return words
