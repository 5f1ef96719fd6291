"""What of the targets of the step is not reached: the best number, what was tried, what may be next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.options import in_words

Rows = Sequence[dict[str, Any]]
Ratio = Callable[[Rows, str], float]  # what a row of a run costs against uniform
Verdicts = Mapping[tuple[str, str, str], bool | None]  # `options.of_steps`


@dataclass(frozen=True)
class Target:
    """A limit, and the step that is held against it, laid out in any way.

    With `options` also each option for this step that counts, by the rows of agreement of the same device.
    """

    what: str
    limit: float
    unit: str  # ms; x: times the uniform step; eager: times as fast as the eager float32 step
    name: str
    then: str
    more: str = ""  # that was tried, beside what has rows
    hoped: str = ""
    options: bool = False

    def missed(self, value: float) -> bool:
        return value < self.limit if self.unit == "eager" else value > self.limit

    def told(self) -> str:
        told = {"ms": "<= {:g} ms", "x": "<= {:g}x uniform", "eager": ">= {:g}x"}[self.unit]
        return told.format(self.limit) + self.hoped

    def holds(self, row: Mapping[str, Any], verdicts: Verdicts) -> bool:
        base = row["row"].partition("; ")[0]
        counts = self.options and verdicts.get(("CIFAR-10", row["device"], base))
        return base == self.name or (base.startswith(f"{self.name}, ") and bool(counts))


TARGETS = (
    Target("uniform, 32 rows", 1.40, "ms", "uniform 32", ""),
    Target(
        "RHO-LOSS, 32 of 320, exact",
        2.6,
        "ms",
        "rho 32 of 320",
        "statistics inside the convolutions: the passes over the activations that they take are most of what "
        "folding saves",
        "scored with running statistics, folded in, it is faster, but that is another BatchNorm mode",
    ),
    Target(
        "RHO-LOSS, 32 of 320, best option that counts",
        1.5,
        "x",
        "rho 32 of 320",
        "scoring in 8 bits",
        "half resolution, a proxy, reuse and gates share [too little](agreement.md) of the choice on digits",
        "; hoped for: 1.25x",
        options=True,
    ),
    Target(
        "RHO-LOSS, 128 of 512, best option that counts",
        1.4,
        "x",
        "rho 128 of 512",
        "the same, and fewer candidates, for the FLOP floor alone is 2.3 times that of the uniform",
        options=True,
    ),
    Target(
        "exact RHO-LOSS against the eager float32 step",
        11,
        "eager",
        "rho 32 of 320",
        "what makes the exact step faster",
    ),
)


def section(found: Rows, ratio: Ratio, verdicts: Verdicts) -> list[str]:
    """All targets, those that no run reached, and the options that may."""
    every, lines = [], []
    for target in TARGETS:
        values = _values(target.unit, found, ratio)
        held = [(value, row) for value, row in values if target.holds(row, verdicts)]
        best = max if target.unit == "eager" else min
        value, row = best(held, key=lambda pair: pair[0], default=(math.nan, None))
        if row is None:
            continue
        verdict = "**missed**" if target.missed(value) else "met"
        every.append(
            f"| {target.what} | {target.told()} | {_in_unit(target.unit, value)} | {verdict} |"
        )
        if not target.missed(value):
            continue
        reached = f"{_in_unit(target.unit, value)} ({row['row']})"
        tried = "the [options](#options)" if target.options else _layouts(target, held)
        tried += f"; {target.more}" if target.more else ""
        lines.append(f"| {target.what} | {target.told()} | {reached} | {tried} | {target.then} |")
    summary = [
        "## Targets",
        "",
        "| step | target | best so far | |",
        "|---|---|---|---|",
        *every,
        "",
    ]
    head = ["| step | target | best so far | what was tried | what one would try next |"]
    told = summary if every else []
    told += ["## Targets missed", "", *head, "|---|---|---|---|---|", *lines, ""] if lines else []
    steps = [target.name for target in TARGETS if target.options]
    tables = [_options(step, _values("x", found, ratio), verdicts) for step in steps]
    if any(tables):
        about = "Each at its best of all runs and layouts; whether it counts: [agreement.md](agreement.md)."
        told += ["## Options", "", about, "", *(line for table in tables for line in table)]
    return told


def _layouts(target: Target, held: list[tuple[float, dict[str, Any]]]) -> str:
    """The ways in which a step was laid out, each at its best, the best first."""
    found: dict[str, float] = {}
    best = max if target.unit == "eager" else min
    for value, row in held:
        ways = row["row"].partition("; ")[2] or "as usual"
        found[ways] = best(value, found.get(ways, value))
    ways = sorted(found, key=lambda way: found[way], reverse=target.unit == "eager")
    return "; ".join(f"{way}: {_in_unit(target.unit, found[way])}" for way in ways)


def _options(
    step: str, values: Iterable[tuple[float, dict[str, Any]]], verdicts: Verdicts
) -> list[str]:
    """A row for each option of a step that was timed, and for those that count though they were not."""
    found: dict[str, tuple[float, str]] = {}  # and the device
    for value, row in values:
        base, device = row["row"].partition("; ")[0], row["device"]
        if base.startswith(f"{step}, ") and "eager" not in base:
            found[base] = min((value, device), found.get(base, (value, device)))
    counting = dict.fromkeys(name for (_, _, name), counts in verdicts.items() if counts)
    untimed = [n for n in counting if n.startswith(f"{step}, ") and n not in found]
    lines = [f"| {step} | against uniform | counts: CIFAR-10 | digits |", "|---|---|---|---|"]
    for name in [*sorted(found, key=lambda name: found[name]), *untimed]:
        cost, device = found.get(name, (math.nan, ""))
        told = "not timed yet" if math.isnan(cost) else f"{cost:.2f}x"
        digits = [v for (data, _, n), v in verdicts.items() if (data, n) == ("digits", name)]
        each = [verdicts.get(("CIFAR-10", device, name)), *(digits or [None])[-1:]]
        cells = [name.removeprefix(f"{step}, "), told, *map(in_words, each)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if found else []


def _in_unit(unit: str, value: float) -> str:
    return f"{value:.3f} ms" if unit == "ms" else f"{value:.2f}x"


def _values(unit: str, found: Rows, ratio: Ratio) -> Iterator[tuple[float, dict[str, Any]]]:
    """Each row of all runs, held against what its own run has."""
    for started in {row["started"] for row in found}:
        run = [row for row in found if row["started"] == started]
        eager = [row["ms"] for row in run if row["row"] == "rho 32 of 320, eager float32"]
        for row in run:
            if unit == "eager":
                value = eager[0] / row["ms"] if eager else math.nan
            else:
                value = row["ms"] if unit == "ms" else ratio(run, row["row"])
            if not math.isnan(value):
                yield value, row
