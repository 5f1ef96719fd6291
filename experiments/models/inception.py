"""GoogLeNet and Inception-v3 with stems for images of 32 x 32. No auxiliary classifiers."""

from __future__ import annotations

from torch import Tensor, nn

from experiments.models.layers import Branches, Head, conv


def _module(
    inside: int, one: int, narrow: int, three: int, few: int, five: int, pool: int
) -> Branches:
    """GoogLeNet's module; its 5 x 5 branch has 3 x 3 kernels, as the networks with BatchNorm do."""
    return Branches(
        conv(inside, one, 1),
        nn.Sequential(conv(inside, narrow, 1), conv(narrow, three, 3, padding=1)),
        nn.Sequential(conv(inside, few, 1), conv(few, five, 3, padding=1)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inside, pool, 1)),
    )


class GoogLeNet(nn.Module):
    """Szegedy et al., 2015, with BatchNorm; 5.49 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 192, 3, padding=1),
            _module(192, 64, 96, 128, 16, 32, 32),
            _module(256, 128, 128, 192, 32, 96, 64),
            nn.MaxPool2d(3, 2, 1),
            _module(480, 192, 96, 208, 16, 48, 64),
            _module(512, 160, 112, 224, 24, 64, 64),
            _module(512, 128, 128, 256, 24, 64, 64),
            _module(512, 112, 144, 288, 32, 64, 64),
            _module(528, 256, 160, 320, 32, 128, 128),
            nn.MaxPool2d(2),
            _module(832, 256, 160, 320, 32, 128, 128),
            _module(832, 384, 192, 384, 48, 128, 128),
        )
        self.head = Head(1024, num_classes, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _pooled(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inside, outside, 1))


def _across(inside: int, outside: int, size: int) -> nn.Sequential:
    """1 x size."""
    return conv(inside, outside, (1, size), padding=(0, size // 2))


def _down(inside: int, outside: int, size: int) -> nn.Sequential:
    """size x 1."""
    return conv(inside, outside, (size, 1), padding=(size // 2, 0))


def _a(inside: int, pool: int) -> Branches:
    return Branches(
        conv(inside, 64, 1),
        nn.Sequential(conv(inside, 48, 1), conv(48, 64, 5, padding=2)),
        nn.Sequential(conv(inside, 64, 1), conv(64, 96, 3, padding=1), conv(96, 96, 3, padding=1)),
        _pooled(inside, pool),
    )


def _b(inside: int) -> Branches:
    return Branches(
        conv(inside, 384, 3, 2),
        nn.Sequential(conv(inside, 64, 1), conv(64, 96, 3, padding=1), conv(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _c(inside: int, width: int) -> Branches:
    return Branches(
        conv(inside, 192, 1),
        nn.Sequential(conv(inside, width, 1), _across(width, width, 7), _down(width, 192, 7)),
        nn.Sequential(
            conv(inside, width, 1),
            _down(width, width, 7),
            _across(width, width, 7),
            _down(width, width, 7),
            _across(width, 192, 7),
        ),
        _pooled(inside, 192),
    )


def _d(inside: int) -> Branches:
    return Branches(
        nn.Sequential(conv(inside, 192, 1), conv(192, 320, 3, 2)),
        nn.Sequential(
            conv(inside, 192, 1), _across(192, 192, 7), _down(192, 192, 7), conv(192, 192, 3, 2)
        ),
        nn.MaxPool2d(3, 2),
    )


def _e(inside: int) -> Branches:
    def fork() -> Branches:
        return Branches(_across(384, 384, 3), _down(384, 384, 3))

    return Branches(
        conv(inside, 320, 1),
        nn.Sequential(conv(inside, 384, 1), fork()),
        nn.Sequential(conv(inside, 448, 1), conv(448, 384, 3, padding=1), fork()),
        _pooled(inside, 192),
    )


class InceptionV3(nn.Module):
    """Szegedy et al., 2016; 21.64 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv(3, 192, 3, padding=1),
            _a(192, 32), _a(256, 64), _a(288, 64),
            _b(288),
            _c(768, 128), _c(768, 160), _c(768, 160), _c(768, 192),
            _d(768),
            _e(1280), _e(2048),
        )  # fmt: skip
        self.head = Head(2048, num_classes, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))
