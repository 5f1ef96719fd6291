"""Watches for scores that must not be used, without waiting for the device.

On the CPU an error comes at once. On a device the counts stay there until the next flush.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rholoss.errors import TooFewFiniteScoresError, UnmeasuredLossError


class Guard:
    """Counts candidates without a finite irreducible loss or score, and steps with too few left."""

    def __init__(self) -> None:
        self.not_finite = 0  # candidates that were passed over for their score, as of the last read
        # [3]: irreducible losses, scores, short steps; on the device.
        self._counts: Tensor | None = None
        self._bad_id: Tensor | None = None  # [1], the last of them

    def observe(self, ids: Any, irreducible_B: Tensor | None, score_B: Tensor, enough: int) -> None:
        """Count one step's candidates; `enough` of them must have a finite score."""
        bad_B = score_B == -torch.inf
        num_bad = bad_B.sum()
        short = num_bad > len(score_B) - enough
        num_bad_il = torch.zeros_like(num_bad)
        if irreducible_B is not None:
            bad_il_B = ~irreducible_B.isfinite()
            num_bad_il = bad_il_B.sum()
            if isinstance(ids, Tensor):
                # `index_select`, because `ids[position]` would fetch the position to the host.
                first = bad_il_B.to(torch.uint8).argmax(0, keepdim=True)
                bad_id = ids.to(first.device, non_blocking=True).index_select(0, first)
                old = bad_id if self._bad_id is None else self._bad_id
                self._bad_id = torch.where(num_bad_il > 0, bad_id, old)
        counts = torch.stack([num_bad_il, num_bad, short.long()])
        self._counts = counts if self._counts is None else self._counts + counts

    def read(self) -> None:
        """Fetch the counts and raise if something was wrong. Waits for the device."""
        if self._counts is None:
            return
        num_bad_il, num_bad, num_short = self._counts.tolist()
        self._counts = None
        self.not_finite += num_bad
        if num_bad_il:
            which = "" if self._bad_id is None else f", for instance id {int(self._bad_id)}"
            raise UnmeasuredLossError(
                f"{num_bad_il} candidates had no finite irreducible loss{which}; none of them was "
                "selected. Measure them with `rholoss il score`, or leave them out of the training set."
            )
        if num_short:
            raise TooFewFiniteScoresError(
                f"At {num_short} step(s) fewer candidates had a finite score than are selected: the "
                "training loss is NaN or infinite. Lower the learning rate, clip gradients or look at "
                f"the inputs ({self.not_finite} scores were not finite so far)."
            )
