"""Scoring beside training: the next candidates are scored while this batch trains.

A copy of the model, refreshed before each step and in low precision if asked for, scores on a side
stream of lower priority, so that it fills what the training step leaves idle. The choice is one step
stale: by the weights before the update that is under way, or by those that are expected after it (`Ahead`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rholoss.engine.replica import Replica
from rholoss.engine.resident import Examples
from rholoss.engine.step import DeviceStep, beside, chosen_rows

Choice = tuple[Examples, Tensor, Tensor, Tensor, Tensor | None]  # of `next_step`


def next_step(
    candidates: Examples, b: Tensor, score_B: Tensor, mean: Tensor, weight: Tensor | None
) -> list[Tensor]:
    """What the next step reads: index, x, y and score of the chosen rows, mean score (, weight)."""
    rest = [] if weight is None else [weight]
    return [*chosen_rows(candidates, b, score_B), mean, *rest]


def deliver(waiting: list[Tensor], choice: Choice) -> None:
    """Write it to where the next step reads it, without a copy in between once this is compiled."""
    for place, tensor in zip(waiting, next_step(*choice), strict=True):
        place.copy_(tensor)


class OverlappedStep:
    """`DeviceStep.select`, one step stale, with scoring on a side stream."""

    def __init__(self, step: DeviceStep, dtype: torch.dtype) -> None:
        self.step = step
        self.replica = step.scoring.replica(step) or Replica(step.copied, dtype)
        priority = step.tuning.side_priority
        self.side = (
            torch.cuda.Stream(step.data.device, priority=priority) if _is_cuda(step) else None
        )
        self.waiting: list[Tensor] = []  # `next_step` names them
        self.deliver = step.wrap(deliver)

    def prime(self) -> None:
        """Choose the first batch."""
        if self.step.ahead is not None:
            self.step.ahead.stand()
        self.replica.refresh_statistics()
        self.replica.refresh_weights()
        self.waiting = [tensor.clone() for tensor in next_step(*self._choose_next())]

    def __call__(self) -> None:
        """Train on what was chosen, and choose the next."""
        index, x, y, score, mean, *weight = self.waiting
        training = Examples(index, x, y)
        self.replica.refresh_statistics()  # which the training pass moves
        refreshed = torch.cuda.Event() if self.side is not None else None
        with beside(self.side):
            self.refresh_weights()  # which the optimizer moves, so it waits for this
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
        """Take over the model's weights, or where they are on their way to."""
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
