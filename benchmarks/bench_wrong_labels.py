"""Wrong labels by remembered losses: how many are there, which are they, and is the run better without them?

    python -m benchmarks.bench_wrong_labels [--labels NAME ...] [--seeds 0 1] [--passes 16]

A network of two layers on the demo's 12,000 digits, with labels made wrong in known ways, learning rate up
and down to zero; a quarter of an hour on a CPU. Each way to leave rows out (`rholoss.Remembered`) is a run;
what it took the share of wrong labels for, what it left out in its last pass, and the test accuracy (clean
labels) are a line. Each line is appended to `--out` as it is measured; lines that are there are not
measured again.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from experiments import records
from rholoss.demo.data import Digits, load
from rholoss.demo.train import target_model
from rholoss.engine import RandomShare
from rholoss.memory import Plan
from rholoss.noise import structured_noise, uniform_noise
from rholoss.progress import Bar

RESULTS = Path(__file__).parent / "results" / "wrong_labels.jsonl"
PAIRS = ((1, 7), (4, 9), (3, 5), (6, 0))  # of the first some are labelled as the second
LABELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "clean": lambda true: true,
    "10 %": lambda true: uniform_noise(true, 10, 0.1).labels,
    "20 %": lambda true: uniform_noise(true, 10, 0.2).labels,
    "40 %": lambda true: uniform_noise(true, 10, 0.4).labels,
    "60 %": lambda true: uniform_noise(true, 10, 0.6).labels,
    "four classes, 40 % of each": lambda true: (
        structured_noise(true, PAIRS, 0.4, choose="random").labels
    ),
}
CHANCE = math.log(10)
PLANS: dict[str, Callable[[], Plan]] = {
    "all rows": lambda: RandomShare(1.0),
    "never better than chance": lambda: rho.Remembered(CHANCE, measured=False),
    "measured": lambda: rho.Remembered(),
    "measured, with chance": lambda: rho.Remembered(CHANCE),
    "mean of all visits": lambda: rho.Remembered(CHANCE, by="mean"),
}


def run(given: np.ndarray, true: np.ndarray, plan: Plan, passes: int, seed: int) -> dict[str, Any]:
    """Train once. What is left out is that of the last pass."""
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
        trained = torch.zeros(len(given), dtype=torch.bool)
        for step, (index, x, y) in enumerate(loader):
            progress = (number + step * 32 / len(rows)) / passes
            optimizer.param_groups[0]["lr"] = 2e-3 * min(progress / 0.1, (1 - progress) / 0.9)
            rows.remember(index, F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained[index] = True
    is_wrong = torch.as_tensor(given != true)
    out = ~trained
    with torch.no_grad():
        accuracy = (model(test.x).argmax(1) == test.targets).float().mean()
    return {
        "wrong": round(float(is_wrong.float().mean()), 4),
        "told": round(rows.wrong or 0.0, 4),
        "left_out": round(float(out.float().mean()), 4),
        "precision": round(float(is_wrong[out].float().mean()), 4) if out.any() else None,
        "recall": round(float(out[is_wrong].float().mean()), 4) if is_wrong.any() else None,
        "accuracy": round(100 * float(accuracy), 2),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--labels", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args(words)
    fields = ("labels", "plan", "seed", "passes")
    asked = itertools.product(a.seeds, a.labels, a.plans)
    cells = [(labels, plan, seed, a.passes) for seed, labels, plan in asked]
    todo = records.missing(a.out, fields, cells)
    true = np.array(load()["train"].true)
    with Bar(len(todo), "wrong labels") as bar:
        for cell in todo:
            labels, plan, seed, passes = cell
            found = run(LABELS[labels](true), true, PLANS[plan](), passes, seed)
            about = records.about("benchmarks.bench_wrong_labels")
            records.append(a.out, {**dict(zip(fields, cell, strict=True)), **found, **about})
            bar.advance(note=f"{labels}, {plan}: {found['accuracy']} %")


if __name__ == "__main__":
    main()
