"""What was tuned: for each arm and label set the batch size and rate that did best on the 5,000."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.fair_clock.arms import Cell

Choice = tuple[int, float]  # n_b, lr


def tuned(
    lines: Iterable[Mapping[str, Any]], n_b: int | None = None
) -> dict[tuple[str, str, str], Choice]:
    """By (data set, labels, arm): the best n_b and rate, by the mean over seeds; `n_b` fixes the first."""
    found: dict[tuple[str, str, str], dict[Choice, list[float]]] = {}
    for line in lines:
        cell = Cell.of(line)
        if cell.split != "tune" or line["error"] or n_b not in (None, cell.n_b):
            continue
        key = (cell.dataset, cell.labels, cell.arm)
        found.setdefault(key, {}).setdefault((cell.n_b, cell.lr), []).append(line["accuracy"])

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        key: max(choices, key=lambda choice: mean(choices[choice]))
        for key, choices in found.items()
    }


def choice_for(
    best: Mapping[tuple[str, str, str], Choice], dataset: str, labels: str, arm: str
) -> Choice | None:
    """The arm's own choice; else that of uniform, which every arm is a change of; else None."""
    return best.get((dataset, labels, arm)) or best.get((dataset, labels, "uniform"))
