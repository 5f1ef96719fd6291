"""The network of the studies on digits: 784-512-512-512-10, as in the authors' code."""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class MLP(nn.Module):
    """Three hidden layers with ReLU, and dropout after each; 932,362 parameters at a width of 512.

    The paper speaks of two hidden layers in one place and of three layers in another.
    """

    def __init__(self, num_classes: int = 10, width: int = 512, dropout: float = 0.0) -> None:
        super().__init__()
        widths = (784, width, width, width)
        hidden = (
            layer
            for inside, outside in itertools.pairwise(widths)
            for layer in (nn.Linear(inside, outside), nn.ReLU(), nn.Dropout(dropout))
        )
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
