"""What runs in the race: arms, and the cells (data, arm, sizes, seed) that one run is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.records import Recorded
from rholoss.engine import InfoBatch, Plan, RandomShare, Remembered
from rholoss.schedules import Schedule


@dataclass(frozen=True)
class Arm:
    """A way to train: a method, k candidates for each trained point, and when to stop scoring."""

    name: str
    method: str = "uniform"
    k: int = 1
    switch: float | None = 1.0  # share of the steps that score; None: until the target catches up
    drop: float = 0.0  # share of highest irreducible loss that is left out afterwards
    # Of the passes that score nothing: a function from the loss of chance to a plan.
    plan: Callable[[float], Plan] | None = None
    il_epochs: int = 12  # of the fit of the irreducible-loss model
    rungs: tuple[int, ...] = ()  # epochs of it whose losses come first (`rholoss.Ladder`)
    # While scoring. 'eval' is folded into the convolutions, 'recent', too, with statistics that keep
    # step with the weights, 'following' with means that do; 'train' takes those of the candidates, 'rows',
    # folded, those of some of them.
    batch_norm: str = "eval"
    # Scored beside training, which is cheaper: one step stale, or 'ahead' by the weights expected then.
    overlap: bool | str = True
    shortlist: float = 1.0  # share of the candidates that are scored: those that promise most

    @property
    def needs_il(self) -> bool:
        return self.method in ("rho", "negative_il") or self.drop > 0

    @property
    def rho_type(self) -> bool:
        """Whether it asks RHO-LOSS's questions, of an IL model or of what training remembers."""
        plan = None if self.plan is None else self.plan(1.0)
        return self.method == "rho" or isinstance(plan, Remembered)

    @property
    def by_hand(self) -> bool:
        """Whether the share of steps that score is fixed by hand: such arms are there to judge the others."""
        return self.scores and self.switch is not None and self.switch < 1

    @property
    def scores(self) -> bool:
        return self.method != "uniform"

    def schedule(self, steps: int) -> Schedule:
        if not self.scores:
            return Schedule(stop=0, drop=self.drop)
        switch = LONGEST if self.switch is None else self.switch
        stop = math.inf if switch >= 1 else math.floor(steps * switch + 0.5)
        return Schedule(stop=stop, drop=self.drop)


LABELS = {"cifar10": ("clean", "noise 10 %", "worse"), "cifar100": ("clean", "noise 10 %")}
LONGEST = 0.3  # share of the steps that an automatic switch may take at most


def _by_chance(filter_from: float = 0.3, **options: Any) -> Callable[[float], Plan]:
    """Plans whose bound is the loss of chance alone, and nothing is measured."""

    def plan(chance: float) -> Plan:
        return Remembered(chance, measured=False, filter_from=filter_from, again=0, **options)

    return plan


_filter, _always = _by_chance(), _by_chance(least=0.0)
_both = _by_chance(skip=0.5, most=1.0)
# Where more than 15 % of the rows are not learnable, what is not learnt is mostly wrong labels.
_careful = _by_chance(skip=0.5, most=0.15)


def _measured(chance: float) -> Plan:
    """The share of wrong labels is measured, and the bound by it; no number of classes is needed."""
    return Remembered(skip=0.5)


def _probation(chance: float) -> Plan:
    """As measured, and before half-way on probation, so that wrong labels are not learnt by heart."""
    return Remembered(chance, skip=0.5)


def _annealed(name: str, switch: float | None = None, **options: Any) -> Arm:
    return Arm(name, "rho", switch=switch, **{"k": 4, "plan": _filter, **options})


_FRESH: dict[str, Any] = {"batch_norm": "train", "overlap": False}  # exact scoring
_FOLDED: dict[str, Any] = {"batch_norm": "recent", "overlap": False}
_FOLLOWING: dict[str, Any] = {"batch_norm": "following", "overlap": False}
_AHEAD: dict[str, Any] = {"batch_norm": "following", "overlap": "ahead"}

