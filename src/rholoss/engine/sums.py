"""Statistics of BatchNorm from sums and sums of squares.

Compiled code computes a variance value by value with a division for each (Welford), which on a GPU can take
longer than reading the values. Sums need no divisions, but lose digits if the mean is far from 0. So they are
taken of the distances from one of the values. (Not from the running mean, which may itself be far off, as in
the first steps.)
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from rholoss.engine.fused import as_class

DIMS = (0, 2, 3)  # all but the channels


class SumsNorm(nn.BatchNorm2d):
    """A `BatchNorm2d` that computes its statistics from sums; `as_sums` turns layers into it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and move the running statistics, as `BatchNorm2d` does."""
        if not self.training or x.ndim != 4 or x.numel() <= x.shape[1]:
            return super().forward(x)  # needs no statistics, or raises the usual error
        wide = torch.promote_types(x.dtype, torch.float32)
        around = x.detach()[0, :, 0, 0].to(wide)
        apart = x.to(wide) - _by_channel(around)
        mean, square = apart.mean(DIMS), (apart * apart).mean(DIMS)
        variance = (square - mean * mean).clamp(min=0.0)
        self._move(around + mean, variance, x.numel() // x.shape[1])
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return (apart * _by_channel(scale) + _by_channel(shift)).to(x.dtype)

    def _move(self, mean: Tensor, variance: Tensor, num: int) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            by: float | Tensor | None = self.momentum
            by = 1.0 / self.num_batches_tracked.to(mean) if by is None else by
            self.running_mean.lerp_(mean.to(self.running_mean), by)
            unbiased = (variance * (num / (num - 1))).to(self.running_var)
            self.running_var.lerp_(unbiased, by)


def _by_channel(values: Tensor) -> Tensor:
    return values[:, None, None]


def as_sums(model: nn.Module, wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """A block in which a model's BatchNorm layers compute their statistics from sums, if `wanted`."""
    norms = [m for m in model.modules() if type(m) is nn.BatchNorm2d] if wanted else []
    return as_class(norms, SumsNorm)
