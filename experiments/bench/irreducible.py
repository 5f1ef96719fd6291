"""Irreducible-loss models as the paper fits them: constant rate, the checkpoint of lowest loss, reused.

A model is fitted once for a data set and serves every method, seed and study; its weights are kept in a
folder, so that a later process reuses the same ones.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bench.problems import Problem
from rholoss import Irreducible
from rholoss.engine import Evaluator, Resident, Trainer, losses_of
from rholoss.errors import RholossError
from rholoss.il.split import folds
from rholoss.progress import Bar

# Where the model comes from. A clean holdout as in the paper's noise runs; one that is as noisy as the
# training labels, as in life; the two halves of the training set; and a model that goes on learning.
SOURCES = ("clean holdout", "noisy holdout", "cross-fit", "live")


@dataclass(frozen=True)
class Recipe:
    """AdamW at the paper's defaults; stops when the loss has not fallen for `patience` epochs."""

    epochs: int = 60
    batch_size: int = 320
    learning_rate: float = 1e-3
    patience: int = 20


@dataclass(frozen=True)
class Member:
    """A fitted model and how it came about. `loss` is the lowest mean loss on what it was judged by."""

    model: nn.Module
    epoch: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Losses:
    """Irreducible losses of a problem's training set, the models behind them, and what a record says."""

    table: Irreducible
    members: tuple[Member, ...]
    about: dict[str, Any]


def parse(il: str) -> tuple[str, str]:
    """('small_cnn', 'cross-fit') of 'small_cnn, cross-fit'."""
    model, _, source = il.partition(", ")
    if source not in SOURCES:
        raise RholossError(
            f"`il` is {il!r}; use 'none' or '<model>, <from>', from one of: {'; '.join(SOURCES)}."
        )
    return model, source


def fit(
    make_model: Callable[[], nn.Module],
    data: Resident,
    judge: Resident,
    recipe: Recipe,
    *,
    precision: str | None = None,
    compile: bool = False,
    seed: int = 0,
) -> Member:
    """Train on `data`; keep the weights of the epoch with the lowest loss on `judge`."""
    started = time.perf_counter()
    batch_size = min(recipe.batch_size, len(data))
    per_epoch = len(data) // batch_size
    torch.manual_seed(seed)
    trainer = Trainer(
        make_model().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        data, total_steps=recipe.epochs * per_epoch, method="uniform", candidates=batch_size,
        keep=1.0, learning_rate=recipe.learning_rate, precision=precision, compile=compile, seed=seed,
    )  # fmt: skip
    best, best_loss, best_epoch = trainer.model.state_dict(), float("inf"), 0
    with Bar(recipe.epochs, "irreducible-loss model") as bar:
        for epoch in range(1, recipe.epochs + 1):
            trainer.train(per_epoch)
            loss = float(losses_of(trainer.model, judge, precision=precision).mean())
            bar.advance(note=f"loss {loss:.3f}")
            if loss < best_loss:
                best_loss, best_epoch = loss, epoch
                best = copy.deepcopy(trainer.model.state_dict())
            if epoch - best_epoch >= recipe.patience:
                break
    trainer.flush()
    trainer.model.load_state_dict(best)
    return Member(trainer.model.eval(), best_epoch, best_loss, time.perf_counter() - started)


