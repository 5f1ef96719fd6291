"""The weights that an update under way will leave behind, as far as one can tell before it is done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# How much of the last update the next one is expected to repeat. With the usual momentum that is nine tenths
# of what was not noise in it.
REPEATED = 0.75


def go_on(now: list[Tensor], before: list[Tensor], ahead: list[Tensor]) -> None:
    """Move each weight on as it last moved, into `ahead`; and `before` is now."""
    torch._foreach_copy_(ahead, before)  # all in place: weights may be large
    torch._foreach_lerp_(ahead, now, 1 + REPEATED)
    torch._foreach_copy_(before, now)


class Ahead:
    """A copy of a model, nearly one update further on than the model: the last update is taken to go on.

    With momentum it mostly does. Buffers, and weights that are not trained, are the model's own.
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
        """No update is under way: be where the model is."""
        for places in (self._ahead, self.before):
            torch._foreach_copy_(places, self._now)

    def look(self) -> None:
        """Be where the update under way is expected to lead."""
        self.go_on(self._now, self.before, self._ahead)
