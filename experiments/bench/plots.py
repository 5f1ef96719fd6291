"""Plots of a group of arms over epochs: mean over seeds, lowest to highest shaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.numbers import Line, mean, steps_to
from experiments.records import replacing

LOWEST_REACHED = 50  # %, where the plot of steps to each accuracy begins
Curve = Callable[[Line], list[tuple[float, float]]]  # points (epoch, value)


def accuracy(line: Line) -> list[tuple[float, float]]:
    return [(step / line["steps_per_epoch"], value) for step, value in line["eval"]]


def il_accuracy(line: Line) -> list[tuple[float, float]]:
    return [(step / line["steps_per_epoch"], value) for step, value in line["il_eval"]]


def share(name: str) -> Curve:
    def points(line: Line) -> list[tuple[float, float]]:
        return [(epoch, 100 * x) for epoch, x in enumerate(line["shares"].get(name, []), 1)]

    return points


def reached(line: Line) -> list[tuple[float, float]]:
    """Steps to each accuracy, in halves of a percent, as far as the run gets."""
    grid = [half / 2 for half in range(2 * LOWEST_REACHED, 200)]
    found = [(target, steps_to(line, target)) for target in grid]
    return [(target, float(steps)) for target, steps in found if steps is not None]


def over_steps(curve: Curve) -> Curve:
    """The same curve over thousands of steps, for arms whose epochs differ."""

    def points(line: Line) -> list[tuple[float, float]]:
        return [(x * line["steps_per_epoch"] / 1000, y) for x, y in curve(line)]

    return points


def draw(
    path: Path, arms: Mapping[str, Sequence[Line]], curve: Curve, ylabel: str, xlabel: str = "epoch"
) -> bool:
    """One PNG; False if no arm has a point."""
    curves = with_points(arms, curve)
    if not curves:
        return False
    figure, axes = _figure()
    for number, name in enumerate(arms):  # an arm has the same colour in every plot of its group
        if name not in curves:
            continue
        xs, middle, low, high = band(curves[name])
        axes.plot(xs, middle, label=name, linewidth=1.2, color=f"C{number % 10}")
        if len(curves[name]) > 1:
            axes.fill_between(xs, low, high, alpha=0.15, color=f"C{number % 10}", linewidth=0)
    if "accuracy" in ylabel:
        axes.set_ylim(*heights(curves.values()))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # where no curve can be
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})
    return True


def heights(arms: Iterable[Sequence[Sequence[tuple[float, float]]]]) -> tuple[float, float]:
    """Lowest and highest value after a tenth of the run, and a little room: not the steep start."""
    points = [point for curves in arms for curve in curves for point in curve]
    start = 0.1 * max(x for x, _ in points)
    later = [y for x, y in points if x >= start]
    return min(later) - 1, max(later) + 1


def with_points(
    arms: Mapping[str, Sequence[Line]], curve: Curve
) -> dict[str, list[list[tuple[float, float]]]]:
    """The curve of each run by arm, of those that have a point."""
    curves = {name: [c for line in lines if (c := curve(line))] for name, lines in arms.items()}
    return {name: found for name, found in curves.items() if found}


def band(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Where points are, their mean, lowest and highest, as far as the shortest run goes."""
    columns = list(zip(*curves, strict=False))
    values = [[y for _, y in column] for column in columns]
    xs = [column[0][0] for column in columns]
    return xs, [mean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "The plots need matplotlib: pip install matplotlib, or 'rholoss[dev]'."
        ) from error
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    return figure, figure.subplots()
