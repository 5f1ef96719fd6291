"""Running cells: prepared once, then side by side on one GPU, results written as they finish."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments import records
from experiments.datasets import CIFAR_MEAN, CIFAR_STD, cifar10, cifar10n
from experiments.fair_clock.arms import ARMS, Arm, Cell, needed_times, read_key, time_key
from experiments.models import ResNet18, SmallCNN
from rholoss.engine import CropFlip, Evaluator, Resident, Trainer, fit_resident, one_cycle
from rholoss.noise import uniform_noise

NUM_CLASSES, NUM_VALIDATION = 10, 5000
NOISE_SEED = 2022
IL_RECIPE = {"epochs": 12, "batch_size": 256, "learning_rate": 4e-3}  # two folds, small CNN
CHUNK = 50  # steps of one run before the next one has its turn


class Race:
    """Data, irreducible losses and step times, made when they are first needed."""

    def __init__(
        self, root: str | None = None, precision: str = "bf16", compile: bool = True
    ) -> None:
        (images, labels), (test_images, test_labels) = cifar10(root)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        common = {"mean": CIFAR_MEAN, "std": CIFAR_STD, "dtype": dtype}
        self.precision, self.compile = precision, compile
        self.train = Resident(images, labels, augment=CropFlip(), **common)
        self.test = Resident(test_images, test_labels, **common)
        noisy, _ = uniform_noise(labels, NUM_CLASSES, 0.1, seed=NOISE_SEED)
        self.labels = {"clean": labels, "noise 10 %": noisy, "worse": cifar10n("worse", root)}
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.rows = {"tune": shuffled[NUM_VALIDATION:], "final": torch.arange(len(labels))}
        self.validation = shuffled[:NUM_VALIDATION]
        self._data: dict[tuple[str, str], tuple[Resident, Resident]] = {}
        self._il: dict[tuple[str, str], Any] = {}
        self.times: dict[str, float] = {}

    def data(self, labels: str, split: str) -> tuple[Resident, Resident]:
        """What is trained on and what it is judged on. Validation labels are as noisy as the others."""
        if (labels, split) not in self._data:
            whole = self.train.with_targets(self.labels[labels])
            device = whole.device
            judged = self.test if split == "final" else whole.take(self.validation.to(device))
            self._data[labels, split] = (whole.take(self.rows[split].to(device)), judged)
        return self._data[labels, split]

    def irreducible(self, labels: str, split: str) -> Any:
        """Cross-fitted, so that every arm may train on everything. The first fit only warms up."""
        if (labels, split) not in self._il:
            data, _ = self.data(labels, split)
            for _ in range(1 if self._il else 2):
                il = fit_resident(SmallCNN, data, folds=2, precision=self.precision, **IL_RECIPE)
            self._il[labels, split] = il
        return self._il[labels, split]

    def trainer(self, cell: Cell, steps: int, arm: Arm | None = None) -> Trainer:
        arm, (data, _) = arm or ARMS[cell.arm], self.data(cell.labels, cell.split)
        torch.manual_seed(cell.seed)
        return Trainer(
            ResNet18().to(memory_format=torch.channels_last),
            data,
            total_steps=steps,
            method=arm.method,
            irreducible=self.irreducible(cell.labels, cell.split) if arm.needs_il else None,
            candidates=cell.n_b * arm.k,
            keep=1 / arm.k,
            learning_rate=one_cycle(cell.lr, steps, warm_up=0.1),
            precision=self.precision,
            compile=self.compile,
            schedule=arm.schedule(steps),
            seed=cell.seed,
        )

    def measure_times(self, cells: list[Cell], steps: int = 150) -> None:
        """Median milliseconds of a step, each kind alone on the device."""
        for method, n_b, k in needed_times(cells):
            key = time_key(method, n_b, k)
            if key in self.times:
                continue
            arm = Arm(key, method, k=k)
            trainer = self.trainer(Cell("clean", "uniform", n_b, 1e-3, 0), steps + 30, arm)
            trainer.train(30)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            marks[0].record()
            for mark in marks[1:]:
                trainer.train(1)
                mark.record()
            torch.cuda.synchronize()
            spans = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
            self.times[key] = statistics.median(spans)
            print(f"{key}: {self.times[key]:.3f} ms", flush=True)


def done(paths: list[Path]) -> set[str]:
    """Keys of the cells that have results."""
    return {read_key(record) for record in records.read(*paths)}


def run(
    race: Race, cells: list[Cell], out: Path, *, side_by_side: int = 6, seconds: float = 1e9
) -> None:
    """Run the cells that are missing, several at a time; stop taking new ones after `seconds`."""
    started, waiting = time.perf_counter(), list(cells)
    running: list[tuple[Cell, Trainer, torch.cuda.Stream | None]] = []
    cuda = race.train.device.type == "cuda"
    while waiting or running:
        while waiting and len(running) < side_by_side:
            if time.perf_counter() - started > seconds:
                waiting = []
                break
            cell = waiting.pop(0)
            il = race.irreducible(cell.labels, cell.split) if ARMS[cell.arm].needs_il else None
            steps = cell.steps(race.times, il.seconds if il is not None else 0.0)
            running.append((cell, race.trainer(cell, steps), torch.cuda.Stream() if cuda else None))
        for entry in list(running):
            cell, trainer, stream = entry
            with torch.cuda.stream(stream):
                trainer.train(min(CHUNK, trainer.total_steps - trainer.step))
                if trainer.step == trainer.total_steps:
                    running.remove(entry)
                    _write(race, cell, trainer, out)


def _write(race: Race, cell: Cell, trainer: Trainer, out: Path) -> None:
    error = None
    try:
        trainer.flush()
    except ValueError as problem:  # a run that diverged is a result too
        error = str(problem)
    evaluator = Evaluator(
        trainer.model,
        race.data(cell.labels, cell.split)[1],
        num_classes=NUM_CLASSES,
        precision=race.precision,
        capture=False,
    )
    result = evaluator()
    il = race._il.get((cell.labels, cell.split)) if ARMS[cell.arm].needs_il else None
    record = {
        **asdict(cell),
        "steps": trainer.total_steps,
        "accuracy": round(100 * result.accuracy, 3),
        "loss": round(result.loss, 5),
        "per_class": [round(100 * value, 2) for value in result.per_class],
        "scored": trainer.ledger.scored,
        "trained": trainer.ledger.trained,
        "il_seconds": None if il is None else round(il.seconds, 3),
        "il_recipe": None if il is None else IL_RECIPE,
        "step_ms": {key: round(value, 4) for key, value in race.times.items()},
        "error": error,
        **records.about("experiments.fair_clock"),
    }
    records.append(out, record)
    print(f"{cell.key()}: {record['accuracy']:.2f} % in {trainer.total_steps} steps", flush=True)
