"""What one run is, and what a study is: plain values, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from experiments.records import Recorded
from rholoss.errors import RholossError


@dataclass(frozen=True)
class Cell(Recorded):
    """One run. The defaults are the paper's: half of CIFAR-10, ResNet-18, 32 of 320, AdamW at 1e-3.

    An epoch is one pass over the candidates: |D| // n_B steps, of which each trains on n_b points.
    """

    dataset: str = "cifar10"
    labels: str = "clean"
    method: str = "uniform"
    il: str = "none"
    model: str = "resnet18"
    n_b: int = 32
    n_B: int = 320
    seed: int = 0
    epochs: int = 150
    part: str = "half"  # 'half' leaves the holdout out; 'whole' trains on both halves
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    batch_norm: str = "train"
    schedule: str = "constant"  # of the selection; 'annealed' selects early and then filters
    looks: int = 1  # evaluations an epoch


@dataclass(frozen=True)
class Group:
    """Arms that are compared with each other, and what the page shows of them.

    Args:
        arms: name of each arm -> its cell, with any seed.
        targets: accuracies in %, for the table of epochs.
        paper: name of an arm -> the paper's numbers, as they are to be printed.
        show: tables and plots of `report.SHOWS`.
        note: a sentence below the tables.
    """

    title: str
    arms: Mapping[str, Cell]
    targets: Sequence[float] = ()
    paper: Mapping[str, str] = field(default_factory=dict)
    show: Sequence[str] = ("epochs", "curves")
    note: str = ""


@dataclass(frozen=True)
class Study:
    """A question, the groups of arms that answer it, and how many seeds each arm has."""

    name: str
    title: str
    groups: Sequence[Group]
    seeds: int = 3
    tier: int = 1
    note: str = ""

    def cells(self, seeds: Sequence[int] | None = None) -> Iterator[Cell]:
        """All runs once, the most valuable first: one seed of every arm before the second of any."""
        seen = set()
        for seed in range(self.seeds) if seeds is None else seeds:
            for group in self.groups:
                for arm in group.arms.values():
                    cell = replace(arm, seed=seed)
                    if cell not in seen:
                        seen.add(cell)
                        yield cell


def only(cell: Cell, conditions: Sequence[str]) -> bool:
    """Whether a cell has these values, each given as 'field=value'; for a field with several, one of them."""
    asked: dict[str, list[str]] = {}
    for condition in conditions:
        name, _, value = condition.partition("=")
        if name not in {f.name for f in fields(Cell)}:
            known = ", ".join(f.name for f in fields(Cell))
            raise RholossError(f"`only` has {condition!r}; write FIELD=VALUE with one of {known}.")
        asked.setdefault(name, []).append(value)
    return all(str(getattr(cell, name)) in values for name, values in asked.items())


def shortened(cell: Cell, epochs: int | None) -> Cell:
    """The cell with so many epochs at most."""
    return cell if epochs is None else replace(cell, epochs=min(epochs, cell.epochs))
