"""Irreducible-loss models as the paper fits them: constant rate, the checkpoint of lowest loss, reused.

A model is fitted once for a data set and serves every method, seed and study. The losses are kept in a
folder, and the weights beside them, so that a later process reuses the same ones. The losses alone, a
hundredth as large, are all that most runs need.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.bench.files import keep, read_tensors, reading
from experiments.bench.problems import Problem
from rholoss import Irreducible, Ladder
from rholoss.engine import Evaluator, Resident, Trainer, losses_of
from rholoss.errors import RholossError
from rholoss.il.split import folds
from rholoss.progress import Bar

# What the model is fitted on: a clean holdout, as in the paper's noise runs; one that is as noisy as the
# training labels, as in practice; or the two halves of the training set. LIVE models go on learning, with
# BatchNorm in the mode given here. MIXED_UP is the cross-fit of the authors' code on half of CIFAR, which
# takes places in the half for ids, so that every second point is scored by the model trained on it.
LIVE = {"live": "eval", "live in train mode": "train"}
CROSS_FIT, MIXED_UP = "cross-fit", "cross-fit mixed up"
SOURCES = ("clean holdout", "noisy holdout", CROSS_FIT, MIXED_UP, *LIVE)
# 'small_cnn ladder, clean holdout': first its losses after so many epochs, in the end those of lowest loss.
LADDER, RUNGS = " ladder", (4, 12)
OF_ACCURACY = " of highest accuracy"  # 'small_cnn of highest accuracy, clean holdout'


@dataclass(frozen=True)
class Recipe:
    """AdamW at the paper's defaults; stops when nothing has got better for `patience` epochs.

    `choose` says by what the epoch is chosen whose weights are kept: the lowest 'loss', as in the paper, or
    the highest 'accuracy'.
    """

    epochs: int = 60
    batch_size: int = 320
    learning_rate: float = 1e-3
    patience: int = 20
    choose: str = "loss"


@dataclass(frozen=True)
class Member:
    """A fitted model and how it came about. `loss` is its mean loss on what it was judged by."""

    model: nn.Module
    epoch: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Losses:
    """Irreducible losses of a problem's training set, and what a record says of them."""

    table: Irreducible | Ladder
    about: dict[str, Any]


def parse(il: str) -> tuple[str, str]:
    """('small_cnn', 'cross-fit') of 'small_cnn, cross-fit'; or 'small_cnn of 4 epochs', OF_ACCURACY."""
    model, _, source = il.partition(", ")
    if source not in SOURCES:
        raise RholossError(
            f"`il` is {il!r}; use 'none' or '<model>, <from>', from one of: {'; '.join(SOURCES)}."
        )
    return model, source


def fitted(il: str) -> tuple[str, str]:
    """The same for the models as they are fitted: live ones go on from those of a clean holdout."""
    name, source = parse(il)
    same = {MIXED_UP: CROSS_FIT, **dict.fromkeys(LIVE, "clean holdout")}
    return name, same.get(source, source)


def model_and_recipe(name: str, recipe: Recipe) -> tuple[str, Recipe]:
    """'small_cnn', and the recipe with at most four epochs, of 'small_cnn of 4 epochs'."""
    model, _, length = name.partition(" of ")
    if not length:
        return name, recipe
    if f" of {length}" == OF_ACCURACY:
        return model, replace(recipe, choose="accuracy")
    number, _, word = length.partition(" ")
    if not number.isdigit() or int(number) < 1 or word != "epochs":
        raise RholossError(
            f"The model of `il` is {name!r}; say '{model} of 4 epochs', '{model}{OF_ACCURACY}', or {model!r}."
        )
    return model, replace(recipe, epochs=int(number))


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
    """Train on `data`; keep the weights of the epoch that is best on `judge`, by `recipe.choose`."""
    started = time.perf_counter()
    batch_size = min(recipe.batch_size, len(data))
    per_epoch = len(data) // batch_size
    torch.default_generator.manual_seed(seed)  # not the GPU's, from which other runs are drawing
    trainer = Trainer(
        make_model().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        data, total_steps=recipe.epochs * per_epoch, method="uniform", candidates=batch_size,
        keep=1.0, learning_rate=recipe.learning_rate, precision=precision, compile=compile, seed=seed,
    )  # fmt: skip
    best, best_loss, best_epoch, lowest = trainer.model.state_dict(), float("inf"), 0, float("inf")
    with Bar(recipe.epochs, "irreducible-loss model") as bar:
        for epoch in range(1, recipe.epochs + 1):
            trainer.train(per_epoch)
            loss = float(losses_of(trainer.model, judge, precision=precision).mean())
            bar.advance(note=f"loss {loss:.3f}")
            value = loss if recipe.choose == "loss" else -_accuracy(trainer.model, judge, precision)
            if value < lowest:
                lowest, best_loss, best_epoch = value, loss, epoch
                best = copy.deepcopy(trainer.model.state_dict())
            if epoch - best_epoch >= recipe.patience:
                break
    trainer.flush()
    trainer.model.load_state_dict(best)
    return Member(trainer.model.eval(), best_epoch, best_loss, time.perf_counter() - started)


def _accuracy(model: nn.Module, data: Resident, precision: str | None) -> float:
    num_classes = int(data.targets.max()) + 1
    evaluator = Evaluator(model, data, num_classes=num_classes, precision=precision, capture=False)
    return evaluator().accuracy


