"""CIFAR-10 and CIFAR-100 (binary versions) and the human labels of CIFAR-10N and CIFAR-100N."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from experiments.datasets.files import data_dir, need

CIFAR_MEAN, CIFAR_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # as the authors' code
PIXELS = 3072  # red, green and blue planes
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)"
HOME_N = "https://github.com/UCSC-REAL/cifar-10-100n"
# MD5 of the archives, as that page states them.
ARCHIVES = {
    "CIFAR-10": "cifar-10-binary.tar.gz, md5 c32a1d4ab5d03f1284b67883e8d87530",
    "CIFAR-100": "cifar-100-binary.tar.gz, md5 03b5dce01913d631647c71ecec9e9cb8",
}


class Images(NamedTuple):
    """Images [N, 3, H, W] uint8 and labels [N] int64."""

    images: np.ndarray
    labels: np.ndarray


def _records(path: os.PathLike[str], num_labels: int = 1) -> Images:
    """Records of label bytes, of which the last counts, and pixels."""
    record = num_labels + PIXELS
    raw = np.fromfile(path, np.uint8)
    if len(raw) == 0 or len(raw) % record:
        raise ValueError(
            f"{path} has {len(raw)} bytes, not a multiple of {record}: it was cut off; get it again from "
            f"{HOME}."
        )
    rows = raw.reshape(-1, record)
    labels = rows[:, num_labels - 1].astype(np.int64)
    return Images(rows[:, num_labels:].reshape(-1, 3, 32, 32), labels)


def cifar10(root: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Train (50,000) and test (10,000)."""
    origin = f"{HOME}: {ARCHIVES['CIFAR-10']}"
    folder = need(data_dir(root) / "cifar-10-batches-bin", "CIFAR-10", origin)
    parts = [_records(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
    train = Images(*(np.concatenate([part[field] for part in parts]) for field in range(2)))
    return train, _records(folder / "test_batch.bin")


def cifar100(root: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Train (50,000) and test (10,000), with the 100 fine labels."""
    origin = f"{HOME}: {ARCHIVES['CIFAR-100']}"
    folder = need(data_dir(root) / "cifar-100-binary", "CIFAR-100", origin)
    return _records(folder / "train.bin", 2), _records(folder / "test.bin", 2)


def cifar10n(kind: str, root: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Human labels of the 50,000 training images: 'aggre', 'worse', 'random1', 'random2' or 'random3'."""
    return _human("CIFAR-10", kind, root)


def cifar100n(root: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Human (fine) labels of the 50,000 training images of CIFAR-100."""
    return _human("CIFAR-100", "noisy_label", root)


def _human(name: str, kind: str, root: str | os.PathLike[str] | None) -> np.ndarray:
    path = need(data_dir(root) / "cifar-n" / f"{name}_human.npz", f"{name}N", HOME_N)
    with np.load(path) as labels:
        names = [key for key in labels.files if key.lower().startswith(kind.lower())]
        if len(names) != 1:
            raise ValueError(f"`kind` is {kind!r}, but {path} has {', '.join(labels.files)}.")
        return labels[names[0]].astype(np.int64)
