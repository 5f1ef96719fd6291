"""The cost of scoring, for the ledger: FLOPs counted on a few rows, seconds timed apart from training."""

from __future__ import annotations

import copy
import math
import statistics
import time

import torch
from torch import Generator, Tensor

from rholoss.engine.capture import WARM_UP, Captured
from rholoss.engine.resident import Examples
from rholoss.engine.step import DeviceStep
from rholoss.errors import RholossError
from rholoss.ledger import Ledger
from rholoss.losses import CLASSES, IGNORED
from rholoss.modes import kept_buffers, kept_random_state

FEW = 8  # rows on which FLOPs are counted


class ScoringCost:
    """Keeps the ledger's figures on scoring.

    On the CPU every step times its own scoring. On a GPU the step is one graph with no clock inside: the
    ledger's time is unknown (NaN) until `time` is called, and from then on it is the measured time of one
    step multiplied by the number of scored steps.
    """

    def __init__(self, step: DeviceStep, ledger: Ledger, *, overlap: bool | str) -> None:
        self.step, self.ledger, self.overlap = step, ledger, overlap
        device = step.data.device
        ledger.runs_on(device)
        self._by_step = device.type == "cpu" and not overlap
        if self._by_step:
            step.timed = lambda: ledger.timed(device)
        self._seconds = math.nan  # of one step
        self._counted = False
        self.tell()

    def passes(self) -> tuple[int, int]:
        """How many points a step scores, and how many forward passes of single points that takes."""
        step = self.step
        if not step.runs_model:
            return 0, 0
        points, forwards = step.scoring.passes(step.order.size, step.k)
        return points, forwards * step.draws

    def count_flops(self) -> None:
        """Count FLOPs, once before the first step. Raises if the model has no output for a label."""
        step = self.step
        if self._counted:
            return
        x, y = step.data.batch(telling_rows(step))
        flops = step.count_flops(step.model, x, y)
        if step.runs_model:
            self.ledger.flops_per_example = flops
            self.ledger.scoring_flops = step.scoring.flops(step, x, y)
        self._counted = True

    def time(self, stream: torch.cuda.Stream | None, repeats: int) -> float:
        """Measure the seconds of scoring in one step (`scoring_seconds`), and put them in the ledger."""
        if not self.step.runs_model or self.overlap:
            raise RholossError(
                f"The time of scoring cannot be measured apart: the method is {self.step.method.name!r} "
                f"and overlap={self.overlap!r}. Compare the seconds of whole runs."
            )
        with self.ledger.paused():
            seconds = scoring_seconds(self.step, stream, repeats)
        if self.step.data.device.type == "cuda":
            self._seconds = seconds
            self.tell()
        return seconds

    def tell(self) -> None:
        """Bring the ledger's time of scoring up to date."""
        if not self._by_step and self.step.method.needs:
            num_scored = self.ledger.scored // max(1, self.passes()[0])
            self.ledger.scoring_seconds = self._seconds * num_scored


def telling_rows(step: DeviceStep) -> Tensor:
    """The numbers of a few rows, among them one of the lowest and one of the highest class.

    A pass over these shows whether the model has an output for every label. On a GPU a label without one
    makes the device unusable for the process, and the error does not say which label it was.
    """
    targets = step.data.targets
    rows = torch.arange(min(FEW, len(targets)), device=targets.device)
    if step.task.per_example not in CLASSES or targets.is_floating_point():
        return rows
    if targets.dtype != torch.uint8:  # a byte cannot hold -100
        targets = torch.where(targets == IGNORED, 0, targets)
    label_NL = targets.view(len(targets), -1)
    ends = [label_NL.amin(1).argmin(), label_NL.amax(1).argmax()]
    return torch.cat([torch.stack(ends), rows[2:]])


def scoring_seconds(
    step: DeviceStep, stream: torch.cuda.Stream | None = None, repeats: int = 20
) -> float:
    """The median seconds of gathering, scoring and choosing, run `repeats` times as a graph of their own.

    The candidates are always the same. Counters, buffers, random state and what the scoring option remembers
    are put back afterwards. While it runs it needs memory for one more graph.
    """
    device, counters = step.data.device, step.counters
    rows = torch.arange(step.order.size, device=device)
    index, generator = step.data.ids[: len(rows)], Generator(device).manual_seed(0)

    def body() -> None:
        step.choose(step.model, Examples(index, *step.gather(rows, generator)), generator)

    moved = [counters.not_finite, counters.short, *step.scoring.moved()]
    before = [tensor.clone() for tensor in moved]
    live = None if step.live is None else step.live.model  # moves when it first scores
    of_live = None if live is None else copy.deepcopy(live.state_dict())
    names = [name for name, _ in step.model.named_buffers()]
    captured = Captured(body, device, [generator], stream)
    with kept_buffers(step.model, names), kept_random_state(device, None):
        for _ in range(WARM_UP + 2):
            captured()
        seconds = [_timed(captured, device) for _ in range(repeats)]
    for tensor, value in zip(moved, before, strict=True):
        tensor.copy_(value)  # in place: a graph may hold it
    if live is not None:
        live.load_state_dict(of_live)
    return statistics.median(seconds)


def _timed(run: Captured, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)  # of this device, which need not be the current one
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1000
