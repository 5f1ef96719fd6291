"""How many candidates are worth their cost?

    python -m benchmarks.bench_candidates [--candidates 64 96 160 320 640] [--seeds 0 1 2] [--steps 600]

RHO-LOSS chooses 32 of so many of the demo's digits (a tenth of the labels wrong); uniform, for comparison,
takes 32 as they come. A network of two layers, constant learning rate; test accuracy at the same moments,
once counted in steps and once in arithmetic: a trained point is three forward passes, a scored one is one, so
that a step of 32 out of 320 costs 4.3 uniform ones. Some minutes on a CPU. Each line is appended to `--out`
as it is measured; lines that are there are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from benchmarks.bench_staleness import MOMENTS, K, accuracy_of, irreducible
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rholoss as rho
from experiments import records
from rholoss.demo.data import Digits, load
from rholoss.demo.train import target_model
from rholoss.ledger import BACKWARD_FORWARDS
from rholoss.progress import Bar

RESULTS = Path(__file__).parent / "results" / "candidates.jsonl"
TRAINED = (1 + BACKWARD_FORWARDS) * K  # forward passes that a step trains for


def cost(candidates: int) -> float:
    """Of a step, in uniform ones."""
    return 1 + (candidates if candidates > K else 0) / TRAINED


def run(candidates: int, seed: int, steps: int, il: rho.Irreducible) -> dict[str, dict[int, float]]:
    """Test accuracy in % at some moments: by steps, and by arithmetic in uniform steps."""
    moments = sorted({min(moment, steps) for moment in MOMENTS})
    affordable = {moment: max(1, int(moment / cost(candidates))) for moment in moments}
    torch.manual_seed(seed)
    train, model = rho.WithIndex(Digits(load()["train"])), target_model()
    optimizer = torch.optim.AdamW(model.parameters())
    select = (
        rho.Selector("rho", irreducible=il, k=K) if candidates > K else rho.Selector("uniform", k=K)
    )
    loader = DataLoader(train, batch_size=candidates, shuffle=True, drop_last=True)
    forever = itertools.chain.from_iterable(itertools.repeat(loader))
    at = {}
    for step, batch in zip(range(1, steps + 1), forever, strict=False):
        _, x, y = select(model, batch)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in moments or step in affordable.values():
            at[step] = accuracy_of(model)
    by_cost = {moment: at[step] for moment, step in affordable.items()}
    return {"by_steps": {moment: at[moment] for moment in moments}, "by_cost": by_cost}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--candidates", nargs="+", type=int, default=[64, 96, 160, 320, 640])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    a = parser.parse_args(words)
    if min(a.candidates) <= K:
        parser.error(f"`--candidates` must be more than the {K} that are chosen.")
    fields = ("candidates", "seed", "steps")
    asked = [(num, seed, a.steps) for seed in a.seeds for num in (K, *a.candidates)]
    todo = records.missing(a.out, fields, asked)
    if not todo:
        return
    il = irreducible()
    with Bar(len(todo), "candidates") as bar:
        for cell in todo:
            line = {**dict(zip(fields, cell, strict=True)), **run(*cell, il)}
            records.append(a.out, {**line, **records.about("benchmarks.bench_candidates")})
            bar.advance(note=f"{K} of {cell[0]}: {line['by_steps']}")


if __name__ == "__main__":
    main()
