"""Trains one small network for each method on the same candidates and notes what it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rholoss as rho
from experiments.toy_maps.problem import KINDS, Plane, clean, holdout, make

METHODS = ("uniform", "loss", "negative_il", "rho")  # gradient norms rank as losses do: two classes
NUM_POINTS, CANDIDATES, KEEP, LEARNING_RATE = 3200, 160, 0.1, 3e-3
PHASES = ((0, 20), (20, 80), (80, 240), (240, 800))  # steps


def network(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
    )


@dataclass
class Run:
    """Picked rows [steps, k]; of each phase the accuracy (clean test points) and the map at its end."""

    method: str
    picked: Tensor
    accuracy: list[float]
    maps: list[np.ndarray]

    def shares(self, train: Plane) -> list[list[float]]:
        """Of each phase, how much of what was picked is of each kind."""
        kinds = [train.kind[self.picked[a:b]].flatten() for a, b in PHASES]
        return [(torch.bincount(kind, minlength=len(KINDS)) / len(kind)).tolist() for kind in kinds]


def grid(extent: float = 7.0, num: int = 121) -> Tensor:
    """Points of a square, row by row, [num * num, 2]."""
    line = torch.linspace(-extent, extent, num)
    return torch.stack([p.flatten() for p in torch.meshgrid(line, line, indexing="xy")], 1)


def irreducible(train: Plane, seed: int) -> Any:
    """From a network of the same kind, half as wide, on holdout points."""
    held = holdout(NUM_POINTS, 1000 + seed)
    return rho.fit_irreducible(
        lambda: network(32), held.dataset(), score=rho.WithIndex(train.dataset()), epochs=60,
        batch_size=64, seed=seed, device="cpu", progress=False,
    )  # fmt: skip


def train_one(method: str, train: Plane, il: Any, seed: int) -> Run:
    """One network, on the candidates that all methods of this seed see."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    select = rho.Selector(method, irreducible=il, keep=KEEP, seed=seed)
    test, square = clean(4000, 2000 + seed), grid()
    order = torch.Generator().manual_seed(seed)
    picked, accuracy, maps, waiting = [], [], [], []
    for step in range(PHASES[-1][1]):
        if not waiting:
            waiting = list(torch.randperm(len(train), generator=order).split(CANDIDATES))
        rows = waiting.pop()
        index, x, y = select(model, (rows, train.x[rows], train.y[rows]))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        picked.append(index)
        if any(step + 1 == stop for _, stop in PHASES):
            with torch.no_grad():
                accuracy.append(float((model(test.x).argmax(1) == test.y).float().mean()))
                maps.append(model(square).softmax(1)[:, 1].numpy())
    return Run(method, torch.stack(picked), accuracy, maps)


def run_all(seed: int) -> tuple[Plane, dict[str, Run]]:
    """All methods of one seed."""
    train = make(NUM_POINTS, seed)
    il = irreducible(train, seed)
    return train, {method: train_one(method, train, il, seed) for method in METHODS}
