"""Watches for scores that must not be used, without waiting for the device.

On the CPU an error is raised at once. On a GPU the scores are kept, and examined together at the next
flush: counting them at every step would cost more than the selection itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rholoss.errors import TooFewFiniteScoresError, UnmeasuredLossError


def mean_of_finite(score_B: Tensor) -> Tensor:
    """The mean of the scores that can be used; NaN if there is none. Does not wait for the device."""
    finite = score_B.isfinite()
    return torch.where(finite, score_B, 0.0).sum() / finite.sum()


class Guard:
    """Finds candidates whose irreducible loss or score is not finite, and steps with too few others."""

    def __init__(self) -> None:
        self.not_finite = 0  # candidates that were passed over for their score, as of the last read
        self._waiting: list[tuple[Any, Tensor | None, Tensor, int]] = []

    def observe(self, ids: Any, irreducible_B: Tensor | None, score_B: Tensor, enough: int) -> None:
        """Keep one step's candidates; `enough` of them must have a finite score."""
        self._waiting.append((ids, irreducible_B, score_B, enough))

    def read(self) -> None:
        """Examine what was kept, and raise if something was wrong. Waits for the device."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if len(waiting) == 1 and waiting[0][1] is None and waiting[0][2].min() > -torch.inf:
            return  # the usual case on the CPU, where this runs at every step
        usable = _fetch([score_B for _, _, score_B, _ in waiting])
        self.not_finite += sum(int((~fine).sum()) for fine in usable)
        self._check_irreducible(
            [(ids, loss_B) for ids, loss_B, _, _ in waiting if loss_B is not None]
        )
        enough = [needed for *_, needed in waiting]
        num_short = sum(int(fine.sum()) < k for fine, k in zip(usable, enough, strict=True))
        if num_short:
            raise TooFewFiniteScoresError(
                f"At {num_short} step(s) fewer candidates had a finite score than are selected: the "
                "training loss is NaN or infinite, or no label of the rows counts (all are -100). Lower the "
                "learning rate, clip gradients or look at the inputs and labels "
                f"({self.not_finite} scores were not finite so far)."
            )

    def _check_irreducible(self, kept: list[tuple[Any, Tensor]]) -> None:
        measured = _fetch([loss_B for _, loss_B in kept])
        bad = [
            (ids, ~fine) for (ids, _), fine in zip(kept, measured, strict=True) if not fine.all()
        ]
        if not bad:
            return
        ids, which = bad[-1]
        first = ids[int(which.nonzero()[0])]
        raise UnmeasuredLossError(
            f"{sum(int(which.sum()) for _, which in bad)} candidates had no finite irreducible loss, for "
            f"instance id {int(first) if isinstance(first, Tensor) else first}; none of them was "
            "selected. Measure them with `rholoss il score`, or leave them out of the training set."
        )


def _fetch(values: list[Tensor]) -> list[Tensor]:
    """Which of the values are finite, on the CPU; one copy for all of them."""
    if not values:
        return []
    sizes = [len(value) for value in values]
    return list(torch.cat(values).cpu().isfinite().split(sizes))
