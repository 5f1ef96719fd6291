"""What was picked, counted at every step: shares of corrupted, low-relevance and already-correct points.

Whether a pick was classified correctly is read from the forward pass that trains on it, just before the
weights change. This adds no pass, and is the same measure for methods that score and for those that do not.
Predictions stay on the device until the trainer reads its window of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WINDOW = 128  # steps that fit; the trainer reads at least every 100


class Watched(nn.Module):
    """A model that notes what it predicts for the rows that it is trained on."""

    predictions: Tensor
    row: Tensor

    def __init__(self, inner: nn.Module, k: int) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer(
            "predictions", torch.zeros(WINDOW, k, dtype=torch.long), persistent=False
        )
        self.register_buffer("row", torch.zeros(1, dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        if torch.is_grad_enabled():  # scoring and evaluation run without
            self.predictions.index_copy_(0, self.row, logits.detach().argmax(1)[None])
            self.row.add_(1)  # in place: a graph reads it where it is
        return logits

    def read(self, num: int) -> Tensor:
        """Predictions [num, k] of the steps since the last reading, on the host."""
        found = self.predictions[:num].to("cpu", copy=True)  # the next steps overwrite it
        self.row.zero_()
        return found


class Shares:
    """Sums by epoch, fed by the trainer's `on_flush`."""

    def __init__(self, watched: Watched, problem: Any, epochs: int, steps_per_epoch: int) -> None:
        self.watched, self.targets, self.steps_per_epoch = watched, problem.targets, steps_per_epoch
        self.masks = {"corrupted": problem.corrupted, "low_relevance": problem.low_relevance}
        names = [name for name, mask in self.masks.items() if mask is not None]
        self.sums = {name: torch.zeros(epochs) for name in (*names, "correct")}
        self.picks = torch.zeros(epochs)

    def __call__(self, step: int, index: Tensor, losses: Tensor) -> None:
        """Count the steps up to `step`, whose chosen ids are `index` [num, k]."""
        num, k = index.shape
        epoch = torch.arange(step - num, step).div(self.steps_per_epoch, rounding_mode="floor")
        found = {"correct": self.watched.read(num) == self.targets[index]}
        found |= {name: mask[index] for name, mask in self.masks.items() if mask is not None}
        for name, right in found.items():
            self.sums[name].index_add_(0, epoch, right.float().sum(1))
        self.picks.index_add_(0, epoch, torch.full((num,), float(k)))

    def state_dict(self) -> dict[str, Any]:
        """The sums so far. Steps that the trainer has not flushed yet are not in them."""
        return {"sums": self.sums, "picks": self.picks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with these sums."""
        self.sums, self.picks = state["sums"], state["picks"]
        self.watched.row.zero_()

    def result(self) -> dict[str, list[float]]:
        """Share of the picks of each epoch that was trained to its end or in part."""
        done = self.picks > 0
        shares = {name: (sums / self.picks)[done] for name, sums in self.sums.items()}
        return {name: [round(x, 4) for x in values.tolist()] for name, values in shares.items()}
