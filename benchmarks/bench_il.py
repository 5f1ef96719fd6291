"""Irreducible losses in seconds: the paper's small CNN on half of CIFAR-10, the other half scored.

    python benchmarks/bench_il.py --data DIR [--out benchmarks/results/il.jsonl]

Even rows are scored, odd rows train the model. The reference is 40 epochs at the paper's constant learning
rate, the lowest loss of all epochs. Targets: at most 2 s, a mean loss within 0.02 of the reference. Seconds
include capture, evaluation and scoring; a first fit, not shown, loads the libraries. Each row is appended
to `--out` as it is measured.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from experiments import records
from experiments.datasets import CIFAR_MEAN, CIFAR_STD, cifar10
from experiments.models import SmallCNN
from rholoss.engine import CropFlip, Resident, Trainer, fit_resident, losses_of


def reference(holdout: Resident, score: Resident, epochs: int = 40) -> tuple[float, float]:
    """Seconds and lowest mean loss of a long fit at a constant rate."""
    started = time.perf_counter()
    torch.manual_seed(0)
    steps = len(holdout) // 320
    model = SmallCNN().to(memory_format=torch.channels_last)
    trainer = Trainer(
        model, holdout, total_steps=epochs * steps, method="uniform", candidates=320, keep=1.0,
        learning_rate=1e-3, precision="bf16",
    )  # fmt: skip
    lowest = float("inf")
    for _ in range(epochs):
        trainer.train(steps)
        lowest = min(lowest, losses_of(model, score, precision="bf16").mean().item())
    return time.perf_counter() - started, lowest


FITS = (
    (128, 6, 2e-3), (128, 10, 2e-3), (256, 8, 2e-3), (256, 8, 4e-3), (256, 12, 2e-3), (256, 12, 4e-3),
    (256, 20, 2e-3), (512, 12, 4e-3), (512, 20, 4e-3),
)  # fmt: skip


def rows(holdout: Resident, score: Resident) -> Iterator[dict[str, Any]]:
    """One a fit, and the reference: seconds and mean loss on the points that are scored."""
    fit_resident(SmallCNN, holdout, score=score, epochs=1, precision="bf16")
    for batch_size, epochs, rate in FITS:
        il = fit_resident(
            SmallCNN, holdout, score=score, epochs=epochs, batch_size=batch_size, learning_rate=rate,
            precision="bf16",
        )  # fmt: skip
        fit = f"batch {batch_size}, {epochs} epochs, rate {rate}"
        yield {"fit": fit, "s": il.seconds, "loss": il.lookup(score.ids.cpu()).mean().item()}
    seconds, lowest = reference(holdout, score)
    yield {"fit": "reference: 40 epochs, batch 320, constant 1e-3", "s": seconds, "loss": lowest}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    (images, labels), _ = cifar10(arguments.data)
    common = {"mean": CIFAR_MEAN, "std": CIFAR_STD, "dtype": torch.bfloat16, "augment": CropFlip()}
    even, odd = range(0, len(images), 2), range(1, len(images), 2)
    score = Resident(images[even], labels[even], ids=list(even), **common)
    holdout = Resident(images[odd], labels[odd], ids=list(odd), **common)
    started = datetime.datetime.now().isoformat(timespec="minutes")  # rows of one run go together
    about = {**records.about("benchmarks.bench_il"), "started": started}
    about["command"] = "python benchmarks/bench_il.py"
    for row in rows(holdout, score):
        print(row, flush=True)
        if arguments.out:
            records.append(arguments.out, {**row, **about})


if __name__ == "__main__":
    main()
