"""The small CNN that the paper uses for irreducible losses ("similar to LeNet")."""

from __future__ import annotations

import itertools

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three unpadded 3 x 3 convolutions with pooling, three linear layers; 537,610 parameters.

    The order inside a stage is convolution, dropout, pooling, ReLU. No BatchNorm.
    """

    def __init__(self, num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        widths = (3, 64, 128, 256)
        self.features = nn.Sequential(
            *(
                layer
                for inside, outside in itertools.pairwise(widths)
                for layer in (
                    nn.Conv2d(inside, outside, 3),
                    nn.Dropout2d(dropout),
                    nn.MaxPool2d(2),
                    nn.ReLU(),
                )
            )
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(1024, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 256),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(256, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
