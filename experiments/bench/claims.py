"""Claims of the paper, judged by the lines: what it says, its number, ours, and whether it holds.

A claim holds if it does for every seed that can be judged, holds in part if only for the mean of the seeds
or for some groups, and is not judged where runs are missing. Verdicts say where seeds or epochs are missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.bench.cell import Group, Study
from experiments.bench.numbers import (
    Line,
    Results,
    asked_for,
    mean,
    of_seeds,
    spread,
    weakest_final,
)

Measure = Callable[..., float | None]  # of a line, and of what `Compare` says beside
MANY = 8  # with more parts than this, only the number of those that hold is shown
NOT_RUN, HOLDS, IN_PART, FAILS = "not run", "holds", "holds in part", "does not hold"
OPEN = "open"  # too few parts were run to decide
SILENT = "says nothing"  # the runs of a part are there, but it does not apply to them


@dataclass(frozen=True)
class Compare:
    """One number of an arm against the same number of another, or against a bound.

    Holds for a seed if measure(arm) <= factor x measure(other) + plus; with `above`, if it is at least that.
    If the bound is measure(other) itself, an equal number does not do. None (not reached) counts as
    infinitely many steps.

    With `controlled` the measure also gets the final accuracy of the weakest arm of the group, below which
    arms can be compared. With `paired` it gets the lines of both arms for a seed, and its result is compared
    with `plus`, or with that of the same two arms in the group `beside`. With either of them None means that
    the seed says nothing, and it is passed over.
    """

    group: str
    arm: str
    measure: Measure
    other: str | None = None
    factor: float = 1.0
    plus: float = 0.0
    above: bool = False
    controlled: bool = False
    paired: bool = False
    beside: str = ""
    unit: str = ""
    digits: int = 1

    def judge(self, study: Study, results: Results) -> tuple[str, str]:
        """(ours in words, verdict)."""
        titles = filter(None, (self.group, self.beside))
        each = [self._lines(study, results, title) for title in titles]
        mine, theirs = self._numbers(each[0])
        if self.beside:
            theirs, _ = self._numbers(each[1])
        seeds = sorted(set(mine) & set(theirs)) if self._against else sorted(mine)
        if not seeds:
            arms = [set(lines[name]) for lines in each for name in (self.arm, self.other) if name]
            return "", SILENT if set.intersection(*arms) else NOT_RUN
        told = f"{self.group if self.beside else self.arm} {self._told(mine, seeds)}"
        told += f", {self._against} {self._told(theirs, seeds)}" if self._against else ""
        verdicts = [self._holds(mine[seed], theirs.get(seed, 0.0)) for seed in seeds]
        if all(verdicts):
            return told, HOLDS
        whole = self._holds(
            mean([_far(mine[seed]) for seed in seeds]),
            mean([_far(theirs.get(seed, 0.0)) for seed in seeds]),
        )
        return told, IN_PART if whole or any(verdicts) else FAILS

    def short(self, study: Study, results: Results) -> set[str]:
        """What the runs lack of what the study asks for, in words."""
        told = set()
        for title in filter(None, (self.group, self.beside)):
            arms = _group(study, title).arms
            for name in filter(None, (self.arm, self.other)):
                found = results.of(arms[name])
                others = {line["epochs"] for line in found} - {arms[name].epochs}
                asked = arms[name].epochs
                told |= {
                    f"{num} of {asked} epochs" if num < asked else f"{num} epochs, not {asked}"
                    for num in others
                }
                if any(line["error"] for line in found):
                    told.add(f"{name} broke off")
        return told

    def seeds(self, study: Study, results: Results) -> tuple[int, int]:
        """How many of the study's seeds, and how many further ones, the least run of its arms has.

        Arms that were not run are told as such.
        """
        titles = filter(None, (self.group, self.beside))
        cells = [
            _group(study, title).arms[name]
            for title in titles
            for name in (self.arm, self.other)
            if name
        ]
        counts = [asked_for(results.of(cell), study.seeds) for cell in cells]
        return min(filter(any, counts), default=(study.seeds, 0))

    @property
    def _against(self) -> str | None:
        """The arm, or the group, whose number is the bound."""
        return self.beside or (None if self.paired else self.other)

    def _lines(self, study: Study, results: Results, group: str) -> dict[str, dict[int, Line]]:
        """Lines of a group by arm and seed, of runs that came as far as an evaluation."""
        arms = {name: results.of(cell) for name, cell in _group(study, group).arms.items()}
        return {
            name: {line["seed"]: line for line in lines if line["eval"]}
            for name, lines in arms.items()
        }

    def _numbers(
        self, lines: Mapping[str, Mapping[int, Line]]
    ) -> tuple[dict[int, float | None], dict[int, float | None]]:
        """Our number of each seed, of the arm and of the one that it is held against."""
        mine, other = lines[self.arm], lines[self.other] if self.other else {}
        if self.paired:
            pairs = {seed: self.measure(mine[seed], other[seed]) for seed in set(mine) & set(other)}
            return {seed: number for seed, number in pairs.items() if number is not None}, {}
        ended = [line for found in lines.values() for line in found.values()]
        more = [weakest_final(ended)] if self.controlled and ended else []
        first, second = (
            {
                seed: number
                for seed, line in found.items()
                if (number := self.measure(line, *more)) is not None or not self.controlled
            }
            for found in (mine, other)
        )
        return first, second

    def _holds(self, mine: float | None, other: float | None) -> bool:
        if math.isinf(_far(mine)):
            return False  # not reached, so no better than anything
        if self._against and (self.factor, self.plus) == (1.0, 0.0) and mine == other:
            return False  # neither is better
        bound = self.factor * _far(other) + self.plus if self._against else self.plus
        return _far(mine) >= bound if self.above else _far(mine) <= bound

    def _told(self, numbers: dict[int, float | None], seeds: Sequence[int]) -> str:
        return spread([numbers[seed] for seed in seeds], self.digits) + self.unit


def _group(study: Study, title: str) -> Group:
    return next(group for group in study.groups if group.title == title)


def _far(value: float | None) -> float:
    return float("inf") if value is None else value


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the comparisons that it comes down to, all of which must hold.

    `why` says why it was not run, if the reason is not time. `spare` is how many parts need not hold, where
    the paper says "some" or "nearly all".
    """

    text: str
    paper: str
    study: str
    parts: Sequence[Compare]
    why: str = ""
    spare: int = 0

    def judge(self, study: Study, results: Results) -> tuple[str, str]:
        """(ours in words, verdict) of all parts together."""
        judged = [(part, *part.judge(study, results)) for part in self.parts]
        ran = [entry for entry in judged if entry[2] not in (NOT_RUN, SILENT)]
        silent = sum(verdict == SILENT for _, _, verdict in judged)
        absent = len(judged) - len(ran) - silent
        if not ran and not silent:
            return self.why, NOT_RUN
        verdict = self._together([verdict for _, _, verdict in ran], absent)
        short = sorted(set().union(*(part.short(study, results) for part in self.parts)))
        own, further = min(part.seeds(study, results) for part in self.parts)
        if own < study.seeds:
            short.insert(0, of_seeds(own, further, study.seeds))
        if absent:
            short.append(f"{absent} of {len(judged)} parts not run")
        if silent:
            short.append(f"{silent} of {len(judged)} parts say nothing")
        verdict += f" ({', '.join(short)})" if short else ""
        if len(ran) > MANY:
            num = sum(verdict == HOLDS for _, _, verdict in ran)
            return f"{num} of {len(ran)} hold", verdict
        many = len({part.group for part in self.parts}) > 1  # then each says of which it is
        named = [f"{part.group}: {told}" if many else told for part, told, _ in ran]
        return "; ".join(named), verdict

    def _together(self, verdicts: Sequence[str], absent: int) -> str:
        """The verdict of the parts that were run; `OPEN` if the `absent` ones could still decide it."""
        held = verdicts.count(HOLDS)
        if self.spare:
            needed = max(1, len(verdicts) + absent - self.spare)
            if held + absent >= needed:
                return HOLDS if held >= needed else OPEN
        if not verdicts or held == len(verdicts) < absent:
            return OPEN
        return verdicts[0] if len(set(verdicts)) == 1 else IN_PART
