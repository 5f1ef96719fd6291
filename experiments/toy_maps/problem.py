"""A two-dimensional problem whose points are of four known kinds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

KINDS = ("redundant", "useful", "noisy", "outlying")
SHARES = (0.70, 0.15, 0.10, 0.05)
BULKS = np.array([[-2.5, -1.5], [2.5, -1.5]])  # of class 0 and class 1, far apart: soon learnt
BULK_SPREAD = 0.7
NUM_ISLANDS, ISLAND_Y, ISLAND_SPREAD = 6, 2.5, 0.22  # a row of small ones, classes in turn
RING = (5.2, 6.5)  # radii between which the outliers lie


@dataclass(frozen=True)
class Plane:
    """Points x [N, 2], labels y [N], and the number of their kind [N]."""

    x: Tensor
    y: Tensor
    kind: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def dataset(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)


def make(num: int, seed: int, shares: tuple[float, ...] = SHARES) -> Plane:
    """`num` points: most in two bulks, some on islands, some of both wrongly labelled, some far away."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(len(KINDS), size=num, p=np.array(shares) / sum(shares))
    y = rng.integers(2, size=num)
    x = BULKS[y] + BULK_SPREAD * rng.standard_normal((num, 2))
    island = _islands(y, rng) + ISLAND_SPREAD * rng.standard_normal((num, 2))
    angle, radius = rng.uniform(0, 2 * np.pi, num), rng.uniform(*RING, num)
    ring = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    # Wrong labels are everywhere: on the islands as often as in the bulks.
    wrong_there = (kind == 2) & (rng.random(num) < shares[1] / (shares[0] + shares[1]))
    on_island = (kind == 1) | wrong_there
    x = np.where(on_island[:, None], island, np.where((kind == 3)[:, None], ring, x))
    y = np.where(kind == 2, 1 - y, y)  # labels of outliers are drawn as they are: a coin toss
    return Plane(
        torch.from_numpy(x).float(), torch.from_numpy(y).long(), torch.from_numpy(kind).long()
    )


def _islands(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A centre for each point: one of the islands of its class, [N, 2]."""
    number = 2 * rng.integers(NUM_ISLANDS // 2, size=len(y)) + y
    centre = np.linspace(-3.5, 3.5, NUM_ISLANDS)[number]
    return np.stack([centre, np.full(len(y), ISLAND_Y)], 1)


def holdout(num: int, seed: int) -> Plane:
    """As noisy as the training points, but without outliers: they say nothing of what is asked."""
    return make(num, seed, (*SHARES[:3], 0.0))


def clean(num: int, seed: int) -> Plane:
    """What is asked: bulks and islands, right labels."""
    return make(num, seed, (*SHARES[:2], 0.0, 0.0))
