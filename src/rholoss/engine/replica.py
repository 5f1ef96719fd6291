"""A copy of a model that scores in its place, in low precision if asked for."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rholoss.engine.copies import Copies
from rholoss.errors import RholossError


class Replica:
    """A copy of a model for scoring, in `dtype`; its BatchNorm layers stay in float32.

    These have momentum 1, so after a forward pass their running statistics are those of the candidates.
    `move_statistics` then moves the model's own as scoring with the model itself would have done
    (`batch_norm='train'`). With `moves=False` it does not.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, moves: bool = True) -> None:
        types = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if types and not types & {torch.float32, dtype}:
            raise RholossError(
                f"`model` is in {', '.join(map(str, types))}, but `overlap`, `Folded(rows=...)` and "
                f"`LowerResolution` score with a copy of it in {dtype}; train a float32 model "
                "(`model.float()`, and precision='bf16' for speed), or leave them out."
            )
        self.model = copy.deepcopy(model).to(dtype)
        # By momentum: statistics of the model, and of the copy. All of one momentum move in one kernel.
        self._moving: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        # `modules()` gives each module once, also one in two places: its momentum must be read before it
        # is set.
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
        """Copy the model's running statistics."""
        self._statistics.copy()

    def refresh_weights(self) -> None:
        """Copy the model's weights."""
        self._weights.copy()

    def move_statistics(self) -> None:
        """Move the model's running statistics by those of the candidates."""
        with torch.no_grad():
            for momentum, (to, by) in self._moving.items():
                torch._foreach_lerp_(to, by, momentum)
