"""What was tuned: for each arm and label set the batch size and rate that did best on the 5,000."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from experiments.fair_clock.arms import ARMS, LABELS, Cell

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
    found = _means(lines, n_b, rates)
    return {key: max(choices, key=lambda one: choices[one]) for key, choices in found.items()}


def _means(
    lines: Iterable[Mapping[str, Any]], n_b: int | None, rates: Sequence[float] | None
) -> dict[Any, dict[Choice, float]]:
    """Mean accuracies of the tuning runs that are asked for, by race, labels and arm.

    Runs that diverged are included, or a rate at which most seeds fail could win by the one that did not.
    """
    found: dict[Any, dict[Choice, list[float]]] = {}
    for line in lines:
        cell = Cell.of(line)
        unasked = n_b not in (None, cell.n_b) or (rates is not None and cell.lr not in rates)
        if cell.split != "tune" or cell.il != "inside" or unasked:
            continue
        key = (cell.race, cell.labels, cell.arm)
        found.setdefault(key, {}).setdefault((cell.n_b, cell.lr), []).append(line["accuracy"])
    return {
        key: {choice: sum(values) / len(values) for choice, values in choices.items()}
        for key, choices in found.items()
    }


def tuned_best(
    lines: Iterable[Mapping[str, Any]], among: Container[str] = ARMS, by_hand: bool = False
) -> tuple[str, float] | None:
    """The RHO-type arm of the main race that tuning puts first, with its mean over the label sets.

    Only of arms that were tuned on every label set; None if there are none. Arms whose switch is fixed by
    hand need a user who knows the data, so they are passed over; with `by_hand` only they are considered.
    """
    race, means = Cell("", "", 0, 0.0, 0).race, _means(lines, None, None)
    scores = {
        name: [max(means[race, labels, name].values()) for labels in LABELS["cifar10"]]
        for name, arm in ARMS.items()
        if name in among
        and arm.rho_type
        and arm.by_hand == by_hand
        and all((race, labels, name) in means for labels in LABELS["cifar10"])
    }
    if not scores:
        return None
    name = max(scores, key=lambda each: sum(scores[each]))
    return name, sum(scores[name]) / len(scores[name])


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
