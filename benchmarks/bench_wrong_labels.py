"""Wrong labels by remembered losses: how many are there, which are they, and is the run better without them?

    python -m benchmarks.bench_wrong_labels [--problem digits] [--labels NAME ...] [--seeds 0 1] [--passes 16]

Digits: a network of two layers on the demo's 12,000 digits, a quarter of an hour on a CPU. CIFAR-10: a small
CNN on 6,000 images, cropped and flipped, some four minutes a run of 60 passes (data as for the experiments).
Labels are made wrong in known ways, learning rate up and down to zero. Each way to leave rows out
(`rholoss.Remembered`) is a run; what it took the share of wrong labels for, what it left out in its last
pass, and the test accuracy (clean labels) are a line. Each line is appended to the results as it is measured;
lines that are there are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from experiments import records
from experiments.datasets import CIFAR_MEAN, CIFAR_STD, cifar10, cifar10n
from rholoss.demo.data import Digits, load
from rholoss.demo.train import target_model
from rholoss.engine import CropFlip, Evaluator, RandomShare, Resident, Trainer, one_cycle
from rholoss.memory import Epoch, Plan, Situation
from rholoss.noise import structured_noise, uniform_noise
from rholoss.progress import Bar

RESULTS = Path(__file__).parent / "results"
FILES = {"digits": "wrong_labels.jsonl", "cifar10": "wrong_labels_cifar10.jsonl"}
PASSES = {"digits": 16, "cifar10": 60}
IMAGES = 6000  # of CIFAR-10
PAIRS = ((1, 7), (4, 9), (3, 5), (6, 0))  # of the first some are labelled as the second
BY_HUMANS = "40 %, by humans"
LABELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "clean": lambda true: true,
    "10 %": lambda true: uniform_noise(true, 10, 0.1).labels,
    "20 %": lambda true: uniform_noise(true, 10, 0.2).labels,
    "40 %": lambda true: uniform_noise(true, 10, 0.4).labels,
    "60 %": lambda true: uniform_noise(true, 10, 0.6).labels,
    "four classes, 40 % of each": lambda true: (
        structured_noise(true, PAIRS, 0.4, choose="random").labels
    ),
    BY_HUMANS: lambda true: cifar10n("worse")[: len(true)],  # of CIFAR-10 alone
}
CHANCE = math.log(10)
PLANS: dict[str, Callable[[], Plan]] = {
    "all rows": lambda: RandomShare(1.0),
    "never better than chance": lambda: rho.Remembered(CHANCE, measured=False, again=0),
    "measured": lambda: rho.Remembered(),
    "measured, with chance": lambda: rho.Remembered(CHANCE, again=0),
    "measured, with chance, on probation before": lambda: rho.Remembered(CHANCE),
}


class Run(NamedTuple):
    """Rows of the last pass, the share of wrong labels that the plan found, and the test accuracy."""

    rows: Tensor
    told: float | None
    accuracy: float


def digits(given: np.ndarray, plan: Plan, passes: int, seed: int) -> Run:
    """A network of two layers, a plain loop."""
    torch.manual_seed(seed)
    splits = load()
    digits, test = Digits(splits["train"]), Digits(splits["test"])
    digits.targets = torch.as_tensor(given).long()
    train = rho.WithIndex(digits)
    model = target_model()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = rho.Planned(train, plan, passes=passes, seed=seed)
    loader = DataLoader(train, batch_size=32, sampler=rows)
    for number in range(passes):
        for step, (index, x, y) in enumerate(loader):
            progress = (number + step * 32 / len(rows)) / passes
            optimizer.param_groups[0]["lr"] = 2e-3 * min(progress / 0.1, (1 - progress) / 0.9)
            rows.remember(index, F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert rows.order is not None
    with torch.no_grad():
        accuracy = (model(test.x).argmax(1) == test.targets).float().mean()
    return Run(rows.order, rows.wrong, float(accuracy))


def images(given: np.ndarray, plan: Plan, passes: int, seed: int) -> Run:
    """A small CNN in the engine, batches of 64; as many steps as if no row were left out."""
    torch.manual_seed(seed)
    (x, _), (test_x, test_y) = cifar10()
    common: dict[str, Any] = {"mean": CIFAR_MEAN, "std": CIFAR_STD}
    data = Resident(x[: len(given)], given, augment=CropFlip(), **common)
    model, dealt = small_cnn(), [torch.empty(0)]

    def watched(situation: Situation) -> Epoch:
        epoch = plan(situation)
        dealt[0] = epoch.rows
        return epoch

    steps = passes * len(given) // 64
    trainer = Trainer(
        model, data, total_steps=steps, method="uniform", candidates=64, keep=1.0, plan=watched,
        learning_rate=one_cycle(3e-3, steps, warm_up=0.1), seed=seed,
    )  # fmt: skip
    trainer.train(steps)
    result = Evaluator(model, Resident(test_x, test_y, **common), num_classes=10)()
    assert trainer.rows.memory is not None
    return Run(dealt[0], trainer.rows.memory.notes.get("wrong"), result.accuracy)


def small_cnn(width: int = 32) -> nn.Module:
    """Four convolutions: what a CPU trains in minutes, and what can learn 600 wrong labels by heart."""
    layers: list[nn.Module] = []
    for before, channels, halve in (
        (3, width, True), (width, 2 * width, True), (2 * width, 4 * width, False),
        (4 * width, 4 * width, False),
    ):  # fmt: skip
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)] if halve else [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


PROBLEMS: dict[str, Callable[[np.ndarray, Plan, int, int], Run]] = {
    "digits": digits,
    "cifar10": images,
}


def true_labels(problem: str) -> np.ndarray:
    """Of the rows that are trained on."""
    return np.array(load()["train"].true) if problem == "digits" else cifar10()[0].labels[:IMAGES]


def judged(run: Run, is_wrong: np.ndarray) -> dict[str, Any]:
    """What a line says of a run. What is left out is that of the last pass."""
    out, wrong = torch.ones(len(is_wrong), dtype=torch.bool), torch.as_tensor(is_wrong)
    out[run.rows] = False
    return {
        "wrong": round(float(wrong.float().mean()), 4),
        "told": round(run.told or 0.0, 4),
        "left_out": round(float(out.float().mean()), 4),
        "precision": round(float(wrong[out].float().mean()), 4) if out.any() else None,
        "recall": round(float(out[wrong].float().mean()), 4) if wrong.any() else None,
        "accuracy": round(100 * run.accuracy, 2),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problem", choices=list(PROBLEMS), default="digits")
    sets, plans = ("; ".join(names).replace("%", "%%") for names in (LABELS, PLANS))
    parser.add_argument(
        "--labels", nargs="+", choices=list(LABELS), metavar="NAME", help=f"some of: {sets}"
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        choices=list(PLANS),
        default=list(PLANS),
        metavar="NAME",
        help=f"some of: {plans}",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--passes", type=int)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args(words)
    out = a.out or RESULTS / FILES[a.problem]
    labels = a.labels or [name for name in LABELS if name != BY_HUMANS]
    fields = ("labels", "plan", "seed", "passes")
    asked = itertools.product(a.seeds, labels, a.plans)
    cells = [(name, plan, seed, a.passes or PASSES[a.problem]) for seed, name, plan in asked]
    todo = records.missing(out, fields, cells)
    true = true_labels(a.problem)
    with Bar(len(todo), "wrong labels") as bar:
        for cell in todo:
            name, plan, seed, passes = cell
            given = LABELS[name](true)
            run = PROBLEMS[a.problem](given, PLANS[plan](), passes, seed)
            found = judged(run, given != true)
            about = records.about("benchmarks.bench_wrong_labels")
            records.append(out, {**dict(zip(fields, cell, strict=True)), **found, **about})
            bar.advance(note=f"{name}, {plan}: {found['accuracy']} %")


if __name__ == "__main__":
    main()
