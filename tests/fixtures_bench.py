"""A CIFAR-10 in which a class is a brightness, a model that learns it, and a script to be killed."""

import sys
import time
from pathlib import Path

import numpy as np
from torch import nn

from experiments.bench.cell import Cell
from experiments.bench.irreducible import Recipe

PER_FILE = 80
BASE = {"model": "tiny", "n_b": 4, "n_B": 40, "epochs": 3}
RECIPE = Recipe(epochs=3, batch_size=40, learning_rate=1e-2)


def write_cifar10(root: Path) -> Path:
    rng = np.random.default_rng(0)
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 20, (PER_FILE, 3073), dtype=np.uint8)
        records[:, 0] = rng.integers(0, 10, PER_FILE)
        records[:, 1:] += 22 * records[:, :1]
        records.tofile(folder / name)
    return root


def tiny(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )  # fmt: skip


def cells() -> list[Cell]:
    return [Cell(seed=seed, **BASE) for seed in range(3)]


if __name__ == "__main__":  # root, out: the second run takes long enough to be killed in its middle
    from experiments.bench import run as bench_run
    from experiments.models import MODELS

    MODELS["tiny"] = tiny
    advance = bench_run.Run.advance

    def slowly(self: bench_run.Run, steps: int = 1) -> int:
        time.sleep(60 if self.cell.seed and self.trainer.step else 0)
        return advance(self, 1)

    bench_run.Run.advance = slowly
    root, out = (Path(word) for word in sys.argv[1:])
    bench = bench_run.Bench(root, recipe=RECIPE)
    bench.unfinished.every = 0.0  # after every turn
    bench_run.run(bench, [("kill", cell) for cell in cells()], out, side_by_side=1, progress=False)
