"""Table 4 and Figure 7: the original selection function (its IL model goes on learning) and ours."""

from __future__ import annotations

from experiments.bench.cell import Cell, Group, Study
from experiments.studies.arms import R18_IL, rho

LIVE = "resnet18, live"


def both(base: Cell) -> dict[str, Cell]:
    return {"approximated": rho(base, R18_IL), "original": rho(base, LIVE)}


STUDY = Study(
    "table4",
    "Table 4 and Figure 7: original against approximated selection function",
    (
        Group(
            "Figure 7: CIFAR-10 with 20 % wrong labels",
            both(Cell("cifar10", labels="noise 20 %", epochs=100)),
            (60, 75, 85),
            {"approximated": "- (88.6)", "original": "- (86.1)"},
            ("epochs", "curves", "shares", "share_curves", "il_curves"),
            "The paper ran 80 (approximated) and 100 epochs; it says that the original picks more corrupted "
            "points over time, and that its IL model gets worse.",
        ),
        Group(
            "Table 4: CIFAR-10, clean",
            both(Cell("cifar10")),
            (60, 75, 90),
            {"approximated": "18 / 30 / 102", "original": "13 / 24 / NR (88 in 157)"},
            ("epochs", "curves", "il_curves"),
        ),
    ),
    seeds=2,
)
