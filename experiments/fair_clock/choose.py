"""What was tuned: for each arm and label set the batch size and rate that did best on the 5,000."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.fair_clock.arms import Cell

Choice = tuple[int, float]  # n_b, lr
# By (data set, part, budget), labels and arm: choices are not carried from one race to another.
Choices = dict[tuple[tuple[str, str, float], str, str], Choice]


def tuned(
    lines: Iterable[Mapping[str, Any]],
    n_b: int | None = None,
    rates: Sequence[float] | None = None,
) -> Choices:
    """The best n_b and rate by the mean over seeds, the irreducible losses paid for.

    `n_b` fixes the first, `rates` names those that may be chosen.
    """
    found: dict[Any, dict[Choice, list[float]]] = {}
    for line in lines:
        cell = Cell.of(line)
        unasked = n_b not in (None, cell.n_b) or (rates is not None and cell.lr not in rates)
        if cell.split != "tune" or cell.il != "inside" or line["error"] or unasked:
            continue
        key = (cell.race, cell.labels, cell.arm)
        found.setdefault(key, {}).setdefault((cell.n_b, cell.lr), []).append(line["accuracy"])

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        key: max(choices, key=lambda choice: mean(choices[choice]))
        for key, choices in found.items()
    }


def choice_for(best: Choices, cell: Cell) -> Choice | None:
    """The arm's own choice in this race, else that of uniform, which every arm is a change of.

    Where neither was tuned in it, those of the race over all points in 17 s; else None.
    """
    usual = Cell("", "", 0, 0.0, 0, dataset=cell.dataset).race
    for race in (cell.race, usual):
        for arm in (cell.arm, "uniform"):
            if (race, cell.labels, arm) in best:
                return best[race, cell.labels, arm]
    return None
