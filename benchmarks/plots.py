"""Pictures of the engine's figures: what a step costs, and what its time buys at equal steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]


def draw_steps(found: Rows, path: Path) -> Path:
    """A bar for each way to take a step, of its fastest layout: scoring, the rest, and the FLOP floor."""
    from matplotlib.figure import Figure

    fastest: dict[str, dict[str, Any]] = {}
    for row in found:
        name = row["row"].partition("; ")[0]
        if "eager" not in name and row["ms"] < fastest.get(name, row)["ms"] + 1e-9:
            fastest[name] = row
    names = sorted(fastest, key=lambda name: _size(name, fastest[name]["ms"]), reverse=True)
    figure = Figure(figsize=(9, 0.32 * len(names) + 1.2), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(names):
        row = fastest[name]
        scoring = row.get("scoring_ms") or 0.0
        colour = "C7" if name.startswith("uniform") else "C0"
        axis.barh(place, row["ms"], color=colour)
        axis.barh(place, scoring, left=row["ms"] - scoring, color="C1")
        axis.plot([row["floor_ms"]] * 2, [place - 0.4, place + 0.4], color="black")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlabel("ms; orange: scoring, where timed apart; black: FLOP floor", fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    return path


def _size(name: str, ms: float) -> tuple[int, int, float]:
    """Rows that train on as many stand together, uniform first."""
    words = name.replace(",", " ").split()
    candidates = 0 if words[0] == "uniform" else int(words[3])
    return int(words[1]), candidates, ms


def draw_agreement(runs: Rows, path: Path) -> Path:
    """Accuracy at equal steps over milliseconds a step, a point for each option; lowest to highest seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name in dict.fromkeys(row["option"] for row in runs):
        ours = [row for row in runs if row["option"] == name]
        ms, accuracies = ([row[field] for row in ours] for field in ("ms", "accuracy"))
        x, y = statistics.fmean(ms), statistics.fmean(accuracies)
        reach = [[y - min(accuracies)], [max(accuracies) - y]]
        axis.errorbar([x], [y], reach, fmt="o", label=name)
    axis.set(xlabel="ms a step", ylabel="test accuracy at equal steps, %")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return path
