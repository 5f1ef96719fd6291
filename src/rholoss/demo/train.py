"""One run of the demo: the same network, weights and candidates; only the method differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rholoss import Selector
from rholoss.demo.data import NUM_CLASSES, Digits
from rholoss.steplog import read_log

METHODS = ("uniform", "loss", "rho")
CANDIDATES, KEEP, LEARNING_RATE = 320, 0.1, 1e-3
EVALUATIONS = 4  # an epoch
IL_SEED = 2022


def target_model() -> nn.Module:
    """The network that is trained: 784-512-512-10."""
    return nn.Sequential(
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, NUM_CLASSES),
    )


def irreducible_model() -> nn.Module:
    """The smaller network of the irreducible losses, 784-256-10. Dropout: it sees wrong labels too."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, NUM_CLASSES)
    )


def train(
    method: str,
    seed: int,
    irreducible: Any,
    data: Digits,
    test: Digits,
    *,
    epochs: int,
    log: Path,
    on_step: Callable[[float], None],
) -> dict[str, Any]:
    """Train one network; returns its curve and what it cost. The chosen ids are in the file `log`.

    Weights and order are functions of the seed alone, so all methods start from the same weights and
    see the same candidates. The clock stands still while the network is evaluated.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = target_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    order = torch.Generator().manual_seed(1000 + seed)
    log.unlink(missing_ok=True)
    select = Selector(
        method,
        irreducible=irreducible if method == "rho" else None,
        keep=KEEP,
        seed=seed,
        log=log,
    )
    right: list[np.ndarray] = []  # of each step, which points were classified as labelled before it
    per_epoch, accuracy = steps_per_epoch(len(data)), 0.0
    for step in range(epochs * per_epoch):
        if step % per_epoch == 0:
            shuffled = torch.randperm(len(data), generator=order).split(CANDIDATES)
        rows = shuffled[step % per_epoch]
        _, x, y = select(model, (rows, data.x[rows], data.targets[rows]))
        logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        right.append((logits.argmax(1) == y).numpy())
        if is_evaluated(step + 1, per_epoch):
            with select.ledger.paused():
                accuracy = evaluate(model, test)
            select.mark(accuracy)
        on_step(accuracy)
    select.flush()
    ledger = select.ledger
    return {
        "step": [step for step, _, _ in ledger.marks],
        "seconds": [round(seconds, 4) for _, seconds, _ in ledger.marks],
        "accuracy": [round(value, 6) for _, _, value in ledger.marks],
        "correct_by_epoch": shares_by_epoch(right, per_epoch),
        "scored": ledger.scored,
        "trained": ledger.trained,
        "selecting_seconds": round(ledger.scoring_seconds + ledger.dry_run_seconds, 4),
        "ledger": str(ledger),
    }


def steps_per_epoch(rows: int) -> int:
    """An epoch is one pass over the candidates; the last batch may be smaller."""
    return -(-rows // CANDIDATES)


def is_evaluated(steps: int, per_epoch: int) -> bool:
    """Whether an evaluation follows after so many steps: evenly, and at the end of each epoch."""
    return steps * EVALUATIONS // per_epoch > (steps - 1) * EVALUATIONS // per_epoch


@torch.no_grad()
def evaluate(model: nn.Module, test: Digits) -> float:
    """Accuracy on the test digits, whose labels are right."""
    hits: Tensor = model(test.x).argmax(1) == test.targets
    return float(hits.float().mean())


def wrong_by_epoch(log: Path, wrong: np.ndarray, per_epoch: int) -> list[float]:
    """Share of wrong labels among the chosen points of each epoch, from the logged ids."""
    steps = [line["index"] for line in read_log(log) if line["type"] == "step"]
    return shares_by_epoch([wrong[index] for index in steps], per_epoch)


def shares_by_epoch(flags: list[np.ndarray], per_epoch: int) -> list[float]:
    """Of flags for the points of each step: the share that is set, by epoch. Each point counts."""
    cuts = range(0, len(flags), per_epoch)
    return [round(float(np.concatenate(flags[at : at + per_epoch]).mean()), 6) for at in cuts]
