"""Claims of the paper, judged by the lines: what it says, its number, ours, and whether it holds.

A claim holds if it does for every seed that can be judged, holds in part if only for the mean of the seeds
or for some groups, and is not judged where runs are missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.bench.cell import Group, Study
from experiments.bench.numbers import Results, mean, spread, weakest_final

Measure = Callable[..., float | None]  # of a line; if `controlled`, of a line and an accuracy
NOT_RUN, HOLDS, IN_PART, FAILS = "not run", "holds", "holds in part", "does not hold"


@dataclass(frozen=True)
class Compare:
    """One number of an arm against the same number of another, or against a bound.

    Holds for a seed if ours(arm) <= factor x ours(other) + plus, or with `above` if it is at least that.
    What was not reached (None) counts as infinitely many steps. With `controlled` the measure also gets
    the final accuracy of the weakest arm of the group, below which arms can be compared.
    """

    group: str
    arm: str
    measure: Measure
    other: str | None = None
    factor: float = 1.0
    plus: float = 0.0
    above: bool = False
    controlled: bool = False
    unit: str = ""
    digits: int = 1

    def judge(self, study: Study, results: Results) -> tuple[str, str]:
        """(ours in words, verdict)."""
        group = next(group for group in study.groups if group.title == self.group)
        mine, theirs = (
            self._numbers(name, study, group, results) for name in (self.arm, self.other)
        )
        seeds = sorted(set(mine) & set(theirs)) if self.other else sorted(mine)
        if not seeds:
            return "", NOT_RUN
        told = f"{self.arm} {self._told(mine, seeds)}"
        told += f", {self.other} {self._told(theirs, seeds)}" if self.other else ""
        each = [self._holds(mine[seed], theirs.get(seed, 0.0)) for seed in seeds]
        if all(each):
            return told, HOLDS
        whole = self._holds(
            mean([_far(mine[seed]) for seed in seeds]),
            mean([_far(theirs.get(seed, 0.0)) for seed in seeds]),
        )
        return told, IN_PART if whole or any(each) else FAILS

    def _numbers(
        self, name: str | None, study: Study, group: Group, results: Results
    ) -> dict[int, float | None]:
        if name is None:
            return {}
        arms = {arm: results.of(cell, study.seeds) for arm, cell in group.arms.items()}
        ended = [line for lines in arms.values() for line in lines if line["eval"]]
        more = [weakest_final(ended)] if self.controlled and ended else []
        return {line["seed"]: self.measure(line, *more) for line in arms[name] if line["eval"]}

    def _holds(self, mine: float | None, other: float | None) -> bool:
        if math.isinf(_far(mine)):
            return False  # not reached, so no better than anything
        bound = self.factor * _far(other) + self.plus if self.other else self.plus
        return _far(mine) >= bound if self.above else _far(mine) <= bound

    def _told(self, numbers: dict[int, float | None], seeds: Sequence[int]) -> str:
        return spread([numbers[seed] for seed in seeds], self.digits) + self.unit


def _far(value: float | None) -> float:
    return float("inf") if value is None else value


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the comparisons that it comes down to, all of which must hold."""

    text: str
    paper: str
    study: str
    parts: Sequence[Compare]

    def judge(self, study: Study, results: Results) -> tuple[str, str]:
        """(ours in words, verdict) of all parts together."""
        judged = [part.judge(study, results) for part in self.parts]
        ran = [(told, verdict) for told, verdict in judged if verdict != NOT_RUN]
        if not ran:
            return "", NOT_RUN
        verdicts = {verdict for _, verdict in ran}
        verdict = verdicts.pop() if len(verdicts) == 1 else IN_PART
        if len(ran) < len(judged):
            verdict += f" ({len(judged) - len(ran)} of {len(judged)} parts not run)"
        return "; ".join(told for told, _ in ran), verdict
