"""A training run that can be cut in two, in one process or in two: for the tests of resuming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rholoss as rho

KINDS = ("rho", "live", "bald", "annealed")


def problem() -> tuple[rho.WithIndex, torch.Tensor]:
    """640 points of four classes, and an irreducible loss each."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (640,), generator=generator)
    x = torch.randn(4, 10, generator=generator)[y] + torch.randn(640, 10, generator=generator)
    return rho.WithIndex(TensorDataset(x, y)), torch.rand(640, generator=generator)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


def selector(kind: str, il: torch.Tensor, folder: Path) -> rho.Selector:
    options: dict[str, Any] = {"irreducible": il, "keep": 0.1, "seed": 3}
    options["log"] = folder / f"{kind}.jsonl"
    if kind == "live":
        options["irreducible"] = rho.LiveIrreducible(network(9), lr=1e-3)
    if kind == "annealed":
        options["schedule"] = rho.annealed(200, switch=0.3, drop=0.1)
    method = {"bald": "bald"}.get(kind, "rho")
    return rho.Selector(method, **options, draws=2, flush_every=10)


class Run:
    """Model, optimizer, selector, order of the data and random state of one run."""

    def __init__(self, kind: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self.data, il = problem()
        self.model = network(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.select = selector(kind, il, folder)
        self.sampler = self.select.batch_sampler(self.data, 64, seed=7)

    def train(self, until: int) -> list[list[int]]:
        """Go on to this step; returns the ids that were chosen at each."""
        chosen = []
        while self.select.step < until:
            for batch in DataLoader(self.data, batch_sampler=self.sampler):
                index, x, y = self.select(self.model, batch)
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                chosen.append(index.tolist())
                if self.select.step == until:
                    break
        return chosen

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "select": self.select.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.select.load_state_dict(state["select"])
        torch.set_rng_state(state["random"])


def main(folder: Path) -> None:
    """The second half of each run, in a process of its own."""
    for kind in KINDS:
        run = Run(kind, folder)
        run.load(folder / f"{kind}.half.pt")
        chosen = run.train(200)
        torch.save({**run.state(), "chosen": chosen}, folder / f"{kind}.end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
