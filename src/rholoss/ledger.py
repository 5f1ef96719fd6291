"""The ledger: what was scored, what was trained, what it cost, and whether it paid.

Seconds are wall clock. On a GPU scoring is timed by CUDA events that are read later, so that timing never
makes the training wait.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rholoss.errors import RholossError
from rholoss.verdict import Run, Verdict, compared, in_log

BACKWARD_FORWARDS = 2  # a backward pass costs about two forward passes
COUNTS = ("steps", "candidates", "loaded", "trained", "scored", "forwards")
TIMES = ("scoring_seconds", "dry_run_seconds", "seconds", "loading_seconds")


@dataclass
class Ledger:
    """Counts and times of one run. `print(ledger)` gives one line.

    A `Selector` and a `Trainer` keep one, as `.ledger`; there is seldom a reason to make one.

    Attributes:
        steps: steps taken.
        candidates, trained, scored: points seen as candidates, trained on, scored.
        loaded: points that the loader brought; fewer than candidates if the batch sampler chose.
        forwards: forward passes of single points for scoring (several each with Monte-Carlo draws).
        seconds: all time from the first call (or the first batch of a watched loader) to the last
            call, mark or flush, without what was spent in `paused()`.
        scoring_seconds: time spent in `select`, without its first call, the dry run. NaN if it cannot be
            measured apart from training (a step that is one CUDA graph).
        dry_run_seconds: time spent in the dry run.
        loading_seconds: time spent waiting for a watched loader.
        flops_per_example: forward FLOPs of one example, counted at the dry run (None if not scored).
        scoring_flops: the same for a scoring pass, if that is not the model's own on whole inputs.
        il_seconds, il_runs: what the irreducible losses cost, and how many runs share that.
        marks: (step, seconds, value) of each `mark(value)`.
        notes: what `print` adds at the end, for instance that `auto_off` switched scoring off.
    """

    il_seconds: float = 0.0
    il_runs: int = 1
    steps: int = 0
    candidates: int = 0
    loaded: int = 0
    trained: int = 0
    scored: int = 0
    forwards: int = 0
    scoring_seconds: float = 0.0
    dry_run_seconds: float = 0.0
    seconds: float = 0.0
    loading_seconds: float = 0.0
    flops_per_example: float | None = None
    scoring_flops: float | None = None
    marks: list[tuple[int, float, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _now: float | None = field(default=None, repr=False)  # last tick; None: the clock is stopped
    _pauses: int = field(default=0, repr=False)
    _device: torch.device | None = field(default=None, repr=False)  # a GPU, to be waited for
    _events: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.il_runs < 1:
            raise RholossError(
                f"`il_runs` must be at least 1, but is {self.il_runs}: the run itself is one of those "
                "that share the irreducible losses."
            )

    @property
    def _il_share(self) -> float:
        return self.il_seconds / self.il_runs

    def tick(self) -> None:
        """Add the time since the last tick to `seconds`, unless the clock is stopped."""
        if self._now is not None:
            now = time.perf_counter()
            self.seconds += now - self._now
            self._now = now

    def start(self) -> None:
        """Start the clock; if it runs already, tick."""
        self.tick()
        if not self._pauses and self._now is None:
            self._now = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which the clock is stopped, for an evaluation for instance. Waits for the device."""
        self._catch_up()
        ran, self._now = self._now is not None, None
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._now = time.perf_counter() if ran else None

    def runs_on(self, device: torch.device) -> None:
        """Say which device the run is on: `mark` and `paused` wait for a GPU, to count its queued work."""
        if device.type == "cuda":
            self._device = device

    def _catch_up(self) -> None:
        """Tick after the device has finished its queued work, which is part of the run."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        self.tick()

    @contextlib.contextmanager
    def timed(self, device: torch.device, *, dry_run: bool = False) -> Iterator[None]:
        """A block whose time counts as selection.

        Args:
            device: the device of the model; on a GPU events are recorded, which are read later.
            dry_run: whether this is the first call, whose time is kept apart.
        """
        self.start()
        if device.type == "cuda" and not dry_run:
            self.runs_on(device)
            stream = torch.cuda.current_stream(device)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            yield
            end.record(stream)
            self._events.append((start, end))
        else:
            before = self.seconds
            yield
            self.tick()
            if dry_run:
                self.dry_run_seconds += self.seconds - before
            else:
                self.scoring_seconds += self.seconds - before
        self.tick()

    def count(self, candidates: int, loaded: int, trained: int, scored: int, forwards: int) -> None:
        """Count one step: its points, as in the attributes of these names, and its forward passes."""
        self.steps += 1
        self.candidates += candidates
        self.loaded += loaded
        self.trained += trained
        self.scored += scored
        self.forwards += forwards

    def read_events(self) -> None:
        """Add up the times that the device has measured, and tick. Waits for the device."""
        self._add_up()
        self.tick()  # the time that was waited for the device is in `seconds` too

    def _add_up(self) -> None:
        for start, end in self._events:
            end.synchronize()
            self.scoring_seconds += start.elapsed_time(end) / 1000
        self._events = []

    def mark(self, value: float) -> dict[str, Any]:
        """Note the result of an evaluation, with step and time, for `verdict`.

        Args:
            value: an accuracy or another figure of which higher is better.
        """
        self._catch_up()
        self.marks.append((self.steps, self.seconds, float(value)))
        known = float(value) if math.isfinite(value) else None  # JSON has no NaN
        own = {"step": self.steps, "seconds": self.seconds, "value": known}
        return {"type": "mark", **own, "il_seconds": self._il_share}

    @property
    def overhead(self) -> float:
        """The time spent on selection, divided by the time spent on everything else."""
        rest = self.seconds - self.scoring_seconds - self.dry_run_seconds
        return self.scoring_seconds / rest if rest > 0 else 0.0

    def is_dear(self, overheads: Sequence[float], limit: float) -> bool:
        """Whether the mean of the ranks' `overhead` is above `limit`; notes it if so."""
        overhead = sum(overheads) / len(overheads)
        if overhead > limit:
            self.notes.append(
                f"auto_off: selecting cost {overhead:.2f}x everything else, above the {limit:.2f}x "
                f"allowed; uniform from step {self.steps} on"
            )
        return bool(overhead > limit)  # not numpy's, which a state is not to hold

    def charge(self, il_seconds: float) -> None:
        """Set the seconds that irreducible losses in the batches took to make, unless a cost is known."""
        self.il_seconds = self.il_seconds or il_seconds

    @property
    def flops(self) -> float | None:
        """FLOPs of the run: of scoring, and three forwards for each point trained; not a live model's."""
        if self.flops_per_example is None:
            return None
        per_pass = self.flops_per_example if self.scoring_flops is None else self.scoring_flops
        trained = self.flops_per_example * (1 + BACKWARD_FORWARDS) * self.trained
        return per_pass * self.forwards + trained

    def uniform_seconds(self) -> float:
        """Estimate the seconds that the same steps would have taken without selection.

        That is without scoring, and without waiting for candidates that were loaded but not trained on.
        """
        in_vain = 1 - self.trained / self.loaded if self.loaded else 0.0  # of what was loaded
        selecting = self.scoring_seconds + self.dry_run_seconds
        return self.seconds - selecting - self.loading_seconds * in_vain

    def break_even(self) -> float:
        """How many times fewer steps than uniform training selection must need to pay.

        The cost of the irreducible losses is included, shared by `il_runs`.
        """
        uniform = self.uniform_seconds()
        own = self.seconds + self._il_share
        return own / uniform if uniform > 0 else math.inf

    def verdict(
        self, baseline: Ledger | str | os.PathLike[str], target: float | None = None
    ) -> Verdict:
        """Whether this run reached a target sooner than the baseline; `print` it.

        Both runs must have called `mark` at their evaluations.

        Args:
            baseline: the ledger of the other run, or the path of its log.
            target: the figure to reach; by default the baseline's best.
        """
        if isinstance(baseline, Ledger):
            run: Run = baseline.marks, baseline._il_share
        else:
            run = in_log(baseline)
        return compared((self.marks, self._il_share), run, target)

    def __str__(self) -> str:
        self._add_up()
        share = self.scoring_seconds / self.seconds if self.seconds else 0.0
        keep = self.trained / self.candidates if self.candidates else 0.0
        parts = [
            f"steps {self.steps}",
            f"trained {self.trained} of {self.candidates} candidates ({keep:.0%}), {self.scored} scored",
            f"{self.seconds:.1f} s"
            + ("" if math.isnan(share) else f", {share:.0%} of it selecting"),
        ]
        if self.dry_run_seconds > max(1, 0.1 * self.seconds):
            parts.append(f"{self.dry_run_seconds:.1f} s for the first call, with its checks")
        if self.loading_seconds:
            parts.append(f"{self.loading_seconds:.1f} s waiting for data")
        if self.flops is not None:
            parts.append(f"{self.flops:.2e} FLOPs")
        if self.il_seconds:
            parts.append(f"IL {self.il_seconds:.1f} s over {self.il_runs} run(s)")
        if self.scored and math.isfinite(self.break_even()):
            parts.append(f"pays if it needs {self.break_even():.2f}x fewer steps than uniform")
        return " | ".join([*parts, *self.notes])

    def state_dict(self) -> dict[str, Any]:
        """All counts and times so far."""
        self.read_events()
        return {name: getattr(self, name) for name in COUNTS + TIMES} | {
            "marks": [list(mark) for mark in self.marks],
            "notes": list(self.notes),
            "flops_per_example": self.flops_per_example,
            "scoring_flops": self.scoring_flops,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved counts; the time in between does not count."""
        for name in (*COUNTS, *TIMES, "flops_per_example"):
            setattr(self, name, state[name])
        self.scoring_flops = state.get("scoring_flops")
        self.notes = list(state["notes"])
        self.marks = [(int(s), float(t), float(v)) for s, t, v in state["marks"]]
        self._now, self._events = None, []
