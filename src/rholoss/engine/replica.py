"""A copy of a model that scores in its place, in low precision if asked for."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss.engine.copies import Copies


class Replica:
    """A copy of a model for scoring. BatchNorm stays in float32.

    Its BatchNorm layers have momentum 1, so that after a forward pass their running statistics are
    those of the candidates, and `move_statistics` can do to the model what scoring with the model
    itself would have done (`batch_norm='train'`), unless it is made with `moves=False`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, moves: bool = True) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        # By momentum: statistics of the model, and of the copy. Moved together, in few kernels.
        self._moving: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        # Each once, also where it is in two places: its momentum is read before it is set.
        for module, original in zip(self.model.modules(), model.modules(), strict=True):
            if isinstance(module, _BatchNorm) and isinstance(original, _BatchNorm):
                module.float()
                if moves and module.momentum is not None and module.track_running_stats:
                    to, by = self._moving.setdefault(module.momentum, ([], []))
                    for name in ("running_mean", "running_var"):
                        to.append(getattr(original, name))
                        by.append(getattr(module, name))
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
            for momentum, (to, by) in self._moving.items():
                torch._foreach_lerp_(to, by, momentum)
