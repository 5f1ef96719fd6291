"""A user's module for the tests of the commands: data sets, models, losses, and some mistakes."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rholoss import WithIndex

FEATURES, CLASSES = 8, 3


class Points(Dataset[tuple[Tensor, int]]):
    """Gaussian classes; `targets` as in torchvision."""

    def __init__(self, rows: int = 240, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        centre = 2 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(9))
        label = torch.randint(CLASSES, (rows,), generator=generator)
        self.x = centre[label] + torch.randn(rows, FEATURES, generator=generator)
        self.targets = label.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], self.targets[index]


class Split:
    holdout = Points(160, seed=1)


train, holdout = Points(), Points(160, seed=1)
keyed = WithIndex(train, ids=[f"file{i}.png" for i in range(len(train))])
unlabelled = [{"x": train.x[i], "y": train.targets[i]} for i in range(len(train))]
other = TensorDataset(train.x[:200], 1 - torch.tensor(train.targets[:200]))
loader = DataLoader(train)
number = 3


def make_train() -> Points:
    return Points()


def changed() -> Points:
    """`train` with one label changed."""
    points = Points()
    points.targets[5] = (points.targets[5] + 1) % CLASSES
    return points


def shorter() -> Points:
    return Points(200)


def missing_file() -> Points:
    raise FileNotFoundError("no data/train.bin here")


def needs_argument(root: str) -> Points:
    return Points(len(root))


def interrupted() -> Points:
    raise KeyboardInterrupt


class small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def target() -> nn.Module:
    hidden = nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU())
    return nn.Sequential(hidden, nn.Dropout(0.1), nn.Linear(64, CLASSES))


ready = small()


class Broken(nn.Module):
    """Fails in its forward pass: a bug in the user's code, not an error of use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("inside the user's forward pass")


def frozen() -> nn.Module:
    return small().requires_grad_(False)


def per_example(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def reduced(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def labels() -> list[int]:
    return train.targets


values = TensorDataset(train.x, train.x[:, 0] * 2)
here = os.path.dirname(os.path.abspath(__file__))
splits = {"train": train, "test": train}