class Fits:
    """Losses and fitted models by what they were fitted on, in memory and in `folder`."""

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
        key, (name, source) = f"{dataset} {labels} {part} {il}", parse(il)
        if name.endswith(LADDER):
            return self._ladder(name.removesuffix(LADDER), il, problem, dataset, labels, part)
        if key not in self._losses:
            path, ids = self.path(f"{key} losses", ".npz"), problem.train.ids.cpu()
            if source in LIVE:
                path = None  # its model is needed, which may be fitted again: kept losses are of another
            if path is not None and path.exists():
                self._losses[key] = _load_losses(path, ids)
            else:
                found = self._losses[key] = self._measure(il, problem, dataset, labels, part)
                keep(path, functools.partial(_save_losses, losses=found, ids=ids))
        return self._losses[key]

    def _ladder(self, name: str, il: str, problem: Problem, *where: str) -> Losses:
        names = [*(f"{name} of {epochs} epochs" for epochs in RUNGS), name]
        rungs = [self.losses(f"{each}, {parse(il)[1]}", problem, *where) for each in names]
        seconds = sum(rung.about["seconds"] for rung in rungs)
        about = {**rungs[-1].about, "rungs": [rung.about["loss_on_train"] for rung in rungs]}
        return Losses(Ladder([rung.table for rung in rungs]), {**about, "seconds": seconds})

    def members(
        self, il: str, problem: Problem, dataset: str, labels: str, part: str
    ) -> tuple[Member, ...]:
        """The models behind the losses, fitted anew where the losses alone were kept."""
        found = self._models(il, problem, dataset, labels, part)
        return tuple(member for member, _ in found)

    def _models(
        self, il: str, problem: Problem, dataset: str, labels: str, part: str
    ) -> list[tuple[Member, Tensor]]:
        """Each model with the rows of the training set that it scores."""
        name, source = parse(il)
        train, device = problem.train, problem.train.device
        if source in (CROSS_FIT, MIXED_UP):
            half = _halves(train)
            scored = half if source == CROSS_FIT else _halves(train, seed=1)
            return [
                (
                    self._member(
                        f"{dataset} {labels} {part} {name} fold {number}", name,
                        problem.num_classes, train.take(half[1 - number]), train.take(half[number]), number,
                    ),
                    scored[number],
                )
                for number in range(2)
            ]  # fmt: skip
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
        return [(member, torch.arange(len(train), device=device))]

    def _measure(self, il: str, problem: Problem, dataset: str, labels: str, part: str) -> Losses:
        train = problem.train
        values, members = torch.full((len(train),), torch.nan, device=train.device), []
        for member, rows in self._models(il, problem, dataset, labels, part):
            scored = train.take(rows)
            values[rows] = losses_of(member.model, scored, precision=self.precision)
            members.append(member)
        seconds = sum(member.seconds for member in members)
        table = Irreducible.from_losses(values.cpu(), train.ids.cpu(), seconds=seconds)
        return Losses(table, self._about(members, problem, seconds, values))

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
            name, recipe = model_and_recipe(name, self.recipe)
            path, make = self.path(key, ".pt"), self.models[name]
            if path is not None and path.exists():
                self._members[key] = _load(path, make(num_classes), data.device)
            else:
                member = fit(
                    lambda: make(num_classes), data, judge, recipe,
                    precision=self.precision, compile=self.compile, seed=seed,
                )  # fmt: skip
                keep(path, functools.partial(_save, member=member))
                self._members[key] = member
        return self._members[key]

    def path(self, key: str, suffix: str) -> Path | None:
        """Where something of this recipe is kept."""
        if self.folder is None:
            return None
        recipe = f"{self.recipe.epochs} {self.recipe.batch_size} {self.recipe.learning_rate}"
        return self.folder / (re.sub(r"[^\w-]+", "_", f"{key} {recipe}") + suffix)


def _halves(data: Resident, seed: int = 0) -> list[Tensor]:
    """The rows of each of two folds."""
    fold = torch.as_tensor(folds(data.ids.cpu().numpy(), 2, seed), device=data.device)
    return [(fold == number).nonzero()[:, 0] for number in range(2)]


def save_arrays(path: Path, **arrays: Any) -> None:
    """As .npz, whatever the file's name."""
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _save_losses(path: Path, losses: Losses, ids: Tensor) -> None:
    assert isinstance(losses.table, Irreducible)  # the rungs of a ladder are kept, not itself
    save_arrays(path, loss=losses.table.lookup(ids), ids=ids, about=json.dumps(losses.about))


def _load_losses(path: Path, ids: Tensor) -> Losses:
    with reading(path) as file, np.load(file) as found:
        if not np.array_equal(found["ids"], ids):
            raise RholossError(f"{path} holds losses of other points; delete it to fit them anew.")
        about = json.loads(str(found["about"]))
        table = Irreducible.from_losses(found["loss"], found["ids"], seconds=about["seconds"])
    return Losses(table, about)


def _save(path: Path, member: Member) -> None:
    state = {
        "model": member.model.state_dict(),
        "epoch": member.epoch,
        "loss": member.loss,
        "seconds": member.seconds,
    }
    torch.save(state, path)


def _load(path: Path, model: nn.Module, device: torch.device) -> Member:
    state = read_tensors(path, map_location=device)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.load_state_dict(state["model"])
    return Member(model.eval(), state["epoch"], state["loss"], state["seconds"])
