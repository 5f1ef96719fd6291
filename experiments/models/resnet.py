"""ResNets for images of 32 x 32: a 3 x 3 stem, no max-pooling."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    grows = 1  # channels that come out, for each of the block's width

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inside, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, and a shortcut."""

    grows = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = self.grows * width
        self.convolutions = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = _shortcut(inside, outside, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x))


def _shortcut(inside: int, outside: int, stride: int) -> nn.Sequential:
    if stride == 1 and inside == outside:
        return nn.Sequential()
    convolution = nn.Conv2d(inside, outside, 1, stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """Four stages of blocks, 64 to 512 wide."""

    def __init__(
        self, block: type[Block] | type[Bottleneck], depths: Sequence[int], num_classes: int = 10
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        stages: list[nn.Module] = []
        inside = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for number in range(depth):
                stages.append(block(inside, width, 2 if stage and number == 0 else 1))
                inside = block.grows * width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class ResNet18(ResNet):
    """11,173,962 parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(Block, (2, 2, 2, 2), num_classes)


class ResNet34(ResNet):
    """21.28 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(Block, (3, 4, 6, 3), num_classes)


class ResNet50(ResNet):
    """23.52 M parameters with 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(Bottleneck, (3, 4, 6, 3), num_classes)
