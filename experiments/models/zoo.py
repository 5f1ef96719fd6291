"""Further target architectures of Figure 2, row 4, with stems for images of 32 x 32.

Widths and depths are those of the published networks; the stem neither strides nor pools, so that a
small image is not worn away before it is looked at. No auxiliary classifiers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.models.layers import Head, conv


class VGG11(nn.Module):
    """VGG-11 with BatchNorm (Simonyan & Zisserman, 2015); 28.15 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for width, pool in (
            (64, True),
            (128, True),
            (256, False),
            (256, True),
            (512, False),
            (512, True),
            (512, False),
            (512, True),
        ):
            convolution = nn.Conv2d(inside, width, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if pool else []
            inside = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(512, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Inverted(nn.Module):
    """MobileNet's block: widen, convolve each channel alone, narrow; a shortcut where sizes agree."""

    def __init__(self, inside: int, outside: int, stride: int, widen: int) -> None:
        super().__init__()
        width = inside * widen
        layers = [_conv6(inside, width, 1)] if widen != 1 else []
        layers += [_conv6(width, width, 3, stride, width)]
        layers += [nn.Sequential(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside))]
        self.layers, self.adds = nn.Sequential(*layers), stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def _conv6(inside: int, outside: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(
        inside, outside, size, stride, (size - 1) // 2, groups=groups, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU6())


class MobileNetV2(nn.Module):
    """Sandler et al., 2018; 2.24 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv6(3, 32, 3)]
        inside = 32
        for widen, width, depth, stride in (
            (1, 16, 1, 1),
            (6, 24, 2, 1),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ):
            for number in range(depth):
                layers.append(Inverted(inside, width, stride if number == 0 else 1, widen))
                inside = width
        self.features = nn.Sequential(*layers, _conv6(inside, 1280, 1))
        self.head = Head(1280, num_classes, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


GROWTH = 32  # channels that each layer of a dense block adds


class Dense(nn.Module):
    """A layer of a dense block: its `GROWTH` channels are added to what came in."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inside),
            nn.ReLU(),
            nn.Conv2d(inside, 4 * GROWTH, 1, bias=False),
            nn.BatchNorm2d(4 * GROWTH),
            nn.ReLU(),
            nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


class DenseNet121(nn.Module):
    """Huang et al., 2017; 6.96 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(3, 64, 3, padding=1)]
        width = 64
        for stage, depth in enumerate((6, 12, 24, 16)):
            if stage:
                layers += [
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                width //= 2
            for _ in range(depth):
                layers.append(Dense(width))
                width += GROWTH
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.head = Head(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