class Fits:
    """Fitted models by what they were fitted on, in memory and in `folder`."""

    def __init__(
        self,
        models: Mapping[str, Callable[..., nn.Module]],
        folder: Path | None,
        recipe: Recipe,
        *,
        precision: str | None,
        compile: bool,
    ) -> None:
        self.models, self.folder, self.recipe = models, folder, recipe
        self.precision, self.compile = precision, compile
        self._members: dict[str, Member] = {}
        self._losses: dict[str, Losses] = {}

    def losses(self, il: str, problem: Problem, dataset: str, labels: str, part: str) -> Losses:
        """Irreducible losses of a problem's training set, with its labels as they are trained on."""
        key = f"{dataset} {labels} {part} {il}"
        if key not in self._losses:
            self._losses[key] = self._measure(il, problem, dataset, labels, part)
        return self._losses[key]

    def _measure(self, il: str, problem: Problem, dataset: str, labels: str, part: str) -> Losses:
        name, source = parse(il)
        train, device = problem.train, problem.train.device
        values = torch.full((len(train),), torch.nan, device=device)
        if source == "cross-fit":
            fold = torch.as_tensor(folds(train.ids.cpu().numpy(), 2), device=device)
            members = []
            for number in range(2):
                seen, scored = (
                    train.take((fold == n).nonzero()[:, 0]) for n in (1 - number, number)
                )
                fold_name = f"{dataset} {labels} {part} {name} fold {number}"
                member = self._member(fold_name, name, problem.num_classes, seen, scored, number)
                values[fold == number] = losses_of(member.model, scored, precision=self.precision)
                members.append(member)
        else:
            # With a clean holdout there is one model for all label sets, fitted and chosen where labels
            # are clean; the authors chose it on the (clean) test set, which stays untouched here.
            noisy = source == "noisy holdout"
            holdout = problem.noisy_holdout if noisy else problem.holdout
            if holdout is None:
                raise RholossError(
                    f"`il` is {il!r}, but with part={part!r} nothing is held out; use 'cross-fit'."
                )
            judge = train if noisy else problem.clean
            fit_name = f"{dataset} {labels if noisy else 'clean'} {part} {name}"
            member = self._member(fit_name, name, problem.num_classes, holdout, judge, 0)
            values[:] = losses_of(member.model, train, precision=self.precision)
            members = [member]
        seconds = sum(member.seconds for member in members)
        table = Irreducible.from_losses(values.cpu(), train.ids.cpu(), seconds=seconds)
        return Losses(table, tuple(members), self._about(members, problem, seconds, values))

    def _about(
        self, members: list[Member], problem: Problem, seconds: float, values: Tensor
    ) -> dict[str, Any]:
        tests = [
            Evaluator(
                member.model,
                problem.test,
                num_classes=problem.num_classes,
                precision=self.precision,
                capture=False,
            )()
            for member in members
        ]
        return {
            "epochs": [member.epoch for member in members],
            "accuracy": [round(100 * test.accuracy, 2) for test in tests],
            "loss_on_train": round(float(values.mean()), 4),
            "seconds": round(seconds, 2),
        }

    def _member(
        self, key: str, name: str, num_classes: int, data: Resident, judge: Resident, seed: int
    ) -> Member:
        if key not in self._members:
            path = None
            if self.folder is not None:
                path = self.folder / (
                    re.sub(r"[^\w-]+", "_", f"{key} {self._recipe_name()}") + ".pt"
                )
            make = self.models[name]
            if path is not None and path.exists():
                self._members[key] = _load(path, make(num_classes), data.device)
            else:
                member = fit(
                    lambda: make(num_classes), data, judge, self.recipe,
                    precision=self.precision, compile=self.compile, seed=seed,
                )  # fmt: skip
                if path is not None:
                    _save(path, member)
                self._members[key] = member
        return self._members[key]

    def _recipe_name(self) -> str:
        return f"{self.recipe.epochs} {self.recipe.batch_size} {self.recipe.learning_rate}"


def _save(path: Path, member: Member) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    state = {
        "model": member.model.state_dict(),
        "epoch": member.epoch,
        "loss": member.loss,
        "seconds": member.seconds,
    }
    torch.save(state, temporary)
    temporary.replace(path)


def _load(path: Path, model: nn.Module, device: torch.device) -> Member:
    state = torch.load(path, map_location=device, weights_only=True)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.load_state_dict(state["model"])
    return Member(model.eval(), state["epoch"], state["loss"], state["seconds"])
