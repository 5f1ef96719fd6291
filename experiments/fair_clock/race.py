"""Running cells: prepared once, then side by side on one GPU, results written as they finish."""

from __future__ import annotations

import contextlib
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import records
from experiments.datasets import CIFAR_MEAN, CIFAR_STD, cifar10, cifar10n, cifar100
from experiments.fair_clock.arms import ARMS, Arm, Cell, Kind, kinds
from experiments.fair_clock.visits import Visits
from experiments.models import ResNet18, SmallCNN
from rholoss.engine import (
    CropFlip,
    Evaluator,
    Folded,
    Resident,
    Shortlist,
    Trainer,
    fit_ladder,
    fit_resident,
    one_cycle,
)
from rholoss.engine.folded import RECENT
from rholoss.errors import RholossError, TooFewFiniteScoresError
from rholoss.noise import uniform_noise

NUM_VALIDATION = 5000
NOISE_SEED = 2022
IL_RECIPE = {"batch_size": 256, "learning_rate": 4e-3}  # small CNN
CHUNK = 50  # steps of one run before the next one has its turn
LOOKS = 20  # evaluations of a tuning run; the test set is read once
ROOM = 4096  # trainers have room for a multiple of so many steps, so that few shapes are compiled
WARM_SECONDS = 1.5  # of steps before any is timed: an idle GPU takes a while to reach its clock
TIMED_AT = 1e-3  # the highest rate of steps that are timed: what they cost does not depend on it
# Of arms that score with BatchNorm folded in; with 'rows' some candidates' statistics stand for all.
FOLDED: dict[str, dict[str, Any]] = {
    "eval": {},
    "recent": {"momentum": RECENT},
    "following": {"momentum": 0.5, "means": 64},
    "rows": {"rows": 32},
}
LOADERS = {"cifar10": (cifar10, 10), "cifar100": (cifar100, 100)}


