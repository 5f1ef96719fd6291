"""What the runs say, in numbers and in sentences. Pure functions of the records."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

LABEL = {"uniform": "Uniform", "loss": "Training loss", "rho": "RHO-LOSS"}
HEADINGS = (
    "Method",
    "Steps to\nuniform's\naccuracy",
    "Final accuracy\n(lowest-highest)",
    "Wrong\nlabels,\nepoch 1",
    "Wrong\nlabels,\noverall",
    "Seconds,\nIL included\n(IL alone)",
)


@dataclass(frozen=True)
class Row:
    """One method. Lists have an entry for each seed; `None` where the target was not reached."""

    method: str
    final: list[float]
    steps: list[int | None]
    reach_seconds: list[float | None]
    wrong_first: float
    wrong: float
    correct: float
    seconds: float
    il_seconds: float

    @property
    def label(self) -> str:
        """The method's name for people."""
        return LABEL[self.method]

    @property
    def mean_steps(self) -> float | None:
        """Steps to the target, or None if not every seed reached it."""
        return _mean(self.steps)

    @property
    def mean_reach_seconds(self) -> float | None:
        """Seconds to the target, irreducible losses included, by the same rule."""
        return _mean(self.reach_seconds)


@dataclass(frozen=True)
class Summary:
    """The table, the accuracy that uniform ends at, and what improved and what did not."""

    rows: dict[str, Row]
    target: float
    epochs: int
    il_seconds: float

    @property
    def headline(self) -> str:
        """The result in a sentence or two."""
        rho, uniform = self.rows["rho"], self.rows["uniform"]
        if rho.mean_steps is None or uniform.mean_steps is None:
            reached = sum(step is not None for step in rho.steps)
            first = (
                f"RHO-LOSS reached uniform's final accuracy ({percent(self.target)}) with {reached} of "
                f"{len(rho.steps)} seeds"
            )
        else:
            first = (
                f"RHO-LOSS reached uniform's final accuracy ({percent(self.target)}) after "
                f"{rho.mean_steps:.0f} steps, uniform after {uniform.mean_steps:.0f}"
            )
        return f"{first}; it ended at {percent(fmean(rho.final))}. {self._cost()}"

    @property
    def passes(self) -> str:
        """12 epochs, 1 epoch."""
        return f"{self.epochs} epoch{'s' * (self.epochs != 1)}"

    def _cost(self) -> str:
        rho, uniform = self.rows["rho"], self.rows["uniform"]
        ours, theirs = rho.mean_reach_seconds, uniform.mean_reach_seconds
        if ours is None or theirs is None:
            return (
                f"The {self.passes} took {ours_theirs(rho.seconds, uniform.seconds)}, the "
                "irreducible losses included."
            )
        so = "It saved time, too" if ours < theirs else "It did not save time here"
        return f"{so}: {ours_theirs(ours, theirs)} to get there, the irreducible losses included."

    @property
    def improved(self) -> list[str]:
        """Sentences on what was better than uniform."""
        return [text for better, text in self._findings() if better]

    @property
    def not_improved(self) -> list[str]:
        """Sentences on what was not better than uniform."""
        return [text for better, text in self._findings() if not better]

    def _findings(self) -> list[tuple[bool, str]]:
        return [
            self._steps(),
            self._accuracy("rho"),
            self._wrong_first(),
            self._wrong(),
            self._seconds(),
            self._accuracy("loss"),
        ]

    def _steps(self) -> tuple[bool, str]:
        rho, uniform = self.rows["rho"].mean_steps, self.rows["uniform"].mean_steps
        goal = f"uniform's final accuracy of {percent(self.target)}"
        if rho is None:
            return False, f"Steps: RHO-LOSS did not reach {goal} with every seed."
        if uniform is None:  # its own mean over seeds: some seed may stay below
            return (
                True,
                f"Steps: RHO-LOSS reached {goal} in {rho:.0f}; uniform not with every seed.",
            )
        text = f"Steps to {goal}: {rho:.0f} with RHO-LOSS, {uniform:.0f} uniform"
        return rho < uniform, f"{text} ({rho / uniform:.2f} times as many)."

    def _accuracy(self, method: str) -> tuple[bool, str]:
        row, uniform = self.rows[method], self.rows["uniform"]
        gain = fmean(row.final) - fmean(uniform.final)
        apart = min(row.final) > max(uniform.final) or max(row.final) < min(uniform.final)
        clear = "" if apart else "; the seeds overlap"
        how = "with RHO-LOSS" if method == "rho" else "by training loss"
        return gain > 0, (
            f"Final accuracy: {percent(fmean(row.final))} {how}, {percent(fmean(uniform.final))} "
            f"uniform ({100 * gain:+.1f} points{clear})."
        )

    def _wrong_first(self) -> tuple[bool, str]:
        rho, uniform, loss = (self.rows[m].wrong_first for m in ("rho", "uniform", "loss"))
        return rho < uniform, (
            f"Wrong labels chosen in the first epoch: {percent(rho)} with RHO-LOSS, "
            f"{percent(uniform)} uniform, {percent(loss)} by training loss."
        )

    def _wrong(self) -> tuple[bool, str]:
        rho, uniform, loss = (self.rows[m].wrong for m in ("rho", "uniform", "loss"))
        after = (
            ""
            if rho < uniform
            else " Once the digits that can be learnt are learnt, what still stands out is also noise."
        )
        return rho < uniform, (
            f"Wrong labels chosen over {self.passes}: {percent(rho)} with RHO-LOSS, "
            f"{percent(uniform)} uniform, {percent(loss)} by training loss.{after}"
        )

    def _seconds(self) -> tuple[bool, str]:
        rho, uniform = self.rows["rho"], self.rows["uniform"]
        text = (
            f"Seconds: {self.passes} took {ours_theirs(rho.seconds, uniform.seconds)}; "
            f"{rho.il_seconds:.1f} s of RHO-LOSS's went into the irreducible losses, which later runs "
            "can use again."
        )
        ours, theirs = rho.mean_reach_seconds, uniform.mean_reach_seconds
        if ours is None or theirs is None:
            return rho.seconds < uniform.seconds, text
        return ours < theirs, f"{text} To uniform's final accuracy: {ours_theirs(ours, theirs)}."


