"""How long a step takes with scoring workers, from what one process takes and how fast the link is.

Three things happen at the same time, and the slowest sets the pace: the trainer trains, M workers score
(and load) one step each, and the link brings the chosen rows back. Weights are sent meanwhile. If that takes
long, D seconds for M workers, it does not stop the trainer; but the weights get older than allowed (S steps,
`max_stale`), and the trainer scores some steps itself. With one snapshot sent after the other, each is D
old when it can first be used and 2 D when the next one arrives, so that workers do

    all steps                where 2 D <= S x (seconds of a step)
    S x seconds / D - 1      of them beyond that
    none                     where D >= S x seconds: the transfer of weights dominates
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rholoss.errors import RholossError

GIGABIT = 1e9 / 8  # bytes a second
HANDLING = 2.5e-3  # seconds; benchmarks/results/workers.jsonl has 2.5 and 2.9 ms, on slow cores


@dataclass(frozen=True)
class Work:
    """What a step consists of. Seconds are those of one process that has a device to itself.

    Attributes:
        training: forward, backward and optimizer on the chosen rows.
        scoring: forward of all candidates, and the choice.
        loading: of all candidates; on a worker it runs beside scoring.
        weights: bytes that go to each worker at a time: 2 for each parameter.
        rows: bytes of the chosen rows.
        packing: copying the weights on the trainer, or on a worker.
        handling: what the trainer's own thread does to take over a step from a worker.
    """

    training: float
    scoring: float
    loading: float = 0.0
    weights: float = 0.0
    rows: float = 0.0
    packing: float = 0.0
    handling: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds of a step without workers."""
        return self.training + self.selecting

    @property
    def selecting(self) -> float:
        """Seconds that the trainer needs to do a worker's part itself."""
        return self.scoring + self.loading


@dataclass(frozen=True)
class Prediction:
    """A step with workers: seconds, what sets the pace, and what each part would need by itself."""

    workers: int
    seconds: float
    bound: str  # 'training', 'scoring', 'rows', 'weights', 'processors'; 'no workers'
    trainer: float
    scoring: float
    transfer: float  # of the weights to all workers, once
    by_workers: float  # share of the steps
    staleness: float  # steps by which the weights are behind, on average


def predict(
    work: Work,
    workers: int,
    *,
    link: float,
    every: int = 1,
    ahead: int = 2,
    max_stale: int | None = None,
    rescored: float = 0.0,
    processors: float = math.inf,
) -> Prediction:
    """Seconds of a step.

    Args:
        work: what a step consists of.
        workers: of one trainer (M).
        link: bytes a second that the trainer can send to all its workers together.
        every, ahead, max_stale: as for `ScoringWorkers.batches`.
        rescored: share of the candidates that the trainer scores again.
        processors: that all processes share, where they are on one machine without devices.
    """
    if workers < 0 or every < 1 or not link > 0:
        raise RholossError(
            f"`workers` is {workers}, `every` {every} and `link` {link:g} bytes a second; workers "
            "cannot be negative, `every` is at least 1, and the link needs a speed."
        )
    if workers == 0:
        return Prediction(0, work.alone, "no workers", work.alone, 0.0, 0.0, 0.0, 0.0)
    limit = 2 * every + ahead * workers if max_stale is None else max_stale
    transfer = workers * work.weights / link
    packing = work.packing / every
    again = rescored * work.scoring
    trainer = work.training + work.handling + packing + again
    scoring = max(work.scoring, work.loading) / workers + packing
    shared = (work.alone + work.handling + again + (1 + workers) * packing) / processors
    seconds, bound = max(
        (trainer, "training"),
        (scoring, "scoring"),
        (work.rows / link, "rows"),
        (shared, "processors"),
    )
    share = 1.0
    if 2 * transfer > limit * seconds:
        # seconds = pace + (1 - share) x selecting with share = limit x seconds / transfer - 1.
        c, bound = work.selecting, "weights"
        seconds = min((seconds + 2 * c) / (1 + limit * c / transfer), trainer + c)
        share = min(max(limit * seconds / transfer - 1, 0.0), 1.0)
    # A snapshot is first used at a step after it was sent; then it ages until the next one comes.
    on_the_way = max(1.0, transfer / seconds)
    age = on_the_way + (max(every, on_the_way) - 1) / 2 + ahead * workers - 1
    return Prediction(
        workers, seconds, bound, trainer, scoring, transfer, share, min(age, float(limit))
    )


def enough_workers(work: Work) -> int:
    """How many workers hide all of scoring behind training; more are of no use."""
    return math.ceil(max(work.scoring, work.loading) / (work.training + work.handling))


def least_every(work: Work, workers: int, link: float, ahead: int = 2) -> int:
    """The smallest m with which the weights of so many workers arrive in time (by default bounds)."""
    pace = max(work.training + work.handling, max(work.scoring, work.loading) / workers)
    transfer = workers * work.weights / link
    return max(1, math.ceil(transfer / pace - ahead * workers / 2))


def sentences(work: Work, found: Prediction, link: float, every: int) -> list[str]:
    """What follows for the user."""
    if found.workers == 0:
        return []
    enough, least = enough_workers(work), least_every(work, found.workers, link)
    hides = "1 is enough" if enough == 1 else f"{enough} are enough"
    said = [
        f"{found.workers} scoring worker{'s' * (found.workers > 1)}: a step at the largest k takes "
        f"{found.seconds * 1e3:.2f} ms, without them {work.alone * 1e3:.2f} ms; {_PACE[found.bound]}. "
        f"{hides} to hide scoring behind training; more are of no use."
    ]
    if found.seconds >= work.alone and found.bound != "weights":
        said.append(
            f"Scoring workers do not pay here: to take over a step from one costs the trainer about "
            f"{work.handling * 1e3:.1f} ms."
        )
    megabytes, took = found.workers * work.weights / 1e6, found.transfer * 1e3
    sent = f"Weights: {megabytes:.4g} MB every {every} steps, {took:.4g} ms on the way"
    if found.bound == "weights":
        said.append(
            f"{sent}: too long. The trainer scores {1 - found.by_workers:.0%} of the steps itself. Send "
            f"them every {least} steps or less often, use fewer workers, or a faster link."
        )
    elif least > 1:
        said.append(f"{sent}; sent more often than every {least} steps they would be too slow.")
    else:
        said.append(f"{sent}; they could go out at every step.")
    said.append(
        f"The weights that workers score with are {found.staleness:.0f} steps old on average, and choices "
        "that old may be worse than uniform ones, above all early in training (docs/many-processes.md, "
        "Staleness)."
    )
    return said


_PACE = {
    "training": "training sets the pace",
    "scoring": "the workers set the pace",
    "weights": "the transfer of weights sets the pace",
    "rows": "the transfer of the chosen rows sets the pace",
    "processors": "the processors that all share set the pace",
}