class Race:
    """Data, irreducible losses and step times of one data set, made when they are first needed."""

    def __init__(
        self,
        dataset: str = "cifar10",
        root: str | None = None,
        precision: str = "bf16",
        compile: bool = True,
        visits: Path | None = None,
    ) -> None:
        load, self.num_classes = LOADERS[dataset]
        (images, labels), (test_images, test_labels) = load(root)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        common: dict[str, Any] = {"mean": CIFAR_MEAN, "std": CIFAR_STD, "dtype": dtype}
        self.precision, self.compile, self.root = precision, compile, root
        self.visits = visits  # directory for the losses of every visit
        if compile:  # one process, many arms and batch sizes
            torch._dynamo.config.cache_size_limit = 64
        self.train = Resident(images, labels, augment=CropFlip(), **common)
        self.test = Resident(test_images, test_labels, **common)
        self.clean = labels
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.validation = shuffled[:NUM_VALIDATION]
        self._data: dict[Any, tuple[Resident, Resident]] = {}
        self._il: dict[Any, Any] = {}
        self.times: dict[str, float] = {}
        self.failed: dict[Cell, str] = {}  # cells that will have no line, and why

    @contextlib.contextmanager
    def kept(self, cell: Cell) -> Iterator[None]:
        """A block whose errors are printed and noted, so that the other cells go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[cell] = str(error) or type(error).__name__

    def labels(self, name: str) -> np.ndarray:
        if name == "clean":
            return self.clean
        if name == "noise 10 %":
            return uniform_noise(self.clean, self.num_classes, 0.1, seed=NOISE_SEED)[0]
        if self.num_classes != 10:
            raise ValueError(
                f"`labels` is {name!r}, but CIFAR-100 has 'clean' and 'noise 10 %' here."
            )
        return cifar10n(name, self.root)

    def data(self, cell: Cell) -> tuple[Resident, Resident]:
        """What is trained on and what it is judged on. Validation labels are as noisy as the others."""
        key = (cell.labels, cell.split, cell.part)
        if key not in self._data:
            whole = self.train.with_targets(self.labels(cell.labels))
            used = torch.ones(len(whole), dtype=torch.bool)
            if cell.split == "tune":
                used[self.validation] = False
            if cell.part == "half":
                used[1::2] = False
            judged = self.test
            if cell.split == "tune":
                judged = whole.take(self.validation.to(whole.device))
            rows = used.nonzero().flatten().to(whole.device)
            self._data[key] = (whole.take(rows), judged)
        return self._data[key]

    def irreducible(self, cell: Cell) -> Any:
        """Cross-fitted, so that every arm may train on everything; or from the odd half."""
        arm = ARMS[cell.arm]
        key = (cell.labels, cell.split, cell.part, arm.il_epochs, arm.rungs)
        if key not in self._il:
            for _ in range(1 if self._il else 2):  # the first fit only warms up
                self._il[key] = self._fit(cell)
        return self._il[key]

    def _fit(self, cell: Cell) -> Any:
        def make() -> torch.nn.Module:
            return SmallCNN(self.num_classes)

        data, _ = self.data(cell)
        options: dict[str, Any] = {"precision": self.precision, **il_recipe(cell)}
        fit: Any = fit_ladder if "rungs" in options else fit_resident
        if cell.part == "all":
            return fit(make, data, folds=2, **options)
        whole = self.train.with_targets(self.labels(cell.labels))
        odd = torch.arange(len(whole)) % 2 == 1
        if cell.split == "tune":
            odd[self.validation] = False  # whoever chooses among arms has not seen their judge
        rows = odd.nonzero().flatten().to(whole.device)
        return fit(make, whole.take(rows), score=data, **options)

    def trainer(self, cell: Cell, steps: int, capacity: int, arm: Arm | None = None) -> Trainer:
        """A trainer that is to take `steps` steps, and might take `capacity` or some more."""
        arm, (data, _) = arm or ARMS[cell.arm], self.data(cell)
        torch.manual_seed(cell.seed)
        scoring: dict[str, Any] = {}
        if arm.scores:  # what each costs: benchmarks/results/step.md
            options = FOLDED.get(arm.batch_norm)
            by = None if options is None else Folded(**options)
            scoring = {
                "overlap": arm.overlap,
                "batch_norm": "train" if arm.batch_norm in ("train", "rows") else "eval",
                "scoring": Shortlist(arm.shortlist, by=by) if arm.shortlist < 1 else by,
            }
        plan = arm.plan(math.log(self.num_classes)) if arm.plan else None
        trainer = Trainer(
            ResNet18(self.num_classes).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            data,
            total_steps=-(-capacity // ROOM) * ROOM,
            method=arm.method,
            irreducible=self.irreducible(cell) if arm.needs_il else None,
            candidates=cell.n_b * arm.k,
            keep=1 / arm.k,
            precision=self.precision,
            compile=self.compile,
            schedule=arm.schedule(steps),
            catch_up=arm.scores and arm.switch is None,
            plan=Visits(plan) if plan and self.visits else plan,
            seed=cell.seed,
            **scoring,
        )
        trainer.change_length(steps, rate(cell, steps))
        return trainer

    def measure_times(self, cells: list[Cell], steps: int = 300) -> None:
        """Milliseconds of a step, each kind alone on the device: the mean over at least one pass.

        So that what happens once a pass (dealing the rows, asking a plan) is in it.
        """
        for cell in cells:
            with self.kept(cell):
                for kind in kinds(cell):
                    if kind.key not in self.times:
                        self.times[kind.key] = self._measure(cell, kind, steps)
                        print(f"{kind.key}: {self.times[kind.key]:.3f} ms", flush=True)

    def _measure(self, cell: Cell, kind: Kind, steps: int) -> float:
        cell = replace(cell, lr=min(cell.lr, TIMED_AT))  # no run diverges while it is timed
        plan = ARMS[kind.planned].plan if kind.planned else None
        steps = max(steps, len(self.data(cell)[0]) // (kind.n_b * kind.k) + 1)
        how = ("batch_norm", "overlap", "shortlist")
        arm = Arm("", kind.method, kind.k, plan=plan, **{name: getattr(kind, name) for name in how})
        trainer = self.trainer(cell, 10 * steps, 10 * steps, arm)
        trainer.train(30)  # compiled and captured in them
        if trainer.why_eager and self.train.device.type == "cuda":
            raise RholossError(
                f"Steps of {kind.key} are not captured ({trainer.why_eager}), so their times cannot be "
                "compared with others; leave these arms out."
            )
        self._wait()
        started = time.perf_counter()
        while time.perf_counter() - started < WARM_SECONDS and trainer.step < 8 * steps:
            trainer.train(50)
            self._wait()
        started = time.perf_counter()
        trainer.train(steps)
        self._wait()
        return 1000 * (time.perf_counter() - started) / steps

    def _wait(self) -> None:
        if self.train.device.type == "cuda":
            torch.cuda.synchronize(self.train.device)


def il_recipe(cell: Cell) -> dict[str, Any]:
    """How the irreducible losses of the cell are fitted."""
    arm = ARMS[cell.arm]
    return {"epochs": arm.il_epochs, **IL_RECIPE, **({"rungs": arm.rungs} if arm.rungs else {})}


def rate(cell: Cell, steps: int) -> Callable[[int], float]:
    """Up over a tenth of the steps, then down to zero."""
    return one_cycle(cell.lr, steps, warm_up=0.1)


def done(lines: Iterable[dict[str, Any]]) -> set[str]:
    """Keys of the cells that these lines are the results of."""
    return {Cell.of(line).key() for line in lines}


class Running:
    """One cell on its way."""

    def __init__(self, race: Race, cell: Cell) -> None:
        self.race, self.cell, self.arm = race, cell, ARMS[cell.arm]
        il = race.irreducible(cell) if self.arm.needs_il else None
        self.il_seconds = float(il.seconds) if il is not None else 0.0
        self.steps = cell.steps(race.times, self.il_seconds)
        # A switch that comes early leaves time for more steps.
        capacity = max(self.steps, cell.steps(race.times, self.il_seconds, scoring=0))
        self.trainer = race.trainer(cell, self.steps, capacity)
        self.stream = torch.cuda.Stream() if race.train.device.type == "cuda" else None
        if self.stream is not None:  # all of this was made on another one
            self.stream.wait_stream(torch.cuda.current_stream())
        self.error: str | None = None
        self._planned = self.trainer.schedule.stop
        self.evaluator = Evaluator(
            self.trainer.model, race.data(cell)[1], num_classes=race.num_classes,
            precision=race.precision, capture=False,
        )  # fmt: skip
        self.curve: list[tuple[float, float]] = []

    @property
    def finished(self) -> bool:
        return self.error is not None or self.trainer.step >= self.steps

    def advance(self) -> None:
        """Some steps. If the switch has come, what is left of the budget is shared out anew."""
        with torch.cuda.stream(self.stream):
            try:
                self.trainer.train(min(CHUNK, self.steps - self.trainer.step))
                if self.trainer.step >= self.steps:
                    self.trainer.flush()
            except TooFewFiniteScoresError as problem:  # a run that diverged is a result too
                self.error = str(problem)
                return
            stop = self.trainer.schedule.stop
            if stop != self._planned:
                self._planned = stop
                self.steps = self.cell.steps(self.race.times, self.il_seconds, scoring=int(stop))
                self.trainer.change_length(self.steps, rate(self.cell, self.steps))
            looks = len(self.curve) + 1
            if self.cell.split == "tune" and self.trainer.step * LOOKS >= looks * self.steps:
                self.curve.append((self.seconds(), round(100 * self.evaluator().accuracy, 3)))

    def seconds(self) -> float:
        """Wall clock of this run so far if it were alone, the IL included."""
        times, trainer = self.race.times, self.trainer
        scoring = min(trainer.step, trainer.schedule.stop) if self.arm.scores else 0
        scores, plain = (times[kind.key] for kind in kinds(self.cell))
        spent = self.cell.spent_on_il(self.il_seconds)
        return round(spent + (scoring * scores + (trainer.step - scoring) * plain) / 1000, 3)

    def keep_visits(self) -> None:
        """Write the losses of every visit, if that is asked for."""
        plan, folder = self.trainer.rows.plan, self.race.visits
        if folder is not None and isinstance(plan, Visits):
            given = self.race.data(self.cell)[0]
            true = self.race.clean[given.ids.cpu().numpy()]
            name = re.sub(r"[^\w.-]+", "_", self.cell.key())
            plan.save(folder / f"{name}.npz", wrong=given.targets.cpu().numpy() != true)

    def record(self) -> dict[str, Any]:
        """The line of results."""
        with torch.cuda.stream(self.stream):  # where the last steps are
            result, trainer = self.evaluator(), self.trainer
        return {
            **asdict(self.cell),
            "steps": trainer.step,
            "switch": trainer.schedule.stop if 0 < trainer.schedule.stop < math.inf else None,
            "accuracy": round(100 * result.accuracy, 3),
            "loss": round(result.loss, 5) if math.isfinite(result.loss) else None,
            "per_class": [round(100 * value, 2) for value in result.per_class],
            "curve": self.curve,
            "seconds": self.seconds(),
            "scored": trainer.ledger.scored,
            "trained": trainer.ledger.trained,
            "left_out": self._left_out(),
            "wrong": trainer.rows.memory.notes.get("wrong") if trainer.rows.memory else None,
            "il_seconds": round(self.il_seconds, 3) if self.arm.needs_il else None,
            "il_recipe": il_recipe(self.cell) if self.arm.needs_il else None,
            "step_ms": {key: round(value, 4) for key, value in self.race.times.items()},
            "error": self.error,
            **records.about("experiments.fair_clock"),
        }

    def _left_out(self) -> float | None:
        """Share of the rows that the last pass left out."""
        if self.arm.plan is None and not self.arm.drop:
            return None
        data = self.race.data(self.cell)[0]
        return round(1 - self.trainer.rows.num / len(data), 4)


def run(
    race: Race, cells: list[Cell], out: Path, *, side_by_side: int = 1, seconds: float = 1e9
) -> None:
    """Run the cells, several at a time; stop taking new ones after `seconds`.

    If a run fails the others go on, and its error is raised at the end.
    """
    started = time.perf_counter()
    for cell in cells:
        if ARMS[cell.arm].needs_il and cell not in race.failed:
            with race.kept(cell):
                race.irreducible(cell)  # with nothing beside it: its seconds count
    waiting = [cell for cell in cells if cell not in race.failed]
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < side_by_side:
            if time.perf_counter() - started > seconds:
                waiting = []
                break
            with race.kept(cell := waiting.pop(0)):
                running.append(Running(race, cell))
        for entry in list(running):
            record = None
            with race.kept(entry.cell):
                entry.advance()
                record = entry.record() if entry.finished else None
            if record is not None or entry.cell in race.failed:
                running.remove(entry)
            if record is not None:
                records.append(out, record)
                entry.keep_visits()  # after the line, which is worth more
                told = f"{record['accuracy']:.2f} % in {record['steps']} steps"
                print(f"{entry.cell.key()}: {told}", flush=True)
    if race.failed:
        told = "\n".join(f"{cell.key()}: {why}" for cell, why in race.failed.items())
        raise RholossError(
            f"{len(race.failed)} run(s) failed and have no line; the same command runs them again.\n{told}"
        )
