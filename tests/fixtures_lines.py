"""Lines of runs that are made by hand, and a study that they are of."""

import json
from dataclasses import asdict, replace

from experiments.bench.cell import Cell, Group, Study
from experiments.bench.claims import Compare
from experiments.bench.numbers import epochs_to

UNIFORM, RHO = Cell(epochs=4), Cell(method="rho", il="resnet18, clean holdout", epochs=4)
GROUP = Group(
    "Clean: a group",
    {"uniform": UNIFORM, "RHO-LOSS": RHO},
    (50, 70),
    {"RHO-LOSS": "1 / 2 (70)"},
    ("epochs", "curves", "shares", "speedup", "classes", "share_curves", "il_curves"),
)
STUDY = Study(
    "made", "A made study", (GROUP, Group("Another", {"loss": Cell(method="loss")})), seeds=2
)


def line(cell, accuracies, seed=0, **more):
    return {
        "study": "made",
        **asdict(replace(cell, seed=seed)),
        "steps": 10 * len(accuracies),
        "steps_per_epoch": 10,
        "eval": [[10 * (i + 1), accuracy] for i, accuracy in enumerate(accuracies)],
        "il_eval": [],
        "per_class": [10.0, 60.0, None],
        "shares": {"corrupted": [0.1, 0.3], "correct": [0.2, 0.4]},
        "error": None,
        "device": "cpu",
        "torch": "2",
        "precision": "fp32",
        "date": "2026-01-01",
        **more,
    }


def write(out, *lines):
    path = out / "made" / "runs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


def sooner(factor=1.0):
    return Compare("Clean: a group", "RHO-LOSS", lambda run: epochs_to(run, 50), "uniform", factor)
