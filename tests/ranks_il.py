"""What each rank does in the tests of irreducible losses over ranks; run as `ranks_task.py` is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_run import CHECKS, PATIENCE, check, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

import rholoss as rho


class Points(Dataset[Any]):
    """Points of three classes, with labels to tell them by or without."""

    def __init__(self, rows: int, seed: int = 0, labelled: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(3, (rows,), generator=generator)
        self.x = torch.randn(rows, 4, generator=generator) + self.y[:, None]
        if labelled:
            self.targets = self.y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def views() -> dict[str, Any]:
    """The same kind of data under all sorts of ids."""
    data, bare = Points(1000), Points(1000, labelled=False)
    names = [f"p{i}" for i in range(1000)]
    return {
        "rows": data,
        "no labels": bare,
        "part": Subset(data, range(100, 400)),
        "wrapped part": rho.WithIndex(Subset(data, range(700, 1000))),
        "keys": rho.WithIndex(data, ids=names),
        "keys, no labels": rho.WithIndex(bare, ids=names),
        "twice": Subset(data, [*range(90), *range(50)]),
    }


SCORE = {"batch_size": 40, "progress": False, "ranks": True}
FIT = {"epochs": 2, "batch_size": 20, "progress": False, "ranks": True}


def fits() -> dict[str, dict[str, Any]]:
    return {
        "holdout": {"data": Points(200, 1), "score": Points(300)},
        "folds": {"data": Points(300), "folds": 3},
    }


def folder() -> Path:
    return Path(sys.argv[3])


def as_plain(il: rho.Irreducible) -> dict[str, Any]:
    labels = None if il.labels is None else torch.from_numpy(il.labels.copy())
    return {"values": il.values.clone(), "labels": labels, "meta": il.meta}


@check
def scored() -> Any:
    model, model.training = network(), True
    found = {}
    for name, data in views().items():
        found[name] = rho.score_irreducible(model, data, out=folder() / name, **SCORE)
    assert model.training
    return {name: as_plain(il) for name, il in found.items()}


@check
def fitted() -> Any:
    found = {}
    for name, options in fits().items():
        il = rho.fit_irreducible(network, **options, out=folder() / name, **FIT)
        found[name] = {**as_plain(il), "weight": il.weights(0)["0.weight"]}
    return found


@check
def failures() -> dict[str, str]:
    last = dist.get_rank() == dist.get_world_size() - 1

    def told(**options: Any) -> str:
        given = {"out": folder() / "failing", "dataset": Points(1000), **SCORE, **options}
        try:
            rho.score_irreducible(given.pop("model", network()), **given)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    other = network()
    if last:
        with torch.no_grad():
            other[0].bias += 1

    def fails(model: nn.Module, batch: Any) -> Tensor:
        if last:
            raise RuntimeError("no memory left")
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return {
        "no out": told(out=None),
        "other model": told(model=other),
        "other data": told(dataset=Points(999 if last else 1000)),
        "broken": told(loss=fails),
    }


@check
def patient() -> Any:
    """One rank fits for two seconds; the process group itself waits for half a second."""

    def slow(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.25 if torch.is_grad_enabled() else 0.0)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    dist.barrier()  # all are here
    older = dist.distributed_c10d._set_pg_timeout  # of which torch 2.15 warns
    set_timeout = getattr(dist, "set_timeout", older)
    set_timeout(timedelta(seconds=0.5))
    try:
        il = rho.fit_irreducible(
            network, Points(80, 1), score=Points(100), loss=slow, out=folder() / "slow", **FIT
        )
        return len(il)
    finally:
        set_timeout(timedelta(seconds=PATIENCE))


def _die_once() -> None:
    """Whichever rank gets here first."""
    with contextlib.suppress(FileExistsError):
        Path(os.environ["KILLED_ONCE"]).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def deadly(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of a process that is killed in the middle of its work: one rank, once."""
    if len(list(Path(os.environ["KILLED_ONCE"]).parent.glob("*/partial/*.part"))) > 3:
        _die_once()
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def deadly_to_fit(model: nn.Module, batch: Any) -> Tensor:
    """The same while a model is fitted, and another is kept already."""
    if torch.is_grad_enabled() and list(Path("il/partial").glob("*.pt")):
        _die_once()
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def slow(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy that leaves time for a kill."""
    time.sleep(0.1)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


train = Points(1000)
small = network()

if __name__ == "__main__":
    run(CHECKS)
