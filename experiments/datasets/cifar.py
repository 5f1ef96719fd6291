"""CIFAR-10 and CIFAR-100 (binary versions) and the human labels of CIFAR-10N and CIFAR-100N."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.datasets.files import data_dir, need

CIFAR_MEAN, CIFAR_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # as the authors' code
PIXELS = 3072  # red, green and blue planes
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)"
HOME_N = "https://github.com/UCSC-REAL/cifar-10-100n (its folder data)"
# MD5 of the archives, as that page states them, and what they unpack to.
ARCHIVES = {
    "CIFAR-10": (
        "cifar-10-binary.tar.gz, md5 c32a1d4ab5d03f1284b67883e8d87530, which holds "
        "cifar-10-batches-bin/{data_batch_1, ..., data_batch_5, test_batch}.bin"
    ),
    "CIFAR-100": (
        "cifar-100-binary.tar.gz, md5 03b5dce01913d631647c71ecec9e9cb8, which holds "
        "cifar-100-binary/{train, test}.bin"
    ),
}
# MD5 of the files in that repository.
HUMAN = {
    "CIFAR-10": "CIFAR-10_human.pt, md5 96644db5574813cae939af5f7f2a0aec",
    "CIFAR-100": "CIFAR-100_human.pt, md5 a67b45c1d7992051865b5c755bd68bb1",
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
    classes = 10 if num_labels == 1 else 100
    if labels.max() >= classes:
        raise ValueError(
            f"{path} has the label {labels.max()}, but there are {classes} classes: it is damaged, or "
            f"another file; get it again from {HOME}."
        )
    return Images(rows[:, num_labels:].reshape(-1, 3, 32, 32), labels)


def cifar10(root: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Train (50,000) and test (10,000)."""
    origin = f"{HOME}: {ARCHIVES['CIFAR-10']}"
    folder = need(data_dir(root) / "cifar-10-batches-bin", "CIFAR-10", origin)
    names = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    *parts, test = (_records(need(folder / f"{name}.bin", "CIFAR-10", origin)) for name in names)
    train = Images(*(np.concatenate([part[field] for part in parts]) for field in range(2)))
    return train, test


def cifar100(root: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Train (50,000) and test (10,000), with the 100 fine labels."""
    origin = f"{HOME}: {ARCHIVES['CIFAR-100']}"
    folder = need(data_dir(root) / "cifar-100-binary", "CIFAR-100", origin)
    train, test = (need(folder / f"{name}.bin", "CIFAR-100", origin) for name in ("train", "test"))
    return _records(train, 2), _records(test, 2)


def cifar10n(kind: str, root: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Human labels of the 50,000 training images: 'aggre', 'worse', 'random1', 'random2' or 'random3'."""
    return _human("CIFAR-10", kind, root)


def cifar100n(root: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Human (fine) labels of the 50,000 training images of CIFAR-100."""
    return _human("CIFAR-100", "noisy", root)


def _human(name: str, kind: str, root: str | os.PathLike[str] | None) -> np.ndarray:
    folder = data_dir(root) / "cifar-n"
    path = folder / f"{name}_human.npz"  # the same labels, packed
    if not path.exists():
        path = need(folder / f"{name}_human.pt", f"{name}N", f"{HOME_N}: {HUMAN[name]}")
    try:
        labels = {key.replace("_label", ""): value for key, value in _arrays(path).items()}
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} is not the file that was published; get it again from {HOME_N}: {HUMAN[name]}."
        ) from error
    if kind not in labels:
        raise ValueError(
            f"`kind` is {kind!r}, but {path} has {', '.join(labels)}; choose one of these."
        )
    return np.asarray(labels[kind], np.int64)


def _arrays(path: Path) -> dict[str, Any]:
    """Arrays by name, of a .npz, or of a .pt as it is published: a pickle that may hold nothing else."""
    if path.suffix == ".npz":
        with np.load(path) as packed:
            return {key: packed[key] for key in packed.files}
    import torch

    rebuild = np.empty(0).__reduce__()[0]  # numpy's own, which each version has elsewhere
    allowed = [np.ndarray, np.dtype, np.dtypes.Int64DType, rebuild]
    allowed.append((rebuild, "numpy.core.multiarray._reconstruct"))  # as the files were written
    with torch.serialization.safe_globals(allowed):
        found: dict[str, Any] = torch.load(path, weights_only=True)
    return found
