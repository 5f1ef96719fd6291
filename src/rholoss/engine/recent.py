"""Running statistics of BatchNorm that remember less than the layers' own.

They are worked out from how the layers' own have moved, so that a layer need not be told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rholoss.engine.copies import Copies


def remember_less(
    statistics: Tensor,
    running: Tensor,
    before: Tensor,
    kept: Tensor,
    passes: Tensor,
    momentum: float,
) -> None:
    """Move `statistics` [2, C] by the batches that moved the running ones from `before` to `running`.

    In p passes a layer with momentum m keeps (1 - m) ** p of its running statistics; the rest is a mean over
    the new batches, which can therefore be worked out. `kept` is 1 - m and `passes` is p, by channel.
    """
    old = kept**passes
    fresh = (running - old * before) / (1 - old)
    moved = statistics.lerp(fresh, 1 - (1 - momentum) ** passes.to(kept.dtype))
    moved = torch.where(passes > 0, moved, running)  # below 0: other weights were loaded
    statistics.copy_(torch.where(passes == 0, statistics, moved))
    statistics[1].clamp_(min=0.0)  # a variance near 0 may be rounded below it


class RecentStatistics:
    """Statistics [2, C] of the channels of some layers, which each of their passes moves by `momentum`.

    They are written to `statistics`. What fetches the layers' own before each `move` is added to `copies`.
    """

    def __init__(
        self,
        norms: Sequence[nn.BatchNorm2d],
        statistics: Tensor,
        momentum: float,
        copies: Copies,
        wrap: Callable[..., Any],
    ) -> None:
        self.statistics, self.momentum = statistics, momentum
        self._remember_less = wrap(remember_less)
        device, channels = statistics.device, [norm.num_features for norm in norms]
        self._layer = torch.arange(len(norms)).repeat_interleave(torch.tensor(channels)).to(device)
        # A layer without a momentum has the mean over all batches, which is taken as it is.
        kept = [0.0 if norm.momentum is None else 1 - norm.momentum for norm in norms]
        self._kept = torch.tensor(kept, dtype=torch.float32, device=device)[self._layer]
        self._running = torch.zeros_like(statistics)  # the layers' own, and their numbers of passes
        self._passes = torch.zeros(len(norms), dtype=torch.long, device=device)
        own = zip(norms, self._running.split(channels, dim=1), self._passes.split(1), strict=True)
        for norm, running, passes in own:
            copies.add(norm.running_mean, running[0])
            copies.add(norm.running_var, running[1])
            copies.add(norm.num_batches_tracked, passes)
        copies.copy()
        statistics.copy_(self._running)
        self._before, self._counted = self._running.clone(), self._passes.clone()

    def move(self) -> None:
        """Move by what the last passes, if any, have added to the layers' own, as fetched by now."""
        passes = (self._passes - self._counted)[self._layer]
        self._remember_less(
            self.statistics, self._running, self._before, self._kept, passes, self.momentum
        )
        self._before.copy_(self._running)
        self._counted.copy_(self._passes)

    def state(self) -> dict[str, Tensor]:
        """The tensors that a resumed run needs."""
        parts = {"before": self._before, "counted": self._counted}
        return {"statistics": self.statistics, **parts}
