"""Scoring beside training: the next candidates are scored while this batch trains.

A copy of the model, in low precision if asked for, is refreshed before each step. It scores on a side stream
of lower priority, which fills the parts of the GPU that training leaves idle. So choices are one step old:
made with the weights from before the present update, or with those that are expected after it (`Ahead`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rholoss.engine.replica import Replica
from rholoss.engine.resident import Examples
from rholoss.engine.step import DeviceStep, beside, chosen_rows

Choice = tuple[Examples, Tensor, Tensor, Tensor, Tensor | None]  # the arguments of `next_step`


def next_step(
    candidates: Examples, b: Tensor, score_B: Tensor, mean: Tensor, weight: Tensor | None
) -> list[Tensor]:
    """What the next step reads: index, x, y and score of the chosen rows, the mean, weights if any.

    `b` are the positions of the chosen candidates; `mean` is the one over all candidates that `rank` returns.
    """
    rest = [] if weight is None else [weight]
    return [*chosen_rows(candidates, b, score_B), mean, *rest]


def deliver(waiting: list[Tensor], choice: Choice) -> None:
    """Write a choice to where the next step reads it; compiled, this makes no copy in between."""
    for place, tensor in zip(waiting, next_step(*choice), strict=True):
        place.copy_(tensor)


class OverlappedStep:
    """A step that trains on the choice made during the step before, and scores the next on a side stream."""

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        self.replica = step.scoring.replica(step) or Replica(step.copied, step.low)
        priority = step.tuning.side_priority
        self.side = (
            torch.cuda.Stream(step.data.device, priority=priority) if _is_cuda(step) else None
        )
        self.waiting: list[Tensor] = []  # the choice for the next step, as `next_step` returns it
        self.deliver = step.wrap(deliver)

    def prime(self) -> None:
        """Choose the first batch, before there is a step to do it beside."""
        if self.step.ahead is not None:
            self.step.ahead.stand()
        self.replica.refresh_statistics()
        self.replica.refresh_weights()
        self.waiting = [tensor.clone() for tensor in next_step(*self._choose_next())]

    def __call__(self) -> None:
        """Train on the batch that was chosen, and choose the next one meanwhile."""
        index, x, y, score, mean, *weight = self.waiting
        training = Examples(index, x, y)
        self.replica.refresh_statistics()  # now, because the training pass moves them
        refreshed = torch.cuda.Event() if self.side is not None else None
        with beside(self.side):
            self.refresh_weights()  # the optimizer, which moves them, waits for `refreshed`
            if refreshed is not None:
                refreshed.record()
            choice = self._choose_next()
        self.step.learn(training, weight[0] if weight else None, score, mean, refreshed)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        if self.step.scorer.batch_norm == "train":
            self.replica.move_statistics()
        self.deliver(self.waiting, choice)

    def refresh_weights(self) -> None:
        """Copy the model's weights, or with `Ahead` the weights that the update is expected to leave."""
        if self.step.ahead is not None:
            self.step.ahead.look()
        self.replica.refresh_weights()

    def _choose_next(self) -> Choice:
        generator = self.step.generator()
        candidates = self.step.take(self.step.order, generator)
        selection, score_B, mean = self.step.choose(self.replica.model, candidates, generator)
        return candidates, selection.position, score_B, mean, selection.weight


def _is_cuda(step: DeviceStep) -> bool:
    return step.data.device.type == "cuda"
