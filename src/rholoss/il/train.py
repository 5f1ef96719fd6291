"""Train one irreducible-loss model and keep its weights of lowest loss on the points to be scored."""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, nn
from torch.utils.data import DataLoader

from rholoss import losses
from rholoss.errors import RholossError
from rholoss.il.points import Loading, Points, about_model, batches, loader_of
from rholoss.il.score import evaluating, losses_of
from rholoss.il.split import Member
from rholoss.il.views import evenly, seed_all
from rholoss.modes import check_materialised
from rholoss.optimizers import MakeOptimizer, new_optimizer
from rholoss.progress import Bar

MakeModel = Callable[[], nn.Module]
NOTHING = (math.inf, math.inf)  # what `mean_loss` returns if no loss is finite
LOOK_EVERY = 50  # steps between two checks of the training loss, which wait for the device


@dataclass(frozen=True)
class Settings:
    """How a model is trained."""

    loss: losses.LossFunction
    make_optimizer: MakeOptimizer
    epochs: int
    patience: int | None
    check_rows: int | None
    loading: Loading
    scoring: Loading  # the same, for points that are only scored


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with PyTorch's defaults, as the paper has it."""
    return torch.optim.AdamW(parameters)


class Factory:
    """Makes the models, each with its member's seed, and checks that they share no weights."""

    def __init__(self, make_model: MakeModel, device: torch.device) -> None:
        if isinstance(make_model, nn.Module):
            raise RholossError(
                f"`make_model` is a {type(make_model).__name__} itself; give a function that makes a new "
                "model at each call, as in `lambda: SmallModel()`."
            )
        self.make_model, self.device = make_model, device
        # Of modules, because weak references to parameters would keep torch from swapping their tensors.
        self.made: list[weakref.ref[nn.Module]] = []

    def __call__(self, member: Member) -> nn.Module:
        """A new model on the device."""
        seed_all(member.seed)
        return self.make().to(self.device)

    def make(self) -> nn.Module:
        """A new model where `make_model` left it."""
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise RholossError(
                f"`make_model` returned a {type(model).__name__}; it must return a torch.nn.Module."
            )
        check_materialised(model, "make_model")
        trained = trained_parameters(model)
        if not trained:
            raise RholossError(
                "The model that `make_model` returned has no parameters to train; to score points with "
                "a model that is fitted already, use `rholoss.score_irreducible`."
            )
        living = [module for ref in self.made if (module := ref()) is not None]
        known = {id(p) for module in living for p in module.parameters(recurse=False)}
        if any(id(p) in known for p in trained):
            raise RholossError(
                "`make_model` returned weights that it had returned before, so one fold would be scored "
                "by a model that was trained on it. Make a new model at each call, as in "
                "`lambda: SmallModel()`."
            )
        self.made += [weakref.ref(module) for module in model.modules()]
        return model


@dataclass(frozen=True)
class Work:
    """What `fit_irreducible` has to do."""

    data: Any
    points: Points
    members: list[Member]
    settings: Settings
    factory: Factory
    labels: Any
    keep_weights: bool


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that an optimizer gets."""
    return [p for p in model.parameters() if p.requires_grad]


def fit_member(
    model: nn.Module, data: Any, points: Points, member: Member, settings: Settings, bar: Bar
) -> dict[str, Any]:
    """Train the model; returns the best weights, on the CPU, and how they came about."""
    started, loading = time.perf_counter(), settings.loading
    shuffle = Generator().manual_seed(member.seed)
    train = loader_of(data, member.train, loading, shuffle)
    checked = checked_points(member.score, settings.check_rows)
    check = loader_of(points.view, points.position[checked], settings.scoring)
    optimizer = new_optimizer(settings.make_optimizer, trained_parameters(model))
    seed_all(member.seed)
    best, state, best_epoch, epoch = NOTHING, {}, 0, 0
    for epoch in range(1, settings.epochs + 1):
        train_epoch(model, optimizer, train, settings.loss, loading.device, bar, epoch)
        found = mean_loss(model, check, settings.loss, loading.device, bar)
        if found < best:
            best, state, best_epoch = found, cpu_copy(model.state_dict()), epoch
        lowest = f"lowest {best[1]:.4f} at epoch {best_epoch}"
        bar.advance(0, f"epoch {epoch}, loss {found[1]:.4f}, {lowest}")
        if settings.patience is not None and epoch - best_epoch >= settings.patience:
            break
    if not state:
        raise RholossError(
            f"The model never had a finite loss on the points to be scored in {epoch} epochs. Lower the "
            "learning rate (`optimizer=`, --lr), or look for NaN in these points."
        )
    model.load_state_dict(state)
    return {
        "state": state,
        "loss": best[1],
        "epoch": best_epoch,
        "epochs": epoch,
        "seconds": time.perf_counter() - started,
        "model": about_model(model),
    }


def rows_to_visit(member: Member, settings: Settings) -> int:
    """How many rows pass through the model if it is not stopped early."""
    checked = checked_points(member.score, settings.check_rows)
    return settings.epochs * (len(member.train) + len(checked))


def checked_points(places: np.ndarray, check_rows: int | None) -> np.ndarray:
    """All places, or so many of them, evenly spaced."""
    if check_rows is None or check_rows >= len(places):
        return places
    return places[evenly(len(places), check_rows)]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    loss: losses.LossFunction,
    device: torch.device,
    bar: Bar,
    epoch: int,
) -> None:
    """One pass over the training rows."""
    model.train()
    total, seen = torch.zeros((), device=device), 0
    for step, (rows, batch) in enumerate(batches(loader, device)):
        with torch.enable_grad():
            mean = losses.check_per_example(loss(model, batch), rows).mean()
            optimizer.zero_grad()
            mean.backward()
        optimizer.step()
        total, seen = total + mean.detach().float() * rows, seen + rows
        note = None
        if step % LOOK_EVERY == 0 or step == len(loader) - 1:
            running = float(total) / seen
            if not math.isfinite(running):
                raise RholossError(
                    f"The training loss of the irreducible-loss model is {running} in epoch {epoch}, by "
                    f"step {step}. Lower the learning rate (`optimizer=`, --lr), or look for NaN in `data`."
                )
            note = f"epoch {epoch}, training loss {running:.4f}"
        bar.advance(rows, note)


def mean_loss(
    model: nn.Module,
    loader: DataLoader[Any],
    loss: losses.LossFunction,
    device: torch.device,
    bar: Bar,
) -> tuple[float, float]:
    """How many losses are not finite, and the mean of the others, in eval mode; `NOTHING` if none is finite.

    Of two such pairs the lower one is better: a model with infinite losses must not win by a lower mean
    of the other points.
    """
    total, finite, rows = 0.0, 0, 0
    with evaluating(model):
        for loss_B in losses_of(model, loader, loss, device):
            usable = loss_B[loss_B.isfinite()]
            total, finite = total + float(usable.double().sum()), finite + len(usable)
            rows += len(loss_B)
            bar.advance(len(loss_B))
    return (rows - finite, total / finite) if finite else NOTHING


def cpu_copy(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict on the CPU."""
    return {
        key: value.detach().cpu().clone()
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for key, value in state.items()
    }
