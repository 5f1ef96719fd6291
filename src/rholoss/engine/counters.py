"""What steps leave on the device for the host to read later, so that no step waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rholoss.errors import TooFewFiniteScoresError


@dataclass
class Noted:
    """What the host has read of the last steps: copies of `Counters`, on the CPU."""

    index: Tensor  # [steps, k], ids of the chosen rows
    score: Tensor  # [steps, k], their scores
    loss: Tensor  # [steps], the training loss
    reducible: Tensor  # [steps], the mean reducible loss of the candidates
    not_finite: int  # candidates passed over so far because their score was not finite
    short: int  # steps so far with fewer finite scores than rows to select
    broken: int  # steps so far whose training loss was not finite

    def error(self, first: int, last: int) -> TooFewFiniteScoresError:
        """What to raise if losses or scores between these steps could not be used."""
        return TooFewFiniteScoresError(
            f"Between step {first} and step {last}, {self.broken} step(s) had a loss that is not finite "
            f"and {self.short} had fewer finite scores than rows to select ({self.not_finite} scores were "
            "not finite so far). Lower the learning rate, or check the inputs for NaN and infinity."
        )


@dataclass
class Counters:
    """What the steps since the last flush did, kept on the device: one row for each of `window` steps.

    The last three fields count over the whole run. A captured step writes to these tensors, so all of them
    are changed in place.
    """

    index: Tensor  # [window, k], ids of the chosen rows
    score: Tensor  # [window, k], their scores
    loss: Tensor  # [window], the training loss
    reducible: Tensor  # [window], the mean reducible loss of the candidates
    row: Tensor  # [1], the row that the next step writes to
    not_finite: Tensor  # candidates passed over because their score was not finite
    short: Tensor  # steps with fewer finite scores than rows to select
    broken: Tensor  # steps whose training loss was not finite

    @classmethod
    def empty(cls, window: int, k: int, device: torch.device) -> Counters:
        """Counters for `window` steps that choose `k` rows each, all zero."""
        return cls(
            torch.zeros(window, k, dtype=torch.long, device=device),
            torch.zeros(window, k, dtype=torch.float32, device=device),
            torch.zeros(window, dtype=torch.float32, device=device),
            torch.zeros(window, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            *(torch.zeros((), dtype=torch.long, device=device) for _ in range(3)),
        )

    def clear(self) -> None:
        """Set all counts to zero."""
        for count in (self.row, self.not_finite, self.short, self.broken):
            count.zero_()

    def record(
        self, index: Tensor, score: Tensor | None, loss: Tensor, mean: Tensor | None = None
    ) -> None:
        """Note one step: the chosen ids [k], their scores [k], the loss, the mean over all candidates."""
        self.index.index_copy_(0, self.row, index[None])
        if score is not None:
            self.score.index_copy_(0, self.row, score[None].float())
        if mean is not None:
            self.reducible.index_copy_(0, self.row, mean[None].float())
        self.loss.index_copy_(0, self.row, loss[None])
        self.broken += ~loss.isfinite()
        self.row += 1

    def guard(self, score_B: Tensor, enough: int, forwarded: Tensor | None = None) -> None:
        """Count scores that are not finite, and note if fewer than `enough` are.

        Only the positions `forwarded` should have a score; None stands for all. This may run at the same
        time as `record` (overlapped scoring), so it leaves `row` alone.
        """
        looked_at = score_B if forwarded is None else score_B.index_select(0, forwarded)
        self.not_finite += (looked_at == -torch.inf).sum()
        self.short += score_B.isfinite().sum() < enough

    def read(self, steps: int) -> Noted:
        """Copy what the last `steps` steps noted to the host and start a new window. Waits for the device."""
        # Copies, also on the CPU: the steps of the next window overwrite these tensors.
        noted = (self.index, self.score, self.loss, self.reducible)
        index, score, loss, reducible = (t[:steps].to("cpu", copy=True) for t in noted)
        counts = (int(count) for count in (self.not_finite, self.short, self.broken))
        self.row.zero_()
        return Noted(index, score, loss, reducible, *counts)
