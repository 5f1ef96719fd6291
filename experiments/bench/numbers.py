"""What the lines of runs say: pure functions from lines to numbers, and numbers to text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import records
from experiments.bench.cell import Cell, Group, Study
from experiments.bench.irreducible import fitted

Line = Mapping[str, Any]
LAST = 5  # evaluations of which "final" is the mean: single ones jump at a constant learning rate
FIG2_EPOCHS = 100


@dataclass(frozen=True)
class Results:
    """All lines, found by their cell, or else by the cell at another length."""

    exact: Mapping[Cell, Line]
    by_rest: Mapping[Cell, Line]  # with epochs=0: the longest run of the kind
    seeds: Mapping[Cell, set[int]]  # with epochs=0 and seed=0: those that were run

    @classmethod
    def read(cls, out: Path) -> Results:
        """Lines of all studies below a directory; of two lines of a cell the later counts."""
        exact: dict[Cell, Line] = {}
        by_rest: dict[Cell, Line] = {}
        seeds: dict[Cell, set[int]] = {}
        for line in records.read(*sorted(out.glob("*/runs.jsonl"))):
            if "steps_per_epoch" not in line:
                continue  # of another bench
            cell = Cell.of(line)
            exact[cell] = line
            rest = replace(cell, epochs=0)
            seeds.setdefault(replace(rest, seed=0), set()).add(cell.seed)
            if rest not in by_rest or by_rest[rest]["epochs"] <= line["epochs"]:
                by_rest[rest] = line
        return cls(exact, by_rest, seeds)

    def get(self, cell: Cell) -> Line | None:
        """The line of a cell; a run of another length where there is none of its own."""
        return self.exact.get(cell) or self.by_rest.get(replace(cell, epochs=0))

    def of(self, arm: Cell) -> list[Line]:
        """Lines of an arm, by seed, of all seeds that were run: a study may have more than it asks for.

        All of one length: the arm's own, or else the longest. A short run beside full ones would be taken
        for a poor one.
        """
        seeds = self.seeds.get(replace(arm, epochs=0, seed=0), ())
        found = [self.get(replace(arm, seed=seed)) for seed in sorted(seeds)]
        lines = [line for line in found if line is not None]
        lengths = {line["epochs"] for line in lines}
        epochs = arm.epochs if arm.epochs in lengths else max(lengths, default=0)
        return [line for line in lines if line["epochs"] == epochs]

    def of_study(self, study: Study) -> list[Line]:
        """All lines that its pages are made from."""
        arms = dict.fromkeys(arm for group in study.groups for arm in group.arms.values())
        return [line for arm in arms for line in self.of(arm)]


def steps_to(line: Line, accuracy: float) -> int | None:
    """Steps at the first evaluation that reaches the accuracy (%); None if none does."""
    return next((step for step, value in line["eval"] if value >= accuracy), None)


def epochs_to(line: Line, accuracy: float) -> float | None:
    """The same in epochs, which are passes of the candidates."""
    steps = steps_to(line, accuracy)
    return None if steps is None else steps / line["steps_per_epoch"]


def final(line: Line) -> float:
    """Mean of the last five evaluations; NaN where a run broke off before any."""
    return mean([value for _, value in line["eval"][-LAST:]])


def best(line: Line) -> float:
    """The highest evaluation, chosen by looking at the test set."""
    return max((value for _, value in line["eval"]), default=float("nan"))


def speedup(rho: Line, uniform: Line, epochs: int = FIG2_EPOCHS) -> float | None:
    """Figure 2: epochs / the epoch at which RHO-LOSS passes uniform's best within `epochs`; 0 if never.

    None where the runs are shorter than that; one that broke off is over, and has what it reached.
    """
    bounds = [(run, epochs * run["steps_per_epoch"]) for run in (rho, uniform)]
    there = [value for step, value in uniform["eval"] if step <= bounds[1][1]]
    if not there or any(run["steps"] < bound and not run["error"] for run, bound in bounds):
        return None
    reached = epochs_to(rho, max(there))
    return 0.0 if reached is None else epochs / reached


def share(line: Line, name: str) -> float | None:
    """Mean over all epochs of a share of the picks, in %."""
    values = line["shares"].get(name)
    return 100 * mean(values) if values else None


def weakest_final(lines: Sequence[Line]) -> float:
    """The lowest final accuracy; where it is passed, methods can no longer be compared at one accuracy."""
    return min(final(line) for line in lines)


def share_below(line: Line, name: str, accuracy: float) -> float | None:
    """Mean share over the epochs that end below a test accuracy, in %; None if there are none."""
    ends = [reached for step, reached in line["eval"] if step % line["steps_per_epoch"] == 0]
    pairs = zip(line["shares"].get(name, []), ends, strict=False)
    values = [value for value, reached in pairs if reached < accuracy]
    return 100 * mean(values) if values else None


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.fmean(values) if values else float("nan")


def spread(values: Sequence[float | None], digits: int = 1, none: str = "NR") -> str:
    """'39.0 (37.0-41.0)': mean, lowest and highest; `none` where no run has the number: not reached."""
    there = [value for value in values if value is not None]
    if not values:
        return "not run"
    if not there:
        return none
    text = f"{mean(there):.{digits}f}"
    if len(there) > 1:
        text += f" ({min(there):.{digits}f}-{max(there):.{digits}f})"
    return text if len(there) == len(values) else f"{text}, {len(there)} of {len(values)} seeds"


def over(
    lines: Sequence[Line],
    number: Callable[[Line], float | None],
    digits: int = 1,
    none: str = "NR",
) -> str:
    """A number of each run, as mean and spread."""
    return spread([number(line) for line in lines], digits, none)


def several_fits(group: Group, results: Results) -> list[str]:
    """Arms with irreducible losses of one model that was fitted more than once, in words.

    Between runs of an arm or between arms: then they do not differ in their method alone.
    """
    models: dict[tuple[str, ...], dict[str, dict[Any, Line]]] = {}
    for name, arm in group.arms.items():
        found = [line.get("il_fit") for line in results.of(arm)]
        fits = {(*fit["accuracy"], *fit["epochs"]): fit for fit in found if fit}
        if fits:
            models.setdefault((arm.dataset, arm.part, *fitted(arm.il)), {})[name] = fits
    told = []
    for arms in models.values():
        if len({key for fits in arms.values() for key in fits}) > 1:
            for name, fits in arms.items():
                means = sorted(f"{mean(fit['accuracy']):.2f}" for fit in fits.values())
                told.append(f"{name} ({' and '.join(means)} %)")
    return told


def asked_for(lines: Sequence[Line], seeds: int) -> tuple[int, int]:
    """How many lines are of seeds that the study asks for (0, 1, ...), and how many of further ones."""
    own = sum(line["seed"] in range(seeds) for line in lines)
    return own, len(lines) - own


def of_seeds(own: int, further: int, seeds: int) -> str:
    """The same in words, where some are missing."""
    return f"{own} of {seeds} seeds" + (f" and {further} further" if further else "")


def missing(group: Group, results: Results, seeds: int) -> list[str]:
    """Arms that were not run with all seeds, or at another length, in words."""
    told = []
    for name, arm in group.arms.items():
        lines = results.of(arm)
        own, further = asked_for(lines, seeds)
        if own < seeds:
            told.append(f"{name}: {of_seeds(own, further, seeds)}")
        others = sorted({line["epochs"] for line in lines} - {arm.epochs})
        if others:
            lengths = ", ".join(map(str, others))
            told.append(f"{name}: at {lengths} epochs in place of {arm.epochs}")
        told += [f"{name}, seed {line['seed']}: {line['error']}" for line in lines if line["error"]]
    return told
