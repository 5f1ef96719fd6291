"""What the paper's Table 2 says of the small images, one data set like the other."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.claims import Claim, Compare
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
from experiments.studies.table2 import ORDER


@dataclass(frozen=True)
class Table2:
    """What the paper's table says of a data set, in words, and the most of uniform's steps that will do."""

    study: str
    name: str
    clean_at: tuple[float, float]
    noisy_at: tuple[float, float]
    clean: str
    noisy: str
    final: str
    collapse: str
    weak: str
    first: str
    highest: str
    faster: str
    most: float
    why: str = ""

    def claims(self) -> list[Claim]:
        """At most `most` of uniform's steps to the first target; fewer to the second."""
        others = [name for name in ORDER if name != RHO]
        clean, noisy = f"Table 2, {self.name}", f"Table 2, {self.name}, 10 % wrong labels"
        return [
            self._claim(
                f"{clean}: RHO-LOSS reaches {_both(self.clean_at)} in fewer steps than uniform (the first in "
                f"at most {self.most:g} of them)",
                self.clean,
                self._sooner(CLEAN, self.clean_at),
            ),
            self._claim(
                f"{noisy}: RHO-LOSS reaches {_both(self.noisy_at)} in fewer steps than uniform (the first in "
                f"at most {self.most:g} of them)",
                self.noisy,
                self._sooner(NOISY, self.noisy_at),
            ),
            self._claim(
                f"{clean}: RHO-LOSS reaches {_both(self.clean_at)} (10 % wrong labels: "
                f"{_both(self.noisy_at)}) in fewer steps than every other method",
                self.first,
                [
                    sooner(group, RHO, accuracy, 1.0, other)
                    for group, at in ((CLEAN, self.clean_at), (NOISY, self.noisy_at))
                    for accuracy in at
                    for other in others
                ],
            ),
            self._claim(
                f"{clean}: RHO-LOSS ends higher than uniform, clean and noisy",
                self.final,
                [better(CLEAN, RHO), better(NOISY, RHO)],
            ),
            self._claim(
                f"{clean}, clean and noisy: RHO-LOSS ends highest of all methods",
                self.highest,
                [better(group, RHO, other) for group in (CLEAN, NOISY) for other in others],
            ),
            self._claim(
                f"{noisy}: the speed-up over uniform (as in Figure 2) is greater than with clean labels",
                self.faster,
                [faster_than_in(NOISY, CLEAN, RHO)],
            ),
            self._claim(
                f"{noisy}: training loss and gradient norm collapse (20 points below uniform)",
                self.collapse,
                [worse(NOISY, arm, plus=-20) for arm in ("training loss", "gradient norm")],
            ),
            self._claim(
                f"{clean}: negative IL and SVP end below uniform",
                self.weak,
                [worse(CLEAN, "negative IL"), worse(CLEAN, "SVP")],
            ),
        ]

    def _sooner(self, group: str, at: tuple[float, float]) -> list[Compare]:
        return [sooner(group, RHO, at[0], self.most), sooner(group, RHO, at[1], 1.0)]

    def _claim(self, text: str, paper: str, parts: list[Compare]) -> Claim:
        return Claim(text, paper, self.study, parts, self.why)


def _both(at: tuple[float, float]) -> str:
    return f"{at[0]:g} and {at[1]:g} %"


TABLE2_CLAIMS: list[Claim] = [
    *Table2(
        "table2_cifar10",
        "CIFAR-10",
        clean_at=(80, 87.5),
        noisy_at=(75, 85),
        clean="39 against 79 epochs; 65 against NR",
        noisy="27 against 62; 49 against NR",
        first="39 and 65; next is gradient norm IS with 57, training loss with 129. 27 and 49; next is "
        "gradient norm IS with 57, none",
        highest="91; next is training loss with 90. 91; next is uniform with 85",
        faster="62 / 27 against 79 / 39 epochs",
        final="91, 91; uniform 87, 85",
        collapse="28 and 23, uniform 85",
        weak="60 and 55, uniform 87",
        most=0.6,
    ).claims(),
    *Table2(
        "table2_cifar100",
        "CIFAR-100",
        clean_at=(40, 52.5),
        noisy_at=(40, 47.5),
        clean="48 against 65 epochs; 77 against 133",
        noisy="49 against 79; 65 against 116",
        first="48 and 77; next is uniform with 65, gradient norm IS with 132. 49 and 65; next is uniform "
        "with 79, with 116",
        highest="61; next is gradient norm IS with 55. 60; next is uniform with 50",
        faster="79 / 49 against 65 / 48 epochs",
        final="61, 60; uniform 54, 50",
        collapse="4 and 4, uniform 50",
        weak="43 and 18, uniform 54",
        most=0.8,
    ).claims(),
    *Table2(
        "table2_cinic10",
        "CINIC-10",
        clean_at=(70, 77.5),
        noisy_at=(60, 67.5),
        clean="27 against 38 epochs; 38 against 97",
        noisy="13 against 24; 17 against 38",
        first="27 and 38; next is gradient norm IS with 34, with 64. 13 and 17; next is gradient norm IS "
        "with 22, with 35",
        highest="83; next is gradient norm IS with 82. 82; next is gradient norm IS with 79",
        faster="24 / 13 against 38 / 27 epochs",
        final="83, 82; uniform 80, 78",
        collapse="16 and 16, uniform 78",
        weak="60 and 39, uniform 80",
        most=0.8,
        why=NO_CINIC,
    ).claims(),
]
