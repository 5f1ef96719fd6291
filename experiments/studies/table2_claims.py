"""What the paper's Table 2 says of the small images, one data set like the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from experiments.bench.cell import Group, Study
from experiments.bench.claims import Claim, Compare
from experiments.studies import table2
from experiments.studies.comparisons import (
    CLEAN,
    NO_CINIC,
    NOISY,
    RHO,
    better,
    faster_than_in,
    sooner,
    worse,
)

UNIFORM, LOSS, NORM = "uniform", "training loss", "gradient norm"
OTHERS = [name for name in table2.ORDER if name != RHO]


@dataclass(frozen=True)
class Paper:
    """What the paper prints of a group: by method the epochs to both targets, and the final accuracy."""

    rows: dict[str, list[str]]

    @classmethod
    def of(cls, group: Group) -> Paper:
        return cls({name: re.findall(r"[\d.]+|NR", row) for name, row in group.paper.items()})

    def against(self, column: int) -> str:
        """'39 against 79': RHO-LOSS and uniform."""
        return f"{self.rows[RHO][column]} against {self.rows[UNIFORM][column]}"

    def ratio(self) -> str:
        """'79 / 39': uniform and RHO-LOSS, to the first target."""
        return f"{self.rows[UNIFORM][0]} / {self.rows[RHO][0]}"

    def final(self, name: str) -> str:
        return self.rows[name][2]

    def next(self, column: int, best: Callable[..., str]) -> tuple[str, str]:
        """The best of the other methods and its number; nobody where none has one."""
        there = [name for name in OTHERS if self.rows[name][column] != "NR"]
        name = best(there, key=lambda name: float(self.rows[name][column]), default="")
        return name, self.rows[name][column] if name else ""

    def first(self) -> str:
        """'39 and 65; next is gradient norm IS with 57, training loss with 129'; a name is told once."""
        (name, one), (other, two) = (self.next(column, min) for column in (0, 1))
        second = f"{other} with {two}".removeprefix(f"{name} ") if other else "none"
        return f"{' and '.join(self.rows[RHO][:2])}; next is {name} with {one}, {second}"

    def highest(self) -> str:
        return "{}; next is {} with {}".format(self.final(RHO), *self.next(2, max))


@dataclass(frozen=True)
class Table2:
    """Claims of the paper's table about a data set, and the most of uniform's steps that will do."""

    study: Study
    name: str
    most: float
    why: str = ""

    def claims(self) -> list[Claim]:
        """At most `most` of uniform's steps to the first target; fewer to the second."""
        clean, noisy = f"Table 2, {self.name}", f"Table 2, {self.name}, 10 % wrong labels"
        groups = {group.title: group for group in self.study.groups}
        at = {title: groups[title].targets for title in (CLEAN, NOISY)}
        there, wrong = (Paper.of(groups[title]) for title in (CLEAN, NOISY))
        return [
            self._claim(
                f"{clean}: RHO-LOSS reaches {_both(at[CLEAN])} in fewer steps than uniform (the first in "
                f"at most {self.most:g} of them)",
                f"{there.against(0)} epochs; {there.against(1)}",
                self._sooner(CLEAN, at[CLEAN]),
            ),
            self._claim(
                f"{noisy}: RHO-LOSS reaches {_both(at[NOISY])} in fewer steps than uniform (the first in "
                f"at most {self.most:g} of them)",
                f"{wrong.against(0)}; {wrong.against(1)}",
                self._sooner(NOISY, at[NOISY]),
            ),
            self._claim(
                f"{clean}: RHO-LOSS reaches {_both(at[CLEAN])} (10 % wrong labels: "
                f"{_both(at[NOISY])}) in fewer steps than every other method",
                f"{there.first()}. {wrong.first()}",
                [
                    sooner(group, RHO, accuracy, 1.0, other)
                    for group, targets in at.items()
                    for accuracy in targets
                    for other in OTHERS
                ],
            ),
            self._claim(
                f"{clean}: RHO-LOSS ends higher than uniform, clean and noisy",
                f"{there.final(RHO)}, {wrong.final(RHO)}; "
                f"uniform {there.final(UNIFORM)}, {wrong.final(UNIFORM)}",
                [better(CLEAN, RHO), better(NOISY, RHO)],
            ),
            self._claim(
                f"{clean}, clean and noisy: RHO-LOSS ends highest of all methods",
                f"{there.highest()}. {wrong.highest()}",
                [better(group, RHO, other) for group in (CLEAN, NOISY) for other in OTHERS],
            ),
            self._claim(
                f"{noisy}: the speed-up over uniform (as in Figure 2) is greater than with clean labels",
                f"{wrong.ratio()} against {there.ratio()} epochs",
                [faster_than_in(NOISY, CLEAN, RHO)],
            ),
            self._claim(
                f"{noisy}: training loss and gradient norm collapse (20 points below uniform)",
                f"{wrong.final(LOSS)} and {wrong.final(NORM)}, uniform {wrong.final(UNIFORM)}",
                [worse(NOISY, arm, plus=-20) for arm in (LOSS, NORM)],
            ),
            self._claim(
                f"{clean}: negative IL and SVP end below uniform",
                f"{there.final('negative IL')} and {there.final('SVP')}, uniform {there.final(UNIFORM)}",
                [worse(CLEAN, "negative IL"), worse(CLEAN, "SVP")],
            ),
        ]

    def _sooner(self, group: str, at: tuple[float, ...]) -> list[Compare]:
        return [sooner(group, RHO, at[0], self.most), sooner(group, RHO, at[1], 1.0)]

    def _claim(self, text: str, paper: str, parts: list[Compare]) -> Claim:
        return Claim(text, paper, self.study.name, parts, self.why)


def _both(at: tuple[float, ...]) -> str:
    return f"{at[0]:g} and {at[1]:g} %"


TABLE2_CLAIMS: list[Claim] = [
    *Table2(table2.CIFAR10, "CIFAR-10", most=0.6).claims(),
    *Table2(table2.CIFAR100, "CIFAR-100", most=0.8).claims(),
    *Table2(table2.CINIC10, "CINIC-10", most=0.8, why=NO_CINIC).claims(),
]