ARMS = {
    arm.name: arm
    for arm in (
        Arm("uniform"),
        Arm("uniform, remembering", plan=lambda chance: RandomShare(1.0)),
        Arm("random half", plan=lambda chance: RandomShare(0.5)),
        Arm("minus IL 2 %", drop=0.02),
        Arm("minus IL 10 %", drop=0.10),
        Arm("loss k=2", "loss", k=2, batch_norm="recent"),
        Arm("InfoBatch", plan=lambda chance: InfoBatch()),
        Arm("rho k=10", "rho", k=10, batch_norm="recent"),
        Arm("rho k=5", "rho", k=5),
        # RHO-LOSS until the target has caught up with the IL model; then what was never better than
        # chance is left out. Both from what is measured.
        _annealed("annealed"),
        # An IL model that was stopped early costs less, and is nearer to what the target can learn.
        Arm("rho k=5, early IL", "rho", k=5, il_epochs=3),
        _annealed("annealed, early IL", il_epochs=3),
        # Losses that keep step with the target: those of a young model first.
        Arm("rho k=5, ladder", "rho", k=5, rungs=(1, 3)),
        _annealed("annealed, ladder", rungs=(1, 3)),
        # Scored with other statistics than the running ones, which lag behind the weights.
        Arm("rho k=5, train BN", "rho", k=5, batch_norm="train"),
        _annealed("annealed, train BN", batch_norm="train"),
        Arm("rho k=5, recent BN", "rho", k=5, batch_norm="recent"),
        _annealed("annealed, recent BN", batch_norm="recent"),
        _annealed("annealed, early IL, recent BN", il_epochs=3, batch_norm="recent"),
        _annealed("annealed, ladder, recent BN", rungs=(1, 3), batch_norm="recent"),
        _annealed("annealed, recent BN, both", batch_norm="recent", plan=_both),
        # Scored with the newest weights: a stale choice corrects what has been corrected already.
        Arm("rho k=5, fresh", "rho", k=5, **_FRESH),
        *(Arm(f"rho k={k}, folded", "rho", k=k, **_FOLDED) for k in (5, 10)),
        # The means of BatchNorm follow the weights: nearer to exact scoring, and nearly as cheap.
        *(Arm(f"rho k={k}, following", "rho", k=k, **_FOLLOWING) for k in (5, 10)),
        *(Arm(f"rho k={k}, ahead", "rho", k=k, **_AHEAD) for k in (5, 10)),
        _annealed("annealed, fresh, careful", **_FRESH, plan=_careful),
        _annealed("annealed k=2, fresh, careful", k=2, **_FRESH, plan=_careful),
        _annealed("annealed, fresh rows, careful", batch_norm="rows", overlap=False, plan=_careful),
        # Folded with recent statistics: the cheapest scoring that ends as high as exact scoring.
        _annealed("annealed, measured", **_FOLDED, plan=_measured),
        _annealed("annealed, measured, early IL", **_FOLDED, plan=_measured, il_epochs=6),
        _annealed(
            "annealed, measured, early IL, shortlist",
            **_FOLDED,
            plan=_measured,
            il_epochs=6,
            shortlist=0.6,
        ),
        _annealed("annealed, probation", **_FOLDED, plan=_probation),
        _annealed("annealed, probation, ahead", **_AHEAD, plan=_probation),
        # And switches fixed by hand, for the automatic one to be judged by.
        *(
            _annealed(f"annealed {part} %, measured", part / 100, **_FOLDED, plan=_measured)
            for part in (5, 15, 30)
        ),
        # `annealed` with the switch and the share of highest IL fixed by hand.
        Arm("annealed 30 %, IL 2 %", "rho", k=5, switch=0.3, drop=0.02),
        Arm("annealed 30 %, IL 10 %", "rho", k=5, switch=0.3, drop=0.10),
        Arm("annealed 20 %, filter", "rho", k=4, switch=0.2, plan=_always),
        # No IL model at all: learnable and learnt are read from the losses of training itself.
        Arm("remembered", plan=_filter),
        Arm("remembered, always", plan=_always),
        Arm("remembered, skip", plan=_by_chance(0.4, skip=0.5, least=0.0, most=1.0)),
        # Both by default: on clean labels it only skips, with wrong ones it filters, too.
        Arm("remembered, both", plan=_both),
        Arm("remembered, careful", plan=_careful),
        Arm("remembered, measured", plan=_measured),
        Arm("remembered, probation", plan=_probation),
        Arm("remembered, skip alone", plan=_by_chance(1.0, skip=0.5, most=1.0)),
    )
}


@dataclass(frozen=True)
class Cell(Recorded):
    """One run. `split` is 'tune' (train on 45,000, judged on the 5,000 others) or 'final' (test set)."""

    labels: str
    arm: str
    n_b: int
    lr: float
    seed: int
    split: str = "tune"
    budget: float = 17.0
    il: str = "inside"  # the budget, or 'reused' from an earlier run
    dataset: str = "cifar10"
    part: str = "all"  # or 'half': even ids train, odd ids are the holdout set

    @property
    def race(self) -> tuple[str, str, float]:
        """What has its own table and its own tuning: data set, part of it, budget."""
        return self.dataset, self.part, self.budget

    def spent_on_il(self, il_seconds: float) -> float:
        return il_seconds if ARMS[self.arm].needs_il and self.il == "inside" else 0.0

    def steps(
        self, times: Mapping[str, float], il_seconds: float, scoring: int | None = None
    ) -> int:
        """How many steps the budget pays for, at step times (ms) that were measured alone.

        `scoring` of them score; None: as the arm plans.
        """
        scores, plain = (times[kind.key] for kind in kinds(self))
        budget = 1000 * (self.budget - self.spent_on_il(il_seconds))
        if scoring is not None:
            return max(1, int((budget - scoring * scores) / plain) + scoring)
        arm = ARMS[self.arm]
        switch = LONGEST if arm.switch is None else arm.switch
        share = switch if arm.scores else 0.0
        return max(1, int(budget / (share * scores + (1 - share) * plain)))


@dataclass(frozen=True)
class Kind:
    """A kind of step, which has its own time: n_b of how many, by which method, by which arm's plan.

    A plan costs something in steps that score, too: the losses are remembered. And each plan deals
    passes of its own length, so that one does not stand for another.
    """

    method: str
    n_b: int
    k: int = 1
    planned: str = ""  # name of the first arm that has the plan
    batch_norm: str = "eval"
    overlap: bool | str = True
    shortlist: float = 1.0

    @property
    def key(self) -> str:
        name = "scoring" if self.method != "uniform" else "planned" if self.planned else "uniform"
        by = f" by {self.planned}" if self.planned else ""
        norm = f", {self.batch_norm} BN" if self.batch_norm != "eval" else ""
        stale = "" if self.overlap is True else f", {self.overlap or 'fresh'}"
        short = f", shortlist of {self.shortlist:.0%}" if self.shortlist < 1 else ""
        return f"{name} {self.n_b} of {self.n_b * self.k}{by}{norm}{stale}{short}"


def kinds(cell: Cell) -> tuple[Kind, Kind]:
    """Of the steps that score, and of those that do not (the same if the arm never scores)."""
    arm = ARMS[cell.arm]
    planned = next((one.name for one in ARMS.values() if arm.plan and one.plan is arm.plan), "")
    plain = Kind("uniform", cell.n_b, planned=planned)
    scores = Kind(arm.method, cell.n_b, arm.k, planned, arm.batch_norm, arm.overlap, arm.shortlist)
    return (scores if arm.scores else plain), plain
