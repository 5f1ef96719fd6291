"""One run in progress, trained by the engine; its state can be saved and continued from."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from experiments.bench.adapters import Compiled
from experiments.bench.cell import Cell
from experiments.bench.watch import Shares, Watched
from experiments.models import MODELS
from rholoss import LiveIrreducible, annealed, constant
from rholoss.engine import Evaluation, Evaluator, Trainer, adamw
from rholoss.engine.trainer import WINDOW
from rholoss.engine.tuning import FASTER
from rholoss.errors import RholossError, TooFewFiniteScoresError

if TYPE_CHECKING:
    from experiments.bench.run import Bench

CHUNK = 50  # steps of one run before the next one has its turn
COMPILED = ("resnet18", "small_cnn")  # the others train too shortly to repay minutes of compiling


class Run:
    """One cell in progress."""

    def __init__(self, bench: Bench, cell: Cell) -> None:
        self.bench, self.cell, self.problem = bench, cell, bench.problem(cell)
        losses, self.started = bench.losses(cell), time.perf_counter()
        self.il_about = None if losses is None else losses.about
        self.precision = bench.precision
        self.steps_per_epoch = bench.steps_per_epoch(cell)
        self.stream = torch.cuda.Stream() if bench.cuda else None
        self.evals: list[tuple[int, float]] = []
        self.il_evals: list[tuple[int, float]] = []
        self.error: str | None = None
        self.resumed = 0  # times that it was cut off and gone on with
        self.last: Evaluation | None = None
        self._looking_at: int | None = None  # the step of an evaluation that was not read yet
        total = bench.steps(cell)
        # Made on the host. The GPU's generator is not seeded, because other runs are drawing from it.
        torch.default_generator.manual_seed(cell.seed)
        model = MODELS[cell.model](self.problem.num_classes)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.watched = Watched(model, cell.n_b)
        source, svp = bench.irreducible(cell), cell.method == "svp"
        compiled = bench.compile and cell.model in COMPILED
        self.trainer = Trainer(
            self.watched,
            bench.core_set(cell) if svp else self.problem.train,
            total_steps=total,
            method="uniform" if svp else cell.method,
            irreducible=source,
            candidates=cell.n_b if svp else cell.n_B,  # nothing is left to choose in a core-set
            keep=1.0 if svp else cell.n_b / cell.n_B,
            optimizer=functools.partial(_adamw, weight_decay=cell.weight_decay),
            learning_rate=cell.learning_rate,
            batch_norm=cell.batch_norm,
            precision=bench.precision,
            compile=compiled,
            tuning=FASTER if compiled else None,
            schedule=annealed(total) if cell.schedule == "annealed" else constant(),
            seed=cell.seed,
        )
        if self.trainer.k != cell.n_b:
            raise RholossError(
                f"n_b={cell.n_b} of n_B={cell.n_B} gives {self.trainer.k} rows, as `keep` is a share; choose "
                "another n_B."
            )
        self.picked = Shares(self.watched, self.problem, cell.epochs, self.steps_per_epoch)
        self.trainer.on_flush.append(self.picked)
        self.shares, self.ledger = self.picked.result, self.trainer.ledger
        self.evaluate = self._evaluator(Compiled(model) if compiled else model)
        live = isinstance(source, LiveIrreducible)
        self.evaluate_il = self._evaluator(source.model) if live else None
        if self.stream is not None:  # all of this was made on another one
            self.stream.wait_stream(torch.cuda.current_stream())

    def _evaluator(self, model: nn.Module) -> Evaluator:
        data, classes = self.problem.test, self.problem.num_classes
        return Evaluator(model, data, num_classes=classes, precision=self.bench.precision)

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def total_steps(self) -> int:
        return self.trainer.total_steps

    @property
    def finished(self) -> bool:
        return self.error is not None or self.step == self.total_steps

    def advance(self, steps: int = CHUNK) -> int:
        """Train on, at most to the next evaluation; returns the steps taken.

        An evaluation is read in the next turn, so that other runs have theirs while it is made, and the
        step in which the trainer waits for the device is left for a turn of its own.
        """
        trainer, before = self.trainer, self.trainer.step
        with self._on_stream():
            self._read_look()
            try:
                look = next_look(before, self.steps_per_epoch, self.cell.looks)
                trainer.train(min(steps, look - before, before_waiting(before)))
                if trainer.step == trainer.total_steps:
                    trainer.flush()
            except TooFewFiniteScoresError as problem:  # a run that diverged is a result too
                self.error = str(problem)
                return trainer.step - before
            if trainer.step == look:
                self._begin_look()
            if trainer.step == trainer.total_steps:
                self._read_look()
        return trainer.step - before

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands. An evaluation that was not read yet is made again by who goes on."""
        with self._on_stream():
            return {
                "trainer": self.trainer.state_dict(),
                "evals": self.evals,
                "il_evals": self.il_evals,
                "shares": self.picked.state_dict(),
                "seconds": time.perf_counter() - self.started,
                "resumed": self.resumed,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. A state that does not fit is refused before anything is changed."""
        with self._on_stream():
            self.trainer.load_state_dict(state["trainer"])
            self.picked.load_state_dict(state["shares"])
            self.started = time.perf_counter() - state["seconds"]
            self.resumed = state["resumed"] + 1
            # An evaluation at this very step is made again: the interrupted one may have been incomplete.
            step, per_epoch, looks = self.step, self.steps_per_epoch, self.cell.looks
            self.evals, self.il_evals = (
                [(at, value) for at, value in state[name] if at < step]
                for name in ("evals", "il_evals")
            )
            if step > 0 and next_look(step - 1, per_epoch, looks) == step:
                self._begin_look()

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def _begin_look(self) -> None:
        self._looking_at = self.trainer.step
        for evaluate in (self.evaluate, self.evaluate_il):
            if evaluate is not None:
                evaluate.begin()

    def _read_look(self) -> None:
        step, self._looking_at = self._looking_at, None
        if step is None:
            return
        self.last = self.evaluate.read()
        self.evals.append((step, round(100 * self.last.accuracy, 2)))
        if self.evaluate_il is not None:
            self.il_evals.append((step, round(100 * self.evaluate_il.read().accuracy, 2)))


def next_look(step: int, steps_per_epoch: int, looks: int) -> int:
    """The step of the next evaluation: `looks` an epoch, evenly, one of them at its end."""
    done = step * looks // steps_per_epoch
    return -(-(done + 1) * steps_per_epoch // looks)


def before_waiting(step: int) -> int:
    """Steps up to the one in which the trainer waits, or that one."""
    return (WINDOW - 1 - step) % WINDOW or 1


def _adamw(parameters: Iterable[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay
    return optimizer
