"""Result lines of the fair race, made by hand, and a race that is small enough for a test."""

import numpy as np
from torch import nn

from experiments.fair_clock import race as racing
from experiments.fair_clock.arms import Cell
from experiments.fair_clock.race import Race


def line(arm="uniform", accuracy=90.0, seed=0, **others):
    cell = Cell(
        **{"labels": "clean", "n_b": 128, "lr": 1e-3, "split": "tune", **others}, arm=arm, seed=seed
    )
    about = {"device": "a GPU", "torch": "2", "date": "today", "command": "python", "error": None}
    return {**cell.__dict__, "accuracy": accuracy, **about}


def tiny_model(num_classes):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, num_classes))


def tiny_race(tmp_path, monkeypatch):
    """A race over forty images a file, on the CPU."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        lines = rng.integers(0, 256, (40, 3073), dtype=np.uint8)
        lines[:, 0] %= 10
        lines.tofile(folder / name)
    monkeypatch.setattr(racing, "NUM_VALIDATION", 40)
    monkeypatch.setattr(racing, "IL_RECIPE", {"batch_size": 32, "learning_rate": 1e-3})
    monkeypatch.setattr(racing, "CHUNK", 2)
    for name in ("ResNet18", "SmallCNN"):
        monkeypatch.setattr(racing, name, tiny_model)
    monkeypatch.setattr(racing, "Folded", lambda *given: None)  # there is nothing to fold
    made = Race("cifar10", str(tmp_path), precision="fp32", compile=False)
    made.times = {"uniform 8 of 8": 1.0, "scoring 8 of 32 by annealed": 2.0}
    made.times |= {f"planned 8 of 8 by {a}": 1.0 for a in ("annealed", "remembered", "random half")}
    return made
