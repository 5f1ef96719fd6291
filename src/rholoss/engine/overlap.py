"""Scoring beside training: the next candidates are scored while this batch trains.

A copy of the model, refreshed before each step and in low precision if asked for, scores on a side
stream of lower priority, so that it fills what the training step leaves idle. The choice is one step
stale.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss.engine.copies import Copies
from rholoss.engine.resident import Examples
from rholoss.engine.step import DeviceStep
from rholoss.modes import submodules


class Replica:
    """A copy of a model for scoring. BatchNorm stays in float32.

    Its BatchNorm layers have momentum 1, so that after a forward pass their running statistics are
    those of the candidates, and `move_statistics` can do to the model what scoring with the model
    itself would have done (`batch_norm='train'`).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self._norms: list[tuple[_BatchNorm, _BatchNorm]] = []
        for module, original in zip(submodules(self.model), submodules(model), strict=True):
            if isinstance(module, _BatchNorm) and isinstance(original, _BatchNorm):
                module.float()
                if module.momentum is not None and module.track_running_stats:
                    self._norms.append((module, original))
                    module.momentum = 1.0
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self._weights, self._statistics = Copies(), Copies()
        for own, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            self._weights.add(weight, own)
        for own_buffer, buffer in zip(self.model.buffers(), model.buffers(), strict=True):
            self._statistics.add(buffer, own_buffer)

    def refresh_statistics(self) -> None:
        """Take over the model's running statistics."""
        self._statistics.copy()

    def refresh_weights(self) -> None:
        """Take over the model's weights."""
        self._weights.copy()

    def move_statistics(self) -> None:
        """Let the candidates' statistics move the model's running ones."""
        with torch.no_grad():
            for copied, original in self._norms:
                for name in ("running_mean", "running_var"):
                    getattr(original, name).lerp_(getattr(copied, name), original.momentum)


class OverlappedStep:
    """`DeviceStep.select`, one step stale, with scoring on a side stream."""

    def __init__(self, step: DeviceStep, dtype: torch.dtype) -> None:
        self.step = step
        self.replica = step.scoring.replica(step) or Replica(step.model, dtype)
        self.side = torch.cuda.Stream(step.data.device, priority=0) if _is_cuda(step) else None
        self.waiting: list[
            Tensor
        ] = []  # index, x, y, score of the chosen rows, mean score (, weight)

    def prime(self) -> None:
        """Choose the first batch."""
        self.replica.refresh_statistics()
        self.replica.refresh_weights()
        self.waiting = [tensor.clone() for tensor in self._choose_next()]

    def __call__(self) -> None:
        """Train on what was chosen, and choose the next."""
        index, x, y, score, mean, *weight = self.waiting
        training = Examples(index, x, y)
        self.replica.refresh_statistics()  # which the training pass moves
        refreshed = torch.cuda.Event() if self.side is not None else None
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side) if self.side is not None else contextlib.nullcontext():
            self.replica.refresh_weights()  # which the optimizer moves, so it waits for this
            if refreshed is not None:
                refreshed.record()
            chosen = self._choose_next()
        loss = self.step.learn(training, weight[0] if weight else None, refreshed)
        self.step.note(index, score, loss, mean)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        if self.step.scorer.batch_norm == "train":
            self.replica.move_statistics()
        for waiting, tensor in zip(self.waiting, chosen, strict=True):
            waiting.copy_(tensor)

    def _choose_next(self) -> list[Tensor]:
        generator = self.step.generator()
        candidates = self.step.take(self.step.order, generator)
        selection, score_B, mean = self.step.choose(self.replica.model, candidates, generator)
        b = selection.position
        weight: list[Any] = [] if selection.weight is None else [selection.weight]
        chosen = candidates.take(b)
        return [chosen.index, chosen.x, chosen.y, score_B[b], mean, *weight]


def _is_cuda(step: DeviceStep) -> bool:
    return step.data.device.type == "cuda"
