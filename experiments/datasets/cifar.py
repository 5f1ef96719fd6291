"""CIFAR-10 (binary version) and the human labels of CIFAR-10N."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from experiments.datasets.files import data_dir, need

CIFAR_MEAN, CIFAR_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # as the authors' code
RECORD = 1 + 3072  # a label byte, then red, green and blue planes
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)"
HOME_N = "https://github.com/UCSC-REAL/cifar-10-100n"


class Images(NamedTuple):
    """Images [N, 3, 32, 32] uint8 and labels [N] int64."""

    images: np.ndarray
    labels: np.ndarray


def _records(path: os.PathLike[str]) -> Images:
    raw = np.fromfile(path, np.uint8)
    if len(raw) == 0 or len(raw) % RECORD:
        raise ValueError(
            f"{path} has {len(raw)} bytes, not a multiple of {RECORD}: it was cut off; get it again from "
            f"{HOME}."
        )
    rows = raw.reshape(-1, RECORD)
    return Images(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64))


def cifar10(root: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Train (50,000) and test (10,000)."""
    folder = need(data_dir(root) / "cifar-10-batches-bin", "CIFAR-10", HOME)
    parts = [_records(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
    train = Images(*(np.concatenate([part[field] for part in parts]) for field in range(2)))
    return train, _records(folder / "test_batch.bin")


def cifar10n(kind: str, root: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Human labels of the 50,000 training images: 'aggre', 'worse', 'random1', 'random2' or 'random3'."""
    path = need(data_dir(root) / "cifar-n" / "CIFAR-10_human.npz", "CIFAR-10N", HOME_N)
    with np.load(path) as labels:
        names = [name for name in labels.files if name.lower().startswith(kind.lower())]
        if len(names) != 1:
            raise ValueError(f"`kind` is {kind!r}, but {path} has {', '.join(labels.files)}.")
        return labels[names[0]].astype(np.int64)