def summarise(records: Sequence[dict[str, Any]], il_seconds: float) -> Summary:
    """Collect the records of all methods and seeds.

    Final accuracy is the mean of the last epoch's evaluations, as single ones jump. The target is the
    mean of uniform's final accuracies; it is reached at the first evaluation that is not below it.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_method.setdefault(record["method"], []).append(record)
    target = fmean(final_accuracy(record) for record in by_method["uniform"])
    rows = {
        method: _row(method, group, target, il_seconds if method == "rho" else 0.0)
        for method, group in by_method.items()
    }
    return Summary(rows, target, records[0]["settings"]["epochs"], il_seconds)


def _row(method: str, group: list[dict[str, Any]], target: float, il_seconds: float) -> Row:
    at = [next((i for i, a in enumerate(r["accuracy"]) if a >= target), None) for r in group]
    reached = list(zip(group, at, strict=True))
    return Row(
        method=method,
        final=[final_accuracy(record) for record in group],
        steps=[None if i is None else r["step"][i] for r, i in reached],
        reach_seconds=[None if i is None else r["seconds"][i] + il_seconds for r, i in reached],
        wrong_first=fmean(r["wrong_by_epoch"][0] for r in group),
        wrong=fmean(fmean(r["wrong_by_epoch"]) for r in group),
        correct=fmean(fmean(r["correct_by_epoch"]) for r in group),
        seconds=fmean(r["seconds"][-1] for r in group) + il_seconds,
        il_seconds=il_seconds,
    )


def final_accuracy(record: dict[str, Any]) -> float:
    """Mean accuracy over the evaluations of the last epoch."""
    an_epoch = len(record["accuracy"]) // len(record["wrong_by_epoch"])  # fewer if it has few steps
    return fmean(record["accuracy"][-an_epoch:])


def cells(row: Row) -> list[str]:
    """The row as the table shows it."""
    reached = [step for step in row.steps if step is not None]
    steps = f"{fmean(reached):.0f}" if reached else "not reached"
    if reached and len(reached) < len(row.steps):
        steps += f" ({len(reached)} of {len(row.steps)} seeds)"
    seconds = f"{row.seconds:.1f}"
    if row.il_seconds:
        seconds += f" ({row.il_seconds:.1f})"
    spread = f"{100 * min(row.final):.1f}-{100 * max(row.final):.1f}"
    return [
        row.label,
        steps,
        f"{percent(fmean(row.final))} ({spread})",
        percent(row.wrong_first),
        percent(row.wrong),
        seconds,
    ]


def show(summary: Summary) -> None:
    """Print the table and what it comes to."""
    width = min(shutil.get_terminal_size().columns, 100)
    body = [cells(row) for row in summary.rows.values()]
    print(f"\n{plain_table(body)}\n\n{textwrap.fill(summary.headline, width)}")


def plain_table(body: list[list[str]]) -> str:
    """The table in plain text; a heading's lines stand one above the other."""
    parts = [heading.split("\n") for heading in HEADINGS]
    deep = max(len(part) for part in parts)
    head = [[part[i] if i < len(part) else "" for part in parts] for i in range(deep)]
    wide = [max(len(line[column]) for line in head + body) for column in range(len(HEADINGS))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip()
        for line in head + body
    ]
    return "\n".join([*text[:deep], "  ".join("-" * width for width in wide), *text[deep:]])


def percent(share: float) -> str:
    """0.0312 as "3.1 %"."""
    return f"{100 * share:.1f} %"


def ours_theirs(rho: float, uniform: float) -> str:
    """Seconds of both."""
    return f"{rho:.1f} s with RHO-LOSS, {uniform:.1f} s uniform"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
