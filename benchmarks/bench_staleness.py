"""What does it cost to choose by weights that are some steps old?

    python -m benchmarks.bench_staleness [--ages 0 1 2 4 8 16] [--rates 1e-3 1e-4] [--seeds 0 1 2]

RHO-LOSS chooses 32 of 320 of the demo's digits (a tenth of the labels wrong) by the weights that a network
of two layers had so many steps ago, as overlapped scoring (one step) and scoring workers (several) do; and
uniform, for comparison. *Rescored*: the old weights choose 96, of which the newest choose 32. Constant
learning rate; test accuracy at four moments. Some minutes on a CPU. Each line is appended to `--out` as it
is measured; lines that are there are not measured again.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from experiments import records
from rholoss.demo.data import Digits, load
from rholoss.demo.train import target_model
from rholoss.progress import Bar

RESULTS = Path(__file__).parent / "results" / "staleness.jsonl"
CANDIDATES, K, RESCORED = 320, 32, 96
UNIFORM, CHOSEN, TWICE = "uniform", "rho", "rho, rescored"
MOMENTS = (50, 150, 300, 600)


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def irreducible() -> rho.Irreducible:
    """Irreducible losses of the demo's training rows."""
    splits = load()
    torch.manual_seed(0)
    return rho.fit_irreducible(
        small_model, Digits(splits["holdout"]), score=rho.WithIndex(Digits(splits["train"]))
    )


@functools.cache
def test_digits() -> Digits:
    """Of the demo; unpacking takes a moment."""
    return Digits(load()["test"])


def accuracy_of(model: nn.Module) -> float:
    """On the demo's test digits, in %."""
    test = test_digits()
    with torch.no_grad():
        right = (model(test.x).argmax(1) == test.targets).float().mean()
    return round(100 * float(right), 2)


class Old:
    """The model as it was `age` steps ago; as it was at first, before there were so many."""

    def __init__(self, model: nn.Module, age: int) -> None:
        self.model, self.copy = model, copy.deepcopy(model)
        self.states: collections.deque[Any] = collections.deque(maxlen=age + 1)

    def __call__(self) -> nn.Module:
        self.states.append({k: v.clone() for k, v in self.model.state_dict().items()})
        self.copy.load_state_dict(self.states[0])
        return self.copy


def run(
    way: str, age: int, rate: float, seed: int, steps: int, il: rho.Irreducible
) -> dict[int, float]:
    """Test accuracy in % at some steps."""
    train = rho.WithIndex(Digits(load()["train"]))
    torch.manual_seed(seed)
    model = target_model()
    old, optimizer = Old(model, age), torch.optim.AdamW(model.parameters(), lr=rate)
    choices = {
        UNIFORM: [(rho.Selector("uniform", k=K), lambda: model)],
        CHOSEN: [(rho.Selector("rho", irreducible=il, k=K), old)],
        TWICE: [
            (rho.Selector("rho", irreducible=il, k=RESCORED), old),
            (rho.Selector("rho", irreducible=il, k=K), lambda: model),
        ],
    }[way]
    loader = DataLoader(train, batch_size=CANDIDATES, shuffle=True, drop_last=True)
    forever = itertools.chain.from_iterable(itertools.repeat(loader))
    found = {}
    for step, batch in zip(range(1, steps + 1), forever, strict=False):
        for select, scorer in choices:
            batch = select(scorer(), batch)
        _, x, y = batch
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in MOMENTS or step == steps:
            found[step] = accuracy_of(model)
    return found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 1e-4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args(words)
    ways = [(UNIFORM, 0), *((CHOSEN, age) for age in a.ages)]
    ways += [(TWICE, age) for age in a.ages if age]
    fields = ("way", "age", "rate", "seed", "steps")
    asked = [(*way, rate, seed, a.steps) for seed in a.seeds for rate in a.rates for way in ways]
    todo = records.missing(a.out, fields, asked)
    if not todo:
        return
    il = irreducible()
    with Bar(len(todo), "staleness") as bar:
        for cell in todo:
            accuracy = run(*cell, il)
            line = {**dict(zip(fields, cell, strict=True)), "accuracy": accuracy}
            records.append(a.out, {**line, **records.about("benchmarks.bench_staleness")})
            bar.advance(note=f"{cell[0]}, {cell[1]} steps old: {accuracy}")


if __name__ == "__main__":
    main()
