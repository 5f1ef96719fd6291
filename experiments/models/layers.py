"""Layers that several architectures share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]


def conv(
    inside: int, outside: int, size: Size, stride: int = 1, padding: Size = 0
) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    convolution = nn.Conv2d(inside, outside, size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU())


class Branches(nn.Module):
    """Several ways through, side by side; their channels are joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Head(nn.Module):
    """Mean over the image, dropout, a linear layer."""

    def __init__(self, inside: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(inside, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(x.mean((2, 3))))
