"""An estimate of the weights that the present update will leave, made before the update is done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# The share of the last update that the next one is expected to repeat. With the usual momentum of 0.9 it
# repeats nine tenths of the part that was not noise.
REPEATED = 0.75


def go_on(now: list[Tensor], before: list[Tensor], ahead: list[Tensor]) -> None:
    """Set `ahead` to the weights `now`, moved on as they moved since `before`; then `before` to `now`."""
    torch._foreach_copy_(ahead, before)  # in place, because weights may be large
    torch._foreach_lerp_(ahead, now, 1 + REPEATED)
    torch._foreach_copy_(before, now)


class Ahead:
    """A copy of a model whose weights are nearly one update further on: the last update is extrapolated.

    With momentum an update is mostly like the one before. Buffers and weights that are not trained are shared
    with the model.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        fixed = [*model.buffers(), *(w for w in model.parameters() if not w.requires_grad)]
        self.model = copy.deepcopy(model, {id(tensor): tensor for tensor in fixed})
        self._now = [weight.detach() for weight in trained]
        copies = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._ahead = [weight.detach() for weight in copies]
        self.before = [weight.clone() for weight in self._now]
        self.go_on: Callable[..., Any] = go_on

    def stand(self) -> None:
        """Set the copy to the model's present weights: there is no update to look ahead to."""
        for places in (self._ahead, self.before):
            torch._foreach_copy_(places, self._now)

    def look(self) -> None:
        """Set the copy to the weights that the present update is expected to leave."""
        self.go_on(self._now, self.before, self._ahead)
